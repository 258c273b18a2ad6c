"""Copies of networks: what their functions and hooks refer to."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainrun.runtime.network_copy import copy_network, iterate_held_objects


class Kept(nn.Module):
    """Its output depends on what a hook of a layer has kept."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2)
        self.kept: list[Tensor] = []
        hooks: dict[str, Any] = {
            "closure": lambda *call: self.kept.append(call[2]),
            "default": lambda *call, model=self: model.kept.append(call[2]),
            "keyword": functools.partial(lambda *call, to: to.append(call[2]), to=self.kept),
            "method": self.keep,
            "nested": (lambda keep: lambda *call: keep(call[2]))(lambda output: self.kept.append(output)),
            "list": (lambda found: lambda *call: found[0].kept.append(call[2]))([self]),
        }
        self.layers.register_forward_hook(hooks[hook])

    def keep(self, *call: Any) -> None:
        self.kept.append(call[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x) + self.kept.pop())


class Weighted(nn.Module):
    """Hooks and an attribute of its weights change what it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.first.weight.scale = 0.3
        self.first.weight.register_hook(lambda gradient: gradient * self.last.bias.sum())
        self.handle = self.last.weight.register_hook(torch.zeros_like)
        self.last.weight.register_post_accumulate_grad_hook(self.halve)

    def halve(self, weight: Tensor) -> None:
        assert weight is self.last.weight
        weight.grad = weight.grad * 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.first.weight.scale


def train(model: nn.Module) -> list[Tensor]:
    model(torch.ones(2, 3)).square().sum().backward()
    return [param.grad for param in model.parameters()]


@pytest.mark.parametrize("hook", ["closure", "default", "keyword", "method", "nested", "list"])
def test_a_hook_of_the_copy_keeps_in_the_copy(hook):
    model = Kept(hook)
    copied = copy_network(model)
    torch.testing.assert_close(train(copied), train(model))
    assert all(param.grad is not None for param in copied.parameters())
    del model.kept
    train(copied)


def test_weights_of_the_copy_have_their_hooks_and_attributes():
    model = Weighted()
    copied = copy_network(model)
    gradients = train(copied)
    assert all(param.grad is None for param in model.parameters())
    torch.testing.assert_close(gradients, train(model))
    copied.handle.remove()
    assert train(copied)[2].any()
    assert not train(model)[2].any()


def test_functions_that_refer_to_no_part_stay_the_same():
    model = nn.Linear(1, 1)
    number, names = 3, ["a"]
    model.functions = [nn.functional.relu, nn.functional.max_pool2d, lambda x: x * number, lambda: names]
    assert copy_network(model).functions == model.functions


def test_rows_of_an_array_are_not_listed():
    values = [np.zeros((2, 2)), range(10**12)]
    assert list(iterate_held_objects(values)) == [values, *reversed(values)]


def test_a_tensor_that_a_hook_computed_is_copied_without_its_graph() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(3, 2))
    inputs = torch.rand(4, 3)
    copied = copy_network(layer)
    assert torch.equal(copied(inputs), layer(inputs))
    with torch.no_grad():
        copied.weight_g.mul_(2)
    assert not torch.equal(copied(inputs), layer(inputs))
