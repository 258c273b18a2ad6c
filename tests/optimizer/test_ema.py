"""The averaged weights: their formula, and that the training does not notice them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn

from trainrun.errors import CheckpointError
from trainrun.optimizer import ema as ema_module
from trainrun.optimizer.ema import Ema
from trainrun.seeding import evaluation_mode


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


def state_of(ema: Ema, model: nn.Module) -> dict[str, Tensor]:
    """What an evaluation sees."""
    with ema.swap_weights_in():
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_buffers_are_those_of_the_model_also_where_it_replaces_or_lengthens_them() -> None:
    model = Growing()
    ema = Ema(model, decay=0.9, every=2)
    fit(model, ema, range(3))
    seen = state_of(ema, model)
    assert seen["seen"].item() == 3
    assert seen["norm.num_batches_tracked"].item() == 3
    state = ema.state_dict()
    assert list(state["module"]) == list(model.state_dict())
    again = Growing()
    again.mask = torch.ones(3)  # as it is after the load of the model
    loaded = Ema(again, decay=0.9, every=2)
    loaded.load_state_dict(state)
    assert torch.equal(state_of(loaded, again)["linear.weight"], seen["linear.weight"])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_model_that_keeps_a_computed_weight_has_an_average() -> None:
    model = Net()
    nn.utils.weight_norm(model.linear)
    ema = Ema(model, decay=0.0, every=1)
    fit(model, ema, range(3))
    x = torch.randn(4, 3)
    with ema.swap_weights_in():
        averaged = model.eval()(x)
    assert torch.equal(averaged, model(x))


@pytest.mark.parametrize("decay", [0.0, 0.9])
@pytest.mark.parametrize("every", [1, 3])
def test_the_average_is_the_closed_form(decay: float, every: int) -> None:
    model = Net().double()
    ema = Ema(model, decay=decay, every=every)
    path = fit(model, ema, range(11), torch.float64)[every - 1 :: every]
    weights = [decay ** (len(path) - 1 - i) for i in range(len(path))]
    expected = sum(w * p for w, p in zip(weights, path, strict=True)) / sum(weights)
    seen = state_of(ema, model)["linear.weight"]
    torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12, check_dtype=True)
    assert not torch.equal(seen, model.linear.weight) or decay == 0.0
    assert torch.equal(ema.state_dict()["module"]["linear.weight"], seen)


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
    average = state_of(ema, model)["weight"]
    assert average.dtype == torch.bfloat16
    assert average.item() == pytest.approx(expected, rel=2**-8)
    assert ema.state_dict()["averages"]["weight"].item() == pytest.approx(expected, rel=1e-5)
    assert model.weight.item() == 2.0
    again = Ema(model, decay=0.999, every=1)
    again.load_state_dict(ema.state_dict())
    assert again.state_dict()["averages"]["weight"].item() == ema.state_dict()["averages"]["weight"].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_until_the_first_update_there_is_no_average(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    ema = Ema(model, decay=0.9, every=3)
    for step in range(5):
        nn.init.constant_(model.weight, float(step))
        ema.update()
        shown = state_of(ema, model)["weight"]
        state = ema.state_dict()
        assert torch.equal(shown, torch.full((2, 2), float(step if step < 2 else 2), dtype=dtype))
        assert torch.equal(state["module"]["weight"], shown)  # what a checkpoint is evaluated with
        again = Ema(model, decay=0.9, every=3)
        again.load_state_dict(state)
        assert torch.equal(state_of(again, model)["weight"], shown)


def test_switched_on_for_a_resume_it_starts_from_the_loaded_weights() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(2, 2).to(dtype)
        ema = Ema(model, decay=0.9, every=1)
        nn.init.constant_(model.weight, 7.0)
        ema.load_state_dict({})
        assert torch.equal(state_of(ema, model)["weight"], model.weight)
        ema.update()
        assert torch.equal(state_of(ema, model)["weight"], model.weight)


@pytest.mark.parametrize(
    "other", [nn.Linear(3, 3), nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2))]
)
def test_the_average_of_another_model_is_refused(other: nn.Module) -> None:
    ema = Ema(nn.Linear(2, 2), decay=0.9, every=1)
    with refused(CheckpointError, "trainer.ema"):
        ema.load_state_dict(Ema(other, decay=0.9, every=1).state_dict())


class Head(Net):
    """Reaches a layer by a function and by two names; has a weight that is a slice, a lock, and a hook with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.outputs, self.lock = self.linear, {}, threading.Lock()
        self.calls = {"main": lambda x: self.linear(x)}
        self.part = nn.Parameter(torch.rand(3, 8)[:, :3])
        self.linear.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs["linear"] = output

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls["main"](x)
            return self.norm(self.outputs["linear"]) @ self.part


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
def test_the_weights_come_back_bit_for_bit_in_their_memory(ending: type[BaseException] | None) -> None:
    model = Head()
    ema = Ema(model, decay=0.9, every=1)
    path = fit(model, ema, range(4))
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    with contextlib.suppress(*filter(None, [ending])), ema.swap_weights_in(), evaluation_mode(model):
        expected = sum(0.9 ** (3 - i) * weight for i, weight in enumerate(path))
        expected = expected / sum(0.9**i for i in range(4))
        torch.testing.assert_close(next(iter(model.parameters())), expected)
        x, average = torch.rand(4, 3), ema.state_dict()["module"]
        model(x)  # reaches `linear` by a function, and its output by a hook
        own = nn.functional.linear(x, average["linear.weight"], average["linear.bias"])
        torch.testing.assert_close(model.outputs["linear"], own)
        with ema.swap_weights_in():  # a second look inside the first
            torch.testing.assert_close(next(iter(model.parameters())), expected)
        if ending is not None:
            raise ending
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])


def test_an_interrupt_between_two_tensors_is_no_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Head()
    ema = Ema(model, decay=0.9, every=1)
    fit(model, ema, range(3))
    before = [value.clone() for value in model.state_dict().values()]

    def copy_one(targets: list[Tensor], sources: list[Tensor]) -> None:
        targets[0].copy_(sources[0])
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ema_module, "copy_tensors", copy_one)
    with pytest.raises(KeyboardInterrupt), ema.swap_weights_in():
        pytest.fail("entered")
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_a_layer_that_merges_its_weights_for_evaluation_merges_the_average() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> Merging:
            if mode != self.training:
                with torch.no_grad():
                    self.weight.add_(self.bias[:, None], alpha=-1.0 if mode else 1.0)
            return super().train(mode)

    model = Merging(3, 3)
    ema = Ema(model, decay=0.5, every=1)
    ema.update()
    with torch.no_grad():
        model.bias.fill_(4.0)
    before = model.weight.detach().clone()
    average = ema.state_dict()["module"]
    with ema.swap_weights_in(), evaluation_mode(model):
        torch.testing.assert_close(model.weight, average["weight"] + average["bias"][:, None])
    assert torch.equal(model.weight, before)


def test_a_parameter_that_is_new_or_replaced_begins_with_its_value() -> None:
    model = Net()
    ema = Ema(model, decay=0.9, every=1)
    fit(model, ema, range(3))
    kept = state_of(ema, model)["norm.weight"]
    model.linear = nn.Linear(3, 2)
    model.more = nn.Linear(1, 1)
    seen = state_of(ema, model)
    assert torch.equal(seen["linear.weight"], model.linear.weight)
    assert torch.equal(seen["more.weight"], model.more.weight)
    assert torch.equal(seen["norm.weight"], kept)
    ema.update()
    assert set(ema.state_dict()["module"]) == set(model.state_dict())
