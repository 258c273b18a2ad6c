"""Offloading moves tensors and changes nothing; on a CPU the same code runs with copies in the place of moves."""

from __future__ import annotations

import copy
import weakref

import torch
from torch import Tensor, nn

from trainrun.model.gpt import Gpt
from trainrun.transform.activation_offload import activation_offload


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(50, 32, layers=2, width=32, heads=2, dropout=0.2)


def tokens() -> Tensor:
    return torch.randint(50, (8, 32))


def trained(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens()).square().mean().backward()
        optimizer.step()
    return [*model.state_dict().values(), torch.get_rng_state()]


def test_activations_on_the_host_give_the_same_bits() -> None:
    plain, on = model_of(), model_of()
    activation_offload(on)
    for a, b in zip(trained(on), trained(plain), strict=True):
        assert torch.equal(a, b)
    assert list(on.state_dict()) == list(plain.state_dict())


def test_a_copy_of_an_offloaded_model_computes_with_its_own_weights() -> None:
    model = nn.Linear(3, 2)
    activation_offload(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.weight)
    nn.init.zeros_(twin.bias)
    assert not twin(torch.ones(1, 3)).any()


def test_what_was_moved_is_not_kept_on_the_device() -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            seen.append(weakref.ref(y.untyped_storage()))
            return (y * y).sum()

    seen: list[weakref.ref[torch.UntypedStorage]] = []
    model, x = Squares(), torch.randn(5, requires_grad=True)
    activation_offload(model)
    loss = model(x)
    assert seen[0]() is None
    loss.backward()
    assert torch.equal(x.grad, 8 * x.detach())
