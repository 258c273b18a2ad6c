"""Every parameter that requires a gradient is in an optimizer, from the step on in which it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from approved import refused
from torch import Tensor

import trainrun
from tests.quiet_runs import QUIET, resumable, weights
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.errors import PluginError

pytestmark = pytest.mark.usefixtures("own")

OWN = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainrun.interfaces import StepOutput

def points(n=40):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)

class Net(nn.Module):
    def __init__(self, thaw_at=None, lazy_at=None, unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3)
        self.body.requires_grad_(False)
        self.calls, self.thaw_at, self.lazy_at, self.extra = 0, thaw_at, lazy_at, None
        if unused:
            self.spare, self.other = nn.Linear(8, 3), nn.Linear(3, 3)

    def forward(self, x):
        self.calls += self.training
        if self.calls == self.thaw_at:
            self.body.requires_grad_(True)
        h = self.body(x)
        if self.calls == self.lazy_at and self.extra is None:
            self.extra = nn.Linear(8, 8)
        return self.head(h if self.extra is None else self.extra(h))

class Thaw:
    def on_epoch_start(self, run, state):
        if state.epoch == 1:
            run.model.body.requires_grad_(True)

class Replace:
    def __init__(self, at=7, optimizer=False):
        self.at, self.optimizer = at, optimizer

    def on_step_end(self, run, state):
        if state.step == self.at:
            run.model.head = nn.Linear(8, 3)
            if self.optimizer:
                run.optimizer.add_param_group({"params": list(run.model.head.parameters()), "lr": 0.5})

class Task:
    def on_epoch_start(self, model, info):
        if info.epoch == 1:
            model.body.requires_grad_(True)

    def on_epoch_end(self, model, info):
        pass

    def count(self, batch):
        return len(batch[1])

    def step(self, model, batch):
        return StepOutput(cross_entropy(model(batch[0]), batch[1], reduction="sum"))

class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad  # of each parameter that it was given

def all_but_last(params, lr):
    return torch.optim.SGD(list(params)[:-1], lr=lr)
"""
WORDS = (*QUIET, "model=own.Net", "data.train=own.points", "data.val=own.points", "data.batch_size=8",
         "optimizer.weight_decay=0.3")  # fmt: skip
HOOK, TASK = "hook.own._target_=own.Thaw", "task._target_=own.Task"
STEPS_AN_EPOCH = 5


def trained(name: str, steps: int, *words: str) -> dict[str, Tensor]:
    limits = ("trainer.max_epochs=null", f"trainer.max_steps={steps}")
    return weights(str(trainrun.train(*WORDS, *limits, f"hydra.run.dir={name}", *words).folder))


def notes(folder: str) -> str:
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return "\n".join(str(row.get("text")) for row in rows if row["kind"] == "note")


@pytest.mark.parametrize(
    ("how", "optimizer"), [(HOOK, "adamw"), (HOOK, "muon"), (TASK, "sgd"), ("model.thaw_at=6", "sgd")]
)
def test_a_parameter_that_the_users_code_unfreezes_is_trained_from_then_on(how: str, optimizer: str) -> None:
    start = trained("start", 0, f"optimizer={optimizer}")
    before = trained("before", STEPS_AN_EPOCH, f"optimizer={optimizer}", how)
    after = trained("after", STEPS_AN_EPOCH + 2, f"optimizer={optimizer}", how)
    for name in ("body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"):
        assert torch.equal(before[name], start[name])  # no decay either
        assert not torch.equal(after[name], start[name])
    assert not torch.equal(before["head.weight"], start["head.weight"])


@pytest.mark.parametrize("at", [3, 7])
@pytest.mark.parametrize(
    "words",
    [
        (HOOK,),
        (TASK, "optimizer=sgd", "trainer.gradient_clip_val=0.1"),
        (HOOK, "trainer.ema=true"),
        (HOOK, "optimizer.groups=[{params: body.*, lr: 0.01, weight_decay: 0.0}]", "optimizer.no_decay=auto"),
        (HOOK, "precision=bf16-true", "trainer.accumulate_grad_batches=2"),
    ],
)
def test_a_resume_before_and_after_unfreezing_is_exact(words: tuple[str, ...], at: int) -> None:
    whole = resumable(*WORDS, *words, steps=9, at=at)
    assert not torch.equal(weights(whole)["body.0.weight"], trained("start", 0)["body.0.weight"])


def test_groups_by_pattern_hold_for_what_is_unfrozen() -> None:
    still = trained("still", 9, HOOK, "optimizer.groups=[{params: body.*, lr: 0.0}]")
    start = trained("start", 0)
    assert torch.equal(still["body.0.weight"], start["body.0.weight"])


def test_the_config_of_a_new_session_decides_what_it_freezes() -> None:
    first = trained("first", 4, "model.freeze=head.bias", HOOK)
    more = trained("more", 6, HOOK, "ckpt_path=first")
    assert torch.equal(first["head.bias"], trained("start", 0)["head.bias"])
    assert not torch.equal(more["head.bias"], first["head.bias"])


@pytest.mark.process
def test_ranks_train_what_a_hook_unfreezes() -> None:
    for how in (HOOK, "model.freeze=head.bias"):
        more = () if how == HOOK else ("model.unfreeze_at=1epoch",)
        of_ranks = () if how == HOOK else ("parallel.static_graph=true",)
        name = how.partition(".")[0]
        one = trained(f"{name} one", 9, how, *more, "optimizer=sgd")
        two = trained(
            f"{name} two",
            9,
            how,
            *more,
            *of_ranks,
            "optimizer=sgd",
            "parallel=ddp",
            "parallel.devices=2",
            "data.batch_size=4",
        )
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_a_head_that_a_hook_replaces_is_refused_at_that_step_by_name() -> None:
    with refused(PluginError, "head.weight"):
        trained("run", 20, "hook.own._target_=own.Replace", "monitor.log_every_n_steps=1")
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows if row["kind"] == "train") == 6


def test_a_head_that_a_hook_replaces_together_with_its_group_is_trained_and_saved() -> None:
    replaced = ("hook.own._target_=own.Replace", "hook.own.optimizer=true", "optimizer.weight_decay=0.0")
    trained("before", 7, *replaced)
    ends = [trained(f"after{steps}", steps, *replaced)["head.weight"] for steps in (8, 12)]
    assert not torch.equal(*ends)
    state = read_checkpoint(resolve_checkpoint(Path("after12/checkpoints"), "last")).shared["optimizer"]
    assert {name for group in state["groups"] for name in group["params"]} == set(state["shapes"])
    assert float(state["state"]["head.weight"]["step"]) == 5


def test_adagrad_saves_no_state_of_frozen_weights() -> None:
    words = ("optimizer=custom", "optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.1")
    whole = resumable(*WORDS, *words, HOOK, steps=9, at=3)
    assert not torch.equal(weights(whole)["body.0.weight"], trained("start", 0)["body.0.weight"])
    trained("frozen", 3, *words)
    state = read_checkpoint(resolve_checkpoint(Path("frozen/checkpoints"), "last")).shared["optimizer"][
        "state"
    ]
    assert set(state) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("at", [1, 4])
def test_a_module_that_is_made_in_the_forward_is_refused_by_name(at: int) -> None:
    with refused(PluginError):
        trained("run", 12, f"model.lazy_at={at}")


def test_parameters_that_get_no_gradient_are_named_once() -> None:
    trained("run", 30, "model.unused=true", "monitor.log_every_n_steps=10")
    told = [line for line in notes("run").splitlines() if "spare" in line]
    assert len(told) == 1
    assert "spare.weight, spare.bias, other.weight, other.bias" in told[0]
    assert "body" not in told[0]  # frozen
    trained("good", 20, "monitor.log_every_n_steps=10")
    assert "gradient" not in notes("good")


def test_parameters_that_the_optimizer_leaves_out_are_named() -> None:
    trained("run", 3, "optimizer=custom", "+optimizer._target_=own.all_but_last", "+optimizer.lr=0.1",
            "~optimizer.weight_decay")  # fmt: skip
    assert "head.bias" in notes("run")


def test_an_optimizer_of_ones_own_sees_frozen_parameters_from_the_step_on_in_which_they_are_trained() -> None:
    own = ("optimizer=custom", "optimizer._target_=own.Plain", "optimizer.lr=0.1")
    before, after = (
        trained(f"own{steps}", steps, *own, HOOK) for steps in (STEPS_AN_EPOCH, STEPS_AN_EPOCH + 2)
    )
    start = trained("start", 0)
    assert torch.equal(before["body.0.weight"], start["body.0.weight"])
    assert not torch.equal(after["body.0.weight"], start["body.0.weight"])
    assert not torch.equal(before["head.weight"], start["head.weight"])
