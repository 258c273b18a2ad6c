"""The prepared update of Adam: the same bits as torch's own `step`, whatever happens between two steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from trainrun.optimizer.plain_step import FusedAdam, build_plain_step


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))


def optimizer_of(model: nn.Module, kind: type, **options: object) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.3}, {"params": rest}]
    return kind(groups, lr=0.02, betas=(0.8, 0.95), eps=1e-7, fused=True, **options)


def trees_equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(trees_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(trees_equal, left, right))
    return left == right


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bits_are_those_of_torch(kind: type, maximize: bool, dtype: torch.dtype) -> None:
    models = [network().to(dtype), network().to(dtype)]
    optimizers = [optimizer_of(model, kind, maximize=maximize) for model in models]
    step = build_plain_step(optimizers[1])
    assert isinstance(step, FusedAdam) == (kind is AdamW)
    for number in range(12):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            model(torch.randn(4, 5, dtype=dtype)).square().sum().backward()
            if number == 5:
                model[0].bias.grad = None  # a layer that a step does not use
            if number == 3:  # torch keeps the tensors, and makes new groups
                optimizer.load_state_dict(optimizer.state_dict())
            if number == 8:  # a resume
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (1 + number)  # a schedule
        optimizers[0].step()
        step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert trees_equal(optimizers[0].state_dict(), optimizers[1].state_dict()), number
        assert trees_equal(models[0].state_dict(), models[1].state_dict()), number


def test_only_what_is_prepared_skips_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = optimizer_of(model, AdamW)
    step = build_plain_step(optimizer)
    calls = []
    plain = step._plain
    step._plain = lambda: (calls.append(1), plain())
    for _ in range(4):
        model(torch.ones(2, 5)).sum().backward()
        step()
    assert len(calls) == 1  # the first, which makes the state
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    step()
    assert len(calls) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda params: AdamW(params, amsgrad=True, fused=True),
        lambda params: AdamW(params, foreach=True),
        lambda params: SGD(params, lr=0.1, fused=True),
        lambda params: type("Own", (AdamW,), {})(params, fused=True),
    ],
)
def test_others_are_left_to_torch(make) -> None:
    assert not isinstance(build_plain_step(make(network().parameters())), FusedAdam)


def test_a_parameter_that_never_has_a_gradient_prevents_nothing_else() -> None:
    model, spare = network(), nn.Parameter(torch.ones(2))
    optimizer = AdamW([*model.parameters(), spare], fused=True)
    step = build_plain_step(optimizer)
    before = model[0].weight.detach().clone()
    for _ in range(3):
        model(torch.ones(2, 5)).square().sum().backward()
        step()
    assert not torch.equal(before, model[0].weight)
    assert torch.equal(spare, torch.ones(2))
    assert optimizer.state[model[0].weight]["step"] == 3
