"""Hooks in real runs: when they are called, that their state is resumed, and what is refused; and unfreezing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from approved import approve_error

from trainrun import load_run
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.cli.main import main

pytestmark = pytest.mark.process

OWN = """
import json
import os
import signal
from pathlib import Path

import torch


class Counts:  # every method, and a state that changes the weights
    def __init__(self, stop_at=-1):
        self.seen, self.stop_at = [], stop_at
        self.total = torch.zeros(2)

    def _note(self, name, state):
        self.seen.append(f"{name} {state.step}")
        self.total += state.step

    def on_start(self, run, state):  # what the config names begins as the config says, also in a resume
        for group in run.optimizer.param_groups:
            group["weight_decay"] = 0.01 * float(self.total[0])

    def on_epoch_start(self, run, state):
        self._note("epoch_start", state)
        self.on_start(run, state)

    def on_epoch_end(self, run, state):
        self._note("epoch_end", state)

    def on_validation_end(self, run, state, metrics):
        assert metrics["val/loss"] > 0
        self._note("validation_end", state)

    def on_checkpoint(self, run, state):
        if self.stop_at == state.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_end(self, run, state):
        Path("seen.json").write_text(json.dumps(self.seen))

    def state_dict(self):
        return {"seen": list(self.seen), "total": self.total}

    def load_state_dict(self, state):
        self.seen, self.total = list(state["seen"]), state["total"]


class Stops:
    def __init__(self, step):
        self.step = step

    def on_step(self, step, epoch, row):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Thaws:
    def on_epoch_start(self, run, state):
        if state.epoch == 1:
            run.model.layers[1].requires_grad_(True)


class Moves(Thaws):  # to a group of its own
    done = False

    def on_epoch_start(self, run, state):
        super().on_epoch_start(run, state)
        if state.epoch == 1 and not self.done:
            self.done = True
            params = run.model.layers[1].parameters()
            run.optimizer.add_param_group({"params": params, "lr": 0.003, "weight_decay": 0.2})

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Misspelt:
    def on_epoch_strat(self, run, state): ...

class Nothing: ...

class OtherArguments:
    def on_gradients(self, run, state): ...

class Half:
    def on_epoch_end(self, run, state): ...
    def state_dict(self): return {}
"""
SHORT = [
    "trainer.max_epochs=3", "data.batch_size=128", "monitor.log_every_n_steps=1", "monitor.progress_bar=false",
    "monitor.plots=false", "monitor.hardware=false", "trainer.num_threads=1",
]  # fmt: skip
STOP = [
    "monitor.stop._target_=own.Stops",
    "monitor.stop.step=16",
]  # 12 steps an epoch: in the middle of the second
THAW = ["model.freeze=layers.1.*", "model.unfreeze_at=1epoch"]


@pytest.fixture(autouse=True)
def own(workdir: Path) -> None:
    (workdir / "own.py").write_text(OWN)


def weights_of(run: str) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in load_run(run).load_model("last").state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_hook_is_called_at_its_places_and_resumed_in_the_middle_with_its_state(workdir: Path) -> None:
    words = [*SHORT, "hook.mine._target_=own.Counts"]
    assert main([*words, "output_dir=whole"]) == 0
    whole = json.loads((workdir / "seen.json").read_text())
    epoch = ["epoch_start {}", "epoch_end {}", "validation_end {}"]
    assert whole == [
        text.format(12 * (number + (i > 0))) for number in range(3) for i, text in enumerate(epoch)
    ]
    assert main([*words, *STOP, "output_dir=part"]) == 75
    assert main(["resume", "part"]) == 0
    assert json.loads((workdir / "seen.json").read_text()) == whole
    assert same(weights_of("whole"), weights_of("part"))


def test_an_extra_validation_at_the_end_of_a_run_is_not_one_for_hooks(workdir: Path) -> None:
    words = [*SHORT, "hook.mine._target_=own.Counts"]
    assert main([*words, "output_dir=whole"]) == 0
    assert main([*words, "trainer.max_steps=16", "output_dir=part"]) == 0
    assert "validation_end 16" not in json.loads((workdir / "seen.json").read_text())
    assert main(["resume", "part", "trainer.max_steps=null"]) == 0
    assert same(weights_of("whole"), weights_of("part"))


def test_what_acts_at_a_checkpoint_comes_before_it(workdir: Path) -> None:
    words = [
        *SHORT,
        "hook.mine._target_=own.Counts",
        "hook.mine.stop_at=12",
        "checkpoint.every_n_train_steps=12",
    ]
    assert main([*words, "output_dir=run"]) == 75
    state = read_checkpoint(resolve_checkpoint(workdir / "run" / "checkpoints", "last")).shared["hooks"][
        "hook.mine"
    ]
    assert state["seen"][:3] == ["epoch_start 0", "epoch_end 12", "validation_end 12"]


@pytest.mark.parametrize("name", ["Misspelt", "Nothing", "OtherArguments", "Half"])
def test_what_is_no_hook_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, f"hook.mine._target_=own.{name}"]) == 2
    approve_error(capsys.readouterr().err)


def test_a_step_in_one_graph_takes_no_hook(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "hook.mine=own.Counts", "trainer.compile=step"]) == 2
    approve_error(capsys.readouterr().err, "hook.mine")


@pytest.mark.parametrize("more",
    [
        [], ["optimizer=sgd", "optimizer.momentum=0.9"], ["trainer.ema=true", "optimizer.no_decay=auto"],
        ["precision=bf16-true", "trainer.accumulate_grad_batches=1"],
    ],
)  # fmt: skip
def test_unfrozen_parameters_enter_as_if_they_had_come_just_then(workdir: Path, more: list[str]) -> None:
    words = [*SHORT[1:], *THAW, *more, "optimizer.weight_decay=0.1", "trainer.gradient_clip_val=1.0"]
    assert main([*words, "trainer.max_epochs=1", "output_dir=first"]) == 0
    tree = read_checkpoint(resolve_checkpoint(workdir / "first" / "checkpoints", "last")).shared
    model, states = tree["model"], tree["optimizer"]["state"]
    frozen = [name for name in model if name.startswith("layers.1.")]
    assert frozen
    assert not [
        name for name in frozen if states.get(name, {}).get("step", 0)
    ]  # no update, and no decay of weights
    assert main([*SHORT, *more, "trainer.max_steps=0", "output_dir=fresh"]) == 0
    fresh = read_checkpoint(resolve_checkpoint(workdir / "fresh" / "checkpoints", "last")).shared["model"]
    assert all(torch.equal(model[name], fresh[name]) for name in frozen)
    words.append("trainer.max_epochs=3")
    assert main([*words, "output_dir=whole"]) == 0
    tree = read_checkpoint(resolve_checkpoint(workdir / "whole" / "checkpoints", "last")).shared
    assert not any(torch.equal(tree["model"][name], fresh[name]) for name in frozen)
    if "optimizer=sgd" not in more:
        steps = {name: int(state["step"]) for name, state in tree["optimizer"]["state"].items()}
        assert {steps[name] for name in frozen} == {
            24
        }  # of 36: bias correction begins with the first gradient
        assert {steps[name] for name in steps if name not in frozen} == {36}
    assert main([*words, *STOP, "output_dir=part"]) == 75
    assert main(["resume", "part"]) == 0
    assert same(weights_of("whole"), weights_of("part"))


OWN_GROUP = "optimizer.groups=[{params: layers.1.*, lr: 0.003, weight_decay: 0.2}]"


@pytest.mark.parametrize("scheduler", ["cosine", "constant"])
@pytest.mark.parametrize(
    "hook", [("hook.thaw._target_=own.Thaws", OWN_GROUP), ("hook.thaw._target_=own.Moves",)]
)
def test_what_a_hook_has_unfrozen_is_trained_after_a_resume(hook: tuple[str, ...], scheduler: str) -> None:
    words = [*SHORT, "model.freeze=layers.1.*", *hook, f"scheduler={scheduler}", *STOP]
    assert main([*words, "output_dir=part"]) == 75
    before = weights_of("part")["layers.1.weight"]
    assert main(["resume", "part"]) == 0
    assert main([*words, "monitor.stop=null", "output_dir=whole"]) == 0
    assert same(weights_of("whole"), weights_of("part"))
    assert not torch.equal(weights_of("whole")["layers.1.weight"], before)


def test_a_resume_without_a_group_of_the_config_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    group = "optimizer.groups=[{params: layers.1.*, lr: 1e-4}]"
    words = [*SHORT[1:], "trainer.max_steps=2", "hook.counts._target_=own.Counts", group, "output_dir=run"]
    assert main(words) == 0
    assert (
        main(["resume", "run", "trainer.max_steps=4", "model.freeze=layers.1.*", "optimizer.groups=[]"]) == 2
    )
    approve_error(capsys.readouterr().err)


def test_a_resume_before_they_are_trained_and_units_of_steps(workdir: Path) -> None:
    words = [*SHORT, "model.freeze=layers.1.*", "optimizer=muon", "model.unfreeze_at=18step", *STOP]
    assert main([*words, "output_dir=part"]) == 75
    frozen = weights_of("part")["layers.1.weight"]
    assert main(["resume", "part"]) == 0
    assert main([*words, "monitor.stop=null", "output_dir=whole"]) == 0
    assert same(weights_of("whole"), weights_of("part"))
    assert not torch.equal(weights_of("whole")["layers.1.weight"], frozen)


@pytest.mark.parametrize(("at", "told"), [("2epoch", False), ("3epoch", True), ("3step", True)])
def test_a_run_that_ends_before_them_says_so(at: str, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "trainer.limit_train_batches=1", "model.freeze=layers.1.*", f"model.unfreeze_at={at}"]
    assert main(words) == 0
    assert (f"model.unfreeze_at={at}: the run ends before, at step 3" in capsys.readouterr().out) == told


def test_two_ranks_freeze_and_unfreeze_as_one_does() -> None:
    words = [*SHORT[2:], "trainer.max_epochs=2", *THAW]
    assert main([*words, "data.batch_size=128", "output_dir=one"]) == 0
    ranks = ["parallel=ddp", "parallel.accelerator=cpu", "parallel.devices=2", "data.batch_size=64"]
    assert main([*words, *ranks, "output_dir=two"]) == 0
    one, two = weights_of("one"), weights_of("two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "words",
    [
        ["model.freeze=layrs.1.*"],
        ["model.freeze=3"],
        ["model.freeze="],
        ["model.init=null"],
        [*THAW[:1], "model.unfreeze_at=2"],
        ["model.freeze=*", "model.unfreeze_at=1epoch"],
        ["model.unfreeze_at=1epoch"],
        ["model.freeze_norm=true"],
        [*THAW[:1], "model.unfreeze_at=2h"],
        [*THAW[:1], "model.unfreeze_at=1.5epoch"],
        [*THAW[:1], "model.freeze_norm=true"],
        [*THAW, "trainer.compile=step"],
    ],
)  # fmt: skip
def test_what_cannot_be_frozen_or_seen_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, *words]) == 2
    approve_error(capsys.readouterr().err)


CHANGES = """
import torch


class Clip:
    def on_step_end(self, run, state):
        for param in run.model.parameters() if state.step == 2 else ():
            param.data.clamp_(-0.01, 0.01)


class Modes:
    def on_start(self, run, state):
        self.first = next(module for module in run.model.modules() if isinstance(module, torch.nn.Linear))
        self.first.eval()

    def on_step_end(self, run, state):
        assert not self.first.training and run.model.training


class Forgets:  # the state of one parameter
    def on_epoch_end(self, run, state):
        run.optimizer.state.pop(list(run.model.parameters())[-1])
"""
CHANGED = [
    "trainer.val_check_interval=2", "monitor.log_every_n_steps=1", "monitor.plots=false",
    "monitor.hardware=false",
]  # fmt: skip


@pytest.mark.parametrize("words", [[], ["precision=bf16-true"]])
def test_weights_that_a_hook_sets_are_those_that_the_next_update_begins_with(
    workdir: Path, words: list[str]
) -> None:
    (workdir / "my_changes.py").write_text(CHANGES)
    words = [*words, "hook.clip._target_=my_changes.Clip", "optimizer.lr=1e-4", *CHANGED]
    assert main([*words, "trainer.max_steps=4", "output_dir=part"]) == 0
    assert main([*words, "trainer.max_steps=6", "ckpt_path=part", "output_dir=rest"]) == 0
    assert main([*words, "trainer.max_steps=6", "output_dir=whole"]) == 0
    whole, rest = (load_run(name).load_model("last").state_dict() for name in ("whole", "rest"))
    assert all(float(weight.abs().max()) <= 0.02 for weight in whole.values())
    assert all(torch.equal(weight, rest[name]) for name, weight in whole.items())


def test_the_mode_of_a_module_that_a_hook_sets_outlives_validations(workdir: Path) -> None:
    (workdir / "my_changes.py").write_text(CHANGES)
    assert (
        main(["hook.modes._target_=my_changes.Modes", *CHANGED, "trainer.max_steps=6", "output_dir=run"]) == 0
    )


def test_a_state_that_a_hook_drops_begins_anew(workdir: Path) -> None:
    (workdir / "my_changes.py").write_text(CHANGES)
    words = [
        "hook.forgets._target_=my_changes.Forgets",
        *CHANGED,
        "data.batch_size=512",
        "trainer.max_steps=8",
    ]
    assert main([*words, "output_dir=run"]) == 0
    tree = read_checkpoint(resolve_checkpoint(Path("run/checkpoints"), "last")).shared["optimizer"]
    steps = [int(state["step"]) for state in tree["state"].values()]
    assert steps[:-1] == [8] * (len(steps) - 1)
    assert steps[-1] == 2  # since the end of the last epoch of three steps


OWN_TRAIN = """
from torch import nn


class Net(nn.Module):  # keeps its norm from training, as fine-tuning recipes do
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    def train(self, mode=True):
        super().train(mode)
        self.body[2].eval()
        return self

    def forward(self, x):
        return self.body(x)
"""


def test_an_own_train_holds_from_the_first_step_on(workdir: Path) -> None:
    (workdir / "my_norm.py").write_text(OWN_TRAIN)
    words = ["model=my_norm.Net", *CHANGED, "trainer.max_steps=5", "output_dir=run"]
    assert main(words) == 0
    state = load_run("run").load_model("last").state_dict()
    assert int(state["body.2.num_batches_tracked"]) == 0
