"""The update in the backward is the plain one, bit for bit, and its gradients are gone at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainrun.errors import PluginError
from trainrun.model.gpt import Gpt
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.precision.in_backward import InBackward
from trainrun.precision.update import Update
from trainrun.transform.gradient_checkpointing import gradient_checkpointing

CPU = torch.device("cpu")
FACTORIES = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = Gpt(20, 12, layers=2, width=16, heads=2)
    model.blocks[0].norm1.requires_grad_(False)
    return model


def train(model: nn.Module, precision: Any, optimizer: Any) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):
        torch.manual_seed(step)
        precision.backward(model(torch.randint(20, (3, 12))).square().sum(), 0.1)
        report = precision.optimizer_step(optimizer, want_norm=True)
        assert not report.skipped
        schedule.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", FACTORIES)
def test_the_same_bits_as_plain(kind: str, recompute: bool) -> None:
    """With weights that are used twice (tied), frozen ones, a schedule, and blocks that are computed again."""
    factory, keywords = FACTORIES[kind]
    plain, on = model_of(), model_of()
    if recompute:
        gradient_checkpointing(on, "full")
    optimizer, _ = build_optimizer(factory, dict(keywords), plain)
    train(plain, Update(plain, CPU, nan_policy="ignore"), optimizer)
    other, _ = build_optimizer(factory, dict(keywords), on)
    precision = InBackward(Update(on, CPU, nan_policy="ignore"), other, on)
    train(on, precision, other)
    for a, b in zip(plain.state_dict().values(), on.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert len(other.param_groups) == 1
    trained = [param for param in other.param_groups[0]["params"] if param.requires_grad]
    assert len(other.state) == len(optimizer.state) == len(trained)


def test_never_are_two_gradients_there() -> None:
    model = model_of()
    optimizer, _ = build_optimizer(torch.optim.SGD, {"lr": 0.1}, model)
    counts = []

    def look(_: Tensor) -> None:
        counts.append(sum(parameter.grad is not None for parameter in model.parameters()))

    wanting = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanting:
        parameter.register_post_accumulate_grad_hook(look)
    precision = InBackward(Update(model, CPU, nan_policy="ignore"), optimizer, model)
    precision.backward(model(torch.randint(20, (3, 12))).square().sum(), 1.0)
    assert counts == [1] * len(wanting)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert precision.optimizer_step(optimizer, want_norm=True).norm is None


def test_optimizers_that_may_look_at_several_parameters_are_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    for factory in (Own, torch.optim.LBFGS):
        model = model_of()
        optimizer = factory(model.parameters(), lr=0.1)
        with pytest.raises(
            PluginError, match=f"trainer.optimizer_in_backward=true: {factory.__name__} may look"
        ):
            InBackward(Update(model, CPU), optimizer, model)
