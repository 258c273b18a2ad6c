"""Steps that are not finite: written down, left out, gone back from; and never in a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import approve_error
from safetensors.torch import load_file
from things import rows_of, with_setting

from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.cli.main import main
from trainrun.runs.api import load_run

OWN = """
import torch
from torch import nn

def data(count=48, bad=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    x[list(bad)] = torch.nan
    return x, (x[:, 0].nan_to_num() > 0).long()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
    def forward(self, x):
        return self.layers(x)
"""
WORDS = [
    "data.train._target_=own.data", "data.val._target_=own.data", "data.val.seed=1", "model=own.Net",
    "data.num_classes=2", "data.batch_size=4", "trainer.val_check_interval=4",
    "ema=true", "ema.decay=0.9", "monitor.log_every_n_steps=1", "monitor.hardware=false", "monitor.plots=false",
    "monitor.progress_bar=false", "checkpoint.every_n_train_steps=3", "checkpoint.train_time_interval=null",
    "checkpoint.save_top_k=0", "data.engine=resident", "trainer.num_threads=1",
]  # fmt: skip
TWO = "trainer.max_epochs=2"
ENDLESS = "trainer.max_epochs=null"
BAD = "data.train.bad=[17]"


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def steps_of(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["kind"] == "train"]


def last(run: Path) -> Any:
    return read_checkpoint(resolve_checkpoint(run / "checkpoints", "last")).shared


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [leaf for part in parts for leaf in tensors(part)]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def is_finite(state: Any) -> bool:
    return all(bool(value.isfinite().all()) for name, value in state["model"].items() if name != "mask")


def test_stop_writes_down_what_the_step_was_made_of(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, TWO, BAD, "output_dir=run"]) == 1
    run, said = own / "run", capsys.readouterr().err
    (place,) = (run / "nonfinite").iterdir()
    assert str(place) in said
    assert "the loss and 6 values of the batch were NaN" in said
    told = json.loads((place / "rank-00000.json").read_text())
    (batch,) = told["batches"]
    assert 17 in batch["samples"]
    assert batch["tensors"]["0.0"] == {"shape": [4, 6], "nonfinite": 6}
    assert batch["loss_sum"] == "nan"
    assert (told["step"], told["loss_scale"]) == (int(place.name[5:]), None)
    rows = load_file(place / "rank-00000.safetensors")["0.0"]
    assert rows[batch["samples"].index(17)].isnan().all()
    assert int(rows.isnan().sum()) == 6
    assert (status(run)["state"], status(run)["exit_code"]) == ("failed", 1)
    assert is_finite(last(run))
    assert last(run)["train"]["step"] < told["step"]
    assert main(["resume", "run", "trainer.nan_policy=skip"]) == 0  # meets the same step again
    assert status(run)["skipped_steps"] == 2
    assert steps_of(run) == list(range(1, 25))


@pytest.mark.parametrize("memory", ["split", "stop"])
def test_skip_leaves_no_trace_in_the_averages_of_batch_norm(
    own: Path, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trainer.nan_policy=skip", f"trainer.out_of_memory={memory}"]
    assert main([*WORDS, TWO, BAD, "output_dir=run", *words]) == 0
    run = own / "run"
    assert status(run)["skipped_steps"] == 2
    assert is_finite(last(run))
    assert len(list((run / "nonfinite").iterdir())) == 2
    assert capsys.readouterr().out.count("(trainer.nan_policy=skip)") == 1


def test_skip_gives_up_where_too_many_are_left_out(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainrun.training.recovery.nonfinite.LEAST_STEPS", 10)
    monkeypatch.setattr("trainrun.training.recovery.nonfinite.MAX_WRITTEN", 1)
    words = ["data.train.bad=[1,5,9,17,22,30]", "trainer.nan_policy=skip"]
    assert main([*WORDS, TWO, *words, "output_dir=run"]) == 1
    said = capsys.readouterr().err
    assert "more than 10% of all" in said
    assert "nonfinite has 1 such" in said


def rolled_back(own: Path, name: str, *stops: int) -> Path:
    """A whole run, in one piece or stopped after some steps and resumed."""
    limits = [f"trainer.max_steps={stop}" for stop in stops] + ["trainer.max_steps=15"]
    words = [*WORDS, BAD, "trainer.nan_policy=rollback", ENDLESS]
    assert main([*words, limits[0], f"output_dir={name}"]) == 0
    for limit in limits[1:]:
        assert main(["resume", name, limit]) == 0
    return own / name


def test_rollback_passes_over_the_data_since_the_checkpoint_and_is_exact(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = rolled_back(own, "whole")
    bad = [int(path.name[5:]) for path in sorted((whole / "nonfinite").iterdir())]
    state = last(whole)
    assert "to the newest checkpoint" in capsys.readouterr().out
    assert len(bad) == state["train"]["rollbacks"] >= 1
    assert is_finite(state)
    assert state["train"]["skipped_steps"] == 0
    assert steps_of(whole) == list(range(1, 16))
    # each time back, the steps since the last checkpoint are made again, with other data
    passed_over = sum(1 + (step - 1) % 3 for step in bad)
    assert 12 * state["train"]["epoch"] + state["train"]["batches"] == 15 + passed_over
    for name, stop in (("before", 3 * ((bad[0] - 1) // 3) or 3), ("after", 12)):
        again = rolled_back(own, name, stop)
        assert same(last(again), state)
        assert steps_of(again) == list(range(1, 16))


def test_rollback_without_an_earlier_checkpoint_goes_back_to_the_start_and_is_bounded(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = "data.train.bad=[" + ",".join(map(str, range(48))) + "]"
    words = [every, "trainer.nan_policy=rollback"]
    assert main([*WORDS, TWO, *words, "output_dir=run"]) == 1
    approve_error(capsys.readouterr().err, "optimizer.lr")
    assert last(own / "run")["train"]["step"] == 0
    assert status(own / "run")["exit_code"] == 1


@pytest.mark.process
def test_the_rank_that_had_it_is_named_and_all_ranks_write_their_part(
    own: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    words = ["parallel=ddp", "parallel.devices=2", "trainer.nan_policy=rollback", "data.shuffle=false"]
    bad = "data.train.bad=[13]"  # in the second batch of two times 4: of rank 1
    assert main([*WORDS, bad, *words, "trainer.max_steps=4", ENDLESS, "output_dir=run"]) == 0
    (place,) = (own / "run" / "nonfinite").iterdir()
    assert place.name == "step-00000002"
    samples = [
        json.loads((place / f"rank-0000{rank}.json").read_text())["batches"][0]["samples"] for rank in (0, 1)
    ]
    assert 13 in samples[0] + samples[1]
    owner = 0 if 13 in samples[0] else 1
    assert f"rank {owner}: the loss" in capfd.readouterr().out
    assert steps_of(own / "run") == list(range(1, 5))
    assert is_finite(last(own / "run"))


def test_numbers_that_are_not_finite_leave_the_files_strict_json(own: Path) -> None:
    assert main([*WORDS, TWO, "data.val.bad=[3]", "output_dir=run"]) == 0
    assert main(["evaluate", "run", "--which", "last"]) == 0
    for name in ("status", "evaluation-val"):
        told = json.loads((own / "run" / f"{name}.json").read_text(), parse_constant=pytest.fail)
        assert (told | told.get("metrics", {}))["val/loss"] == "nan"
    assert math.isnan(load_run("run").status["metrics"]["val/loss"])


def test_what_has_a_loss_that_is_not_finite_is_never_the_best(own: Path) -> None:
    words = [*with_setting(WORDS, "checkpoint.save_top_k=1"), "data.val.bad=[3]", TWO, "output_dir=run"]
    assert main([*words, "trainer.check_task=false"]) == 0
    assert all(row["val/loss"] == "nan" for row in rows_of(own / "run", "eval"))
    assert status(own / "run").get("best_step", -1) in (-1, None)
    assert not (own / "run" / "checkpoints" / "best.json").exists()
    named = [*words[:-1], "output_dir=named", "checkpoint.monitor=val/acc", "trainer.check_task=false"]
    assert main(named) == 0
    assert status(own / "named")["value"] > 0.3
