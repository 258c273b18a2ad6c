"""The means of training: what they are over, in rows of training and of validations, also after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn

import trainrun
from tests.quiet_runs import QUIET
from trainrun.cli.main import main
from trainrun.errors import TrainrunError
from trainrun.interfaces import StepOutput

SIZE, STEPS = 100, 15  # of a batch of digits, and of an epoch of 1,438 samples
WORDS = (*QUIET, "monitor.metrics_file=true", f"data.batch_size={SIZE}", "trainer.max_epochs=4", "seed=3")


def rows_of(kind: str, name: str, *words: str) -> list[dict[str, Any]]:
    run = trainrun.train(*WORDS, *words, f"output_dir={name}")
    return [row for row in run.metrics if row["kind"] == kind]


def sizes(epoch_steps: int = STEPS) -> list[int]:
    return [SIZE] * (epoch_steps - 1) + [1438 - SIZE * (epoch_steps - 1)]


@pytest.fixture(scope="module")
def each_step(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A row for every step."""
    return rows_of("train", str(tmp_path_factory.mktemp("each") / "run"), "monitor.log_every_n_steps=1")


def mean(rows: list[dict[str, Any]], name: str, first: int, last: int) -> float:
    """Over the samples of the steps `first` to `last`, counted from 1."""
    items = [sizes()[(step - 1) % STEPS] for step in range(first, last + 1)]
    values = [rows[step - 1][name] for step in range(first, last + 1)]
    return sum(value * count for value, count in zip(values, items, strict=True)) / sum(items)


@pytest.mark.parametrize("log_every", [7, 50, 1000])
def test_row_of_a_validation_has_the_loss_since_the_validation_before(
    log_every: int, each_step: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows = rows_of("eval", str(tmp_path / "run"), f"monitor.log_every_n_steps={log_every}")
    assert [row["step"] for row in rows] == [15, 30, 45, 60]
    for row in rows:
        wanted = mean(each_step, "train/loss", row["step"] - 14, row["step"])
        assert row["train/loss"] == pytest.approx(wanted, rel=1e-6)


def test_rows_of_training_do_not_depend_on_validations(
    each_step: list[dict[str, Any]], tmp_path: Path
) -> None:
    words = ("monitor.log_every_n_steps=20",)
    often = rows_of("train", str(tmp_path / "often"), *words, "trainer.val_check_interval=3step")
    never = rows_of("train", str(tmp_path / "never"), *words, "data.val=null")
    for name in ("step", "train/loss", "train/acc", "lr"):
        assert [row[name] for row in often] == pytest.approx([row[name] for row in never], rel=1e-12)
    assert often[2]["train/loss"] == pytest.approx(mean(each_step, "train/loss", 41, 60), rel=1e-6)


def test_metrics_of_training_are_over_the_sampled_steps(
    each_step: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Every third step of an epoch of 15."""
    words = ("monitor.log_every_n_steps=20", "data.val=null")
    run = trainrun.train(*WORDS, *words, f"output_dir={tmp_path / 'run'}")
    (start,) = [row for row in run.metrics if row["kind"] == "start"]
    assert start["facts"]["sample_every"] == 3
    rows = [row for row in run.metrics if row["kind"] == "train" and row["step"] >= 20]
    for row in rows:
        steps = [s for s in range(row["step"] - 19, row["step"] + 1) if s % 3 == 0]
        seen = [(each_step[s - 1]["train/acc"], sizes()[(s - 1) % STEPS]) for s in steps]
        wanted = sum(acc * count for acc, count in seen) / sum(count for _, count in seen)
        assert row["train/acc"] == pytest.approx(wanted, rel=1e-9)


def test_short_row_has_its_last_step(each_step: list[dict[str, Any]], tmp_path: Path) -> None:
    """Rows 1, 2, 4 and 8 of a run that is shorter than two rows, and its last row, without a sampled step."""
    rows = rows_of("train", str(tmp_path / "run"), "monitor.log_every_n_steps=59", "data.val=null")
    assert [row["step"] for row in rows] == [1, 2, 4, 8, 16, 32, 59, 60]
    assert all("train/acc" in row for row in rows)
    for row in rows[:2]:
        assert row["train/acc"] == pytest.approx(each_step[row["step"] - 1]["train/acc"], rel=1e-9)


def test_every_step_counts_where_rows_are_close(each_step: list[dict[str, Any]], tmp_path: Path) -> None:
    rows = rows_of("train", str(tmp_path / "run"), "monitor.log_every_n_steps=5")
    assert [row["step"] for row in rows] == list(range(5, 61, 5))
    for row in rows:
        for name in ("train/loss", "train/acc"):
            assert row[name] == pytest.approx(mean(each_step, name, row["step"] - 4, row["step"]), rel=1e-6)


class Fails:
    """A hook that ends the run at a step, once."""

    def __init__(self, at: int, mark: str) -> None:
        self.at, self.mark = at, Path(mark)

    def on_step_end(self, run: Any, state: Any) -> None:
        if state.step == self.at and not self.mark.exists():
            self.mark.touch()
            raise RuntimeError("boom")


@pytest.mark.parametrize("at", [8, 17, 31, 44])
def test_rows_after_a_resume_between_log_points_and_validations_are_the_same(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        *WORDS, "monitor.log_every_n_steps=20", "checkpoint.every_n_train_steps=4", "task.metrics=[f1]",
        "trainer.val_check_interval=0.5", "hook.stop._target_=tests.training.test_train_means.Fails",
        f"hook.stop.at={at}",
    )  # fmt: skip
    (tmp_path / "never").touch()
    whole = trainrun.train(*words, "hook.stop.mark=never", "output_dir=whole")
    with pytest.raises(RuntimeError, match="boom"):
        trainrun.train(*words, "hook.stop.mark=once", "output_dir=part")
    assert main(["resume", "part"]) == 0
    part = trainrun.load_run("part")
    kinds = {"train", "eval"}
    timeless = [
        [
            {name: value for name, value in row.items() if "second" not in name and name != "time"}
            for row in run.metrics
            if row["kind"] in kinds
        ]
        for run in (whole, part)
    ]
    assert len(timeless[0]) > 8
    assert timeless[0] == timeless[1]


def test_validation_that_is_not_due_changes_no_later_row(tmp_path: Path) -> None:
    """A run that its time ended, and that goes on, has the rows of one that never stopped."""
    words = (
        "monitor.log_every_n_steps=20",
        "trainer.max_time=1h",
        "hook.stop._target_=tests.training.test_train_means.Stops",
    )
    whole = rows_of("train", str(tmp_path / "whole"), *words, "hook.stop.at=-1")
    part = trainrun.train(*WORDS, *words, "hook.stop.at=24", f"output_dir={tmp_path / 'part'}")
    assert [row["step"] for row in part.metrics if row["kind"] == "eval"] == [15, 24]
    assert main(["resume", str(part.folder), "hook.stop.at=-1"]) == 0
    run = trainrun.load_run(part.folder)
    for kind in ("train", "eval"):
        rows = {row["step"]: row for row in run.metrics if row["kind"] == kind}
        before = {
            row["step"]: row for row in trainrun.load_run(tmp_path / "whole").metrics if row["kind"] == kind
        }
        names = ("train/loss", "train/acc") if kind == "train" else ("train/loss", "train/acc", "val/loss")
        for step, row in before.items():
            assert [rows[step][name] for name in names] == [row[name] for name in names]
    assert len(whole) > 2


class Stops:
    """A hook that asks for the end of a run, as its time does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, run: Any, state: Any) -> None:
        if state.step == self.at:
            state.stop_request = 1


class OddTargets:
    """A task whose first steps have no target, and whose second metric comes in every second batch only."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        x, y = batch
        logits = model(x)
        if model.training:
            self.calls += 1
        count = 0 if model.training and self.calls <= 8 else len(y)
        loss = nn.functional.cross_entropy(logits, y, reduction="sum") * (count > 0)
        sums: dict[str, Tensor] = {"one": torch.tensor(float(count))}
        if self.calls % 2:
            sums["odd"] = torch.tensor(float(count))
        return StepOutput(loss, sums, count=count)


def test_window_without_targets_has_no_loss(tmp_path: Path) -> None:
    words = ("monitor.log_every_n_steps=4", "task._target_=tests.training.test_train_means.OddTargets")
    rows = rows_of("train", str(tmp_path / "run"), *words, "trainer.check_task=false")
    assert [("train/loss" in row, "train/one" in row) for row in rows[:3]] == [
        (False, False), (False, False), (True, True),
    ]  # fmt: skip
    assert {row.get("train/one", 1.0) for row in rows} == {1.0}
    assert {row.get("train/odd", 1.0) for row in rows} == {1.0}


class Changes:
    """A task whose sum has another shape in a later step."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        x, y = batch
        self.calls += model.training
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        return StepOutput(loss, {"part": torch.zeros(1 + self.calls // 4)}, count=len(y))

    def summarize(self, sums: dict[str, Any], count: float) -> dict[str, float]:
        return {"part": float(sums["part"].sum()) / count}


def test_sum_that_changes_its_shape_is_refused(tmp_path: Path) -> None:
    words = ("monitor.log_every_n_steps=20", "task._target_=tests.training.test_train_means.Changes")
    with refused(TrainrunError, "part"):
        rows_of("train", str(tmp_path / "run"), *words, "trainer.check_task=false", "data.val=null")
