"""What a hook does in `on_end` is validated and saved, and the order in which the methods of a hook are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import approve_error

from trainrun import load_run
from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.load import read_checkpoint
from trainrun.cli.main import main

pytestmark = pytest.mark.process

OWN = """
import json
import os
import signal
from pathlib import Path

import torch


class Scales:  # halves the weights at the end; does so once
    def __init__(self, factor=0.5, average=False):
        self.factor, self.average = factor, average

    @torch.no_grad()
    def on_end(self, run, state):
        with Path("calls.txt").open("a") as file:
            file.write(f"{state.step}\\n")
        if not self.average:
            for parameter in run.model.parameters():
                parameter.mul_(self.factor)
            return
        average = run.ema.state_dict()
        average["module"] = {name: value * self.factor for name, value in average["module"].items()}
        run.ema.load_state_dict(average)


class Looks:
    def on_end(self, run, state):
        Path("metrics.json").write_text(json.dumps(state.last_metrics))


class StopsAt:
    def __init__(self, step):
        self.step = step

    def on_step_end(self, run, state):
        if state.step == self.step and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGTERM)


class Order:  # its state is made in on_start
    def __init__(self):
        self.calls, self.average = ["init"], None

    def _call(self, name):
        self.calls.append(name)
        Path("order.json").write_text(json.dumps(self.calls))

    def on_start(self, run, state):
        self._call("on_start")
        average = torch.optim.swa_utils.AveragedModel(run.model)
        if self.average is not None:
            average.load_state_dict(self.average)
        self.average = average

    def on_step_end(self, run, state):
        self.average.update_parameters(run.model)

    def on_checkpoint(self, run, state):
        self._call("on_checkpoint")

    def on_end(self, run, state):
        self._call("on_end")

    def state_dict(self):
        self._call("state_dict")
        return self.average.state_dict()

    def load_state_dict(self, state):
        self._call("load_state_dict")
        self.average = state


class Unsaveable:
    def on_start(self, run, state): ...
    def state_dict(self): return {"thing": object()}
    def load_state_dict(self, state): ...
"""
SHORT = [
    "trainer.max_epochs=2", "data.batch_size=128", "monitor.progress_bar=false", "monitor.plots=false",
    "monitor.hardware=false", "trainer.num_threads=1", "seed=1",
]  # fmt: skip
LAST = "checkpoints/step-00000024"


@pytest.fixture(autouse=True)
def own(workdir: Path) -> None:
    (workdir / "own.py").write_text(OWN)


def weights(run: str, which: str = "last") -> dict[str, torch.Tensor]:
    return dict(load_run(run).load_model(which).state_dict())


def status(run: str) -> dict[str, Any]:
    return json.loads((Path(run) / "status.json").read_text())


@pytest.mark.parametrize("more", [[], ["trainer.ema=true"], ["checkpoint.async_save=false"]])
def test_weights_that_a_hook_changes_at_the_end_are_validated_and_saved(more: list[str]) -> None:
    assert main([*SHORT, *more, "output_dir=plain"]) == 0
    assert main([*SHORT, *more, "hook.s._target_=own.Scales", "output_dir=scaled"]) == 0
    plain, scaled = (read_checkpoint(Path(run, LAST)).shared["model"] for run in ("plain", "scaled"))
    assert all(torch.equal(scaled[name], value * 0.5) for name, value in plain.items())
    assert main(["evaluate", "scaled", "--which", "last"]) == 0
    found = json.loads(Path("scaled/evaluation-val.json").read_text())
    assert status("scaled")["metrics"]["val/loss"] == pytest.approx(found["val/loss"], rel=1e-5)
    metric = read_checkpoint(Path("scaled", LAST)).manifest.metric
    assert metric is not None
    assert metric.value == status("scaled")["metrics"][metric.name]


def test_averaged_weights_that_a_hook_changes_are_saved() -> None:
    words = [
        *SHORT,
        "trainer.ema=true",
        "hook.s._target_=own.Scales",
        "hook.s.average=true",
        "hook.s.factor=0",
    ]
    assert main([*words, "output_dir=run"]) == 0
    assert all(not value.any() for value in weights("run").values())


def test_the_best_is_the_best_of_what_was_saved() -> None:
    """Without the hook, the last step is the best; with it, the step before is."""
    words = [*SHORT, "checkpoint.monitor=val/loss", "checkpoint.save_top_k=1"]
    assert main([*words, "output_dir=plain"]) == 0
    assert main([*words, "hook.s._target_=own.Scales", "hook.s.factor=0", "output_dir=zero"]) == 0
    assert (status("plain")["best_step"], status("zero")["best_step"]) == (24, 12)
    best = json.loads(Path("zero/checkpoints/best.json").read_text())["entries"]
    assert [(entry["step"], entry["value"]) for entry in best] == [(12, status("zero")["value"])]
    assert any(value.any() for value in weights("zero", "best").values())
    assert all(not value.any() for value in weights("zero").values())


def test_a_hook_that_changes_nothing_sees_the_last_metrics_and_adds_no_validation() -> None:
    assert main([*SHORT, "hook.s._target_=own.Looks", "output_dir=run"]) == 0
    assert json.loads(Path("metrics.json").read_text())["val/loss"] == status("run")["metrics"]["val/loss"]
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [12, 24]


def test_a_stopped_run_is_saved_as_it_was_and_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle, and in the last step: there the checkpoint of the end replaces that of the stop."""
    assert main([*SHORT, "output_dir=plain"]) == 0
    for step in (7, 24):
        run = f"run{step}"
        words = ["hook.s._target_=own.Scales", "hook.t._target_=own.StopsAt", f"hook.t.step={step}"]
        Path("stopped").unlink(missing_ok=True)
        assert main([*SHORT, *words, f"output_dir={run}"]) == 75
        Path("calls.txt").unlink()  # of the stop, whose changes no checkpoint has
        assert main(["resume", run]) == 0
        ended = read_checkpoint(Path(run, LAST)).shared["model"]
        plain = read_checkpoint(Path("plain", LAST)).shared["model"]
        assert all(torch.equal(ended[name], value * 0.5) for name, value in plain.items())
        assert Path("calls.txt").read_text() == "24\n"
        assert not list(Path(run, "checkpoints").glob(".before*"))


def test_a_kill_while_the_last_checkpoint_is_replaced_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "hook.s._target_=own.Scales",
        "hook.t._target_=own.StopsAt",
        "hook.t.step=24",
        "checkpoint.keep_last=1",
    ]
    assert main([*SHORT, *words, "output_dir=run"]) == 75
    rename = FileLayer.rename

    def stop_between(self: Any, source: Path, target: Path) -> None:
        if source.name.startswith(".tmp-step") and list(target.parent.glob(".before*")):
            raise OSError("killed")
        rename(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(FileLayer, "rename", stop_between)
        assert main(["resume", "run"]) != 0
    assert not Path("run", LAST).exists()
    assert main(["resume", "run"]) == 0
    assert read_checkpoint(Path("run", LAST)).manifest.kind == "final"


def test_a_kill_after_the_last_save_calls_on_end_no_second_time() -> None:
    assert main([*SHORT, "hook.s._target_=own.Scales", "output_dir=run"]) == 0
    before = weights("run")
    text = Path("run/status.json").read_text()
    Path("run/status.json").write_text(text.replace('"state": "done"', '"state": "running"'))
    assert main(["resume", "run"]) == 0
    assert all(torch.equal(value, before[name]) for name, value in weights("run").items())
    assert Path("calls.txt").read_text() == "24\n"


def test_early_stopping_keeps_its_reason_and_its_count() -> None:
    early = [
        f"trainer.early_stopping.{word}" for word in ("monitor=val/loss", "mode=min", "stopping_threshold=9")
    ]
    early.append("trainer.early_stopping=true")
    assert main([*SHORT, *early, "hook.s._target_=own.Scales", "output_dir=run"]) == 0
    found = status("run")
    assert (found["step"], found["reason"].partition(":")[0]) == (12, "early stopping")


def test_two_ranks_end_together() -> None:
    words = [*SHORT, "parallel=ddp", "hook.s._target_=own.Scales", "hook.s.factor=0"]
    assert main([*words, "output_dir=run"]) == 0
    assert all(not value.any() for value in weights("run").values())


def test_the_order_of_calls() -> None:
    assert main([*SHORT[1:], "trainer.max_epochs=1", "hook.o._target_=own.Order", "output_dir=run"]) == 0
    calls = json.loads(Path("order.json").read_text())
    assert calls[:2] == ["init", "on_start"]
    assert calls.index("state_dict") > 1
    assert "load_state_dict" not in calls
    assert calls[-3:] == ["on_end", "on_checkpoint", "state_dict"]
    assert main(["resume", "run", "trainer.max_epochs=2"]) == 0
    calls = json.loads(Path("order.json").read_text())
    assert calls[:3] == ["init", "load_state_dict", "on_start"]
    state = read_checkpoint(Path("run", LAST)).shared["hooks"]["hook.o"]
    assert state["n_averaged"].item() == 24


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SHORT, "hook.o._target_=own.Unsaveable", "output_dir=run"]) == 2
    approve_error(capsys.readouterr().err, "hook.o")
    assert not Path("run/checkpoints").exists()
