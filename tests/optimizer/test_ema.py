"""The averaged weights: their formula, and that the training does not notice them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainrun.errors import CheckpointError
from trainrun.optimizer.ema import Ema


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1  # a buffer that is replaced, not written into
        return self.norm(self.linear(x))


def fit(model: nn.Module, ema: Ema | None, steps: range, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The weights after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    path = []
    for step in steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        model(x.to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update()
        path.append(next(iter(model.parameters())).detach().clone())
    return path


class Growing(Net):
    """Makes a buffer in its first forward, and makes another longer."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("mask", None)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mask = torch.ones(3) if self.mask is None else self.mask
        self.table = torch.cat([self.table, self.table[-1:] + 1])
        return super().forward(x) * self.mask


def test_buffers_that_a_forward_makes_or_lengthens_are_copied_and_loaded() -> None:
    model = Growing()
    ema = Ema(model, decay=0.9, every=2)
    fit(model, ema, range(3))
    assert ema.module.table.tolist() == [0, 1, 2]
    state = ema.state_dict()
    assert list(ema.module.state_dict()) == list(model.state_dict())
    again = Growing()
    again.mask = torch.zeros(3)  # as it is after the load of the model
    loaded = Ema(again, decay=0.9, every=2)
    loaded.load_state_dict(state)
    assert torch.equal(loaded.module.mask, torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_model_that_keeps_a_computed_weight_has_an_average() -> None:
    model = Net()
    nn.utils.weight_norm(model.linear)
    ema = Ema(model, decay=0.0, every=1)
    fit(model, ema, range(3))
    x = torch.randn(4, 3)
    assert torch.equal(ema.module(x), model.eval()(x))
    assert "weight" not in dict(ema.module.linear.named_parameters())


@pytest.mark.parametrize("decay", [0.0, 0.9])
@pytest.mark.parametrize("every", [1, 3])
def test_the_average_is_the_closed_form(decay: float, every: int) -> None:
    model = Net().double()
    ema = Ema(model, decay=decay, every=every)
    path = fit(model, ema, range(11), torch.float64)[every - 1 :: every]
    weights = [decay ** (len(path) - 1 - i) for i in range(len(path))]
    expected = sum(w * p for w, p in zip(weights, path, strict=True)) / sum(weights)
    torch.testing.assert_close(ema.module.linear.weight, expected, rtol=1e-12, atol=1e-12, check_dtype=True)
    assert not torch.equal(ema.module.linear.weight, model.linear.weight) or decay == 0.0


def test_buffers_are_copied_also_when_the_model_replaces_them() -> None:
    model = Net()
    ema = Ema(model, decay=0.9, every=1)
    fit(model, ema, range(4))
    for kept, buffer in zip(ema.module.buffers(), model.buffers(), strict=True):
        assert torch.equal(kept, buffer)
    assert ema.module.seen.item() == 4
    assert ema.module.norm.num_batches_tracked.item() == 4


def test_averages_of_bfloat16_weights_are_kept_in_float32() -> None:
    """In bfloat16 a step of 1/1000 of the difference rounds to nothing, and the average would stand still."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    ema = Ema(model, decay=0.999, every=1)
    seen = []
    for step in range(400):
        nn.init.constant_(model.weight, 1.0 if step < 200 else 2.0)
        ema.update()
        seen.append(model.weight.item())
    weights = [0.999 ** (399 - i) for i in range(400)]
    expected = sum(w * s for w, s in zip(weights, seen, strict=True)) / sum(weights)
    assert ema.module.weight.dtype == torch.bfloat16
    assert ema.module.weight.item() == pytest.approx(expected, rel=2**-8)
    assert ema.state_dict()["averages"]["weight"].item() == pytest.approx(expected, rel=1e-5)


def test_switched_on_for_a_resume_it_starts_from_the_loaded_weights() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(2, 2).to(dtype)
        ema = Ema(model, decay=0.9, every=1)
        nn.init.constant_(model.weight, 7.0)
        ema.load_state_dict({})
        assert torch.equal(ema.module.weight, model.weight)
        ema.update()
        assert torch.equal(ema.module.weight, model.weight)


def test_the_average_of_another_model_is_refused() -> None:
    ema = Ema(nn.Linear(2, 2), decay=0.9, every=1)
    other = Ema(nn.Linear(3, 3), decay=0.9, every=1)
    with pytest.raises(CheckpointError, match=r"trainer\.ema: the averaged weights .* another model"):
        ema.load_state_dict(other.state_dict())
