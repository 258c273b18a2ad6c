"""A trial leaves nothing of itself in model, task and process, in a child and on the objects themselves."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from trainrun.training import without_trace
from trainrun.training.without_trace import TrialNotPossible, run_trial

CPU = torch.device("cpu")


@pytest.fixture(params=["child", "put back"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to leave no trace: a forked child, and everything put back."""
    if request.param == "put back":
        monkeypatch.setattr(without_trace, "can_fork_safely", lambda: False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Closure(Net):
    """Reaches itself by a function in a dict: a deep copy would compute with the weights of the original."""

    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def head(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return self.last(x) + 0 * calls

        self.heads, self.calls = {"main": head}, lambda: calls

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["main"](self.first(x))


class Caching(Net):
    """Counters, caches of every kind, a lock, and a hook that keeps outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.steps, self.seen = threading.Lock(), 0, []
        self.caches = OrderedDict(a={1}, b=deque([1], 3), c=bytearray(b"a"), d=[torch.zeros(2)])
        self.array, self.draws = numpy.zeros(3), numpy.random.default_rng(0)
        self.generator, self.python = torch.Generator().manual_seed(0), random.Random(0)
        self.first.register_forward_hook(functools.partial(self.keep, "first"))

    def keep(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.caches[name] = output

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.steps += 1
            self.seen.append(x)
            self.caches["a"].add(self.steps + 1)
            self.caches["b"].append(3)
            self.caches["c"] += b"more"
            self.caches["d"][0] += 1
            self.caches.move_to_end("a")
            self.array += self.draws.random()
            noise = torch.rand((), generator=self.generator) + self.python.random()
            return super().forward(x) + noise + random.random() + numpy.random.random() + torch.rand(())


class Buffers(Net):
    """Batch norm, a buffer that is replaced, one that is made in the forward, one that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, table = nn.BatchNorm1d(2), torch.zeros(2, 6)
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("view", table[:, ::2])
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + torch.rand(2)
        self.view += 1
        self.mask = torch.ones(2) if self.mask is None else self.mask
        return self.norm(super().forward(x)) * self.mask


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.first)
        nn.utils.parametrizations.weight_norm(self.last)


class Tied(Net):
    """Two layers with one weight, and a weight that is a slice of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 4)
        self.more.weight = self.first.weight
        self.last.weight = nn.Parameter(torch.rand(2, 8)[:, :4])
        self.loose = [torch.zeros(3, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.loose[0]) + self.last(self.more(x))


class Updating(Net):
    """Trains itself in its forward: it swaps a weight, and adds a layer."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.data = self.first.weight.data + 1
            self.last.weight.mul_(2)
        self.extra = nn.Linear(2, 2)
        return self.extra(super().forward(x))


class Teacher:
    """A task with a network, an optimizer and a class of attributes of its own."""

    __slots__ = ("mode", "network", "optimizer", "seen")

    def __init__(self) -> None:
        self.network, self.mode, self.seen = Buffers(), "new", {"steps": [0]}
        self.optimizer = torch.optim.Adam(self.network.parameters())

    def step(self, model: nn.Module, x: Tensor) -> Tensor:
        self.mode = "old"
        self.seen["steps"][0] += 1
        self.network(x).sum().backward()
        self.optimizer.step()
        return model(x).sum() + self.network(x).sum()


def described(*values: Any) -> list[Any]:
    seen: dict[int, Any] = {}
    return [description(value, seen) for value in values]


def description(value: Any, seen: dict[int, Any]) -> Any:
    """Everything that can be reached, as plain values; each object with its identity."""
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, Tensor):
        gradient = None if not value.is_leaf else value.grad
        return [id(value), value.detach().tolist(), value.data_ptr(), description(gradient, seen)]
    if isinstance(value, dict):
        return [id(value), [(str(key), description(one, seen)) for key, one in value.items()]]
    if isinstance(value, list | tuple | deque):
        return [id(value), [description(one, seen) for one in value]]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.ndarray | set | bytearray | str | int | float | bool):
        return copy.copy(str(value))
    if hasattr(value, "__closure__"):
        return [description(cell.cell_contents, seen) for cell in value.__closure__ or ()]
    names = getattr(type(value), "__slots__", ())
    held = {name: getattr(value, name) for name in names if hasattr(value, name)} | vars_of(value)
    return [id(value), [(name, description(one, seen)) for name, one in held.items()]]


def vars_of(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def states() -> list[Any]:
    return [random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()]


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Net, Closure, Caching, Buffers, Spectral, Tied, Updating)
}


@pytest.mark.process
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_nothing_of_a_trial_remains(name: str, with_gradients: bool) -> None:
    model, task, x = MODELS[name](), Teacher(), torch.rand(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    numpy.random.random()
    if with_gradients:
        task.step(model, x).backward()
        optimizer.step()

    def work() -> list[float]:
        losses = []
        for _ in range(3):
            loss = task.step(model, x.clone())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        return losses

    before = described(model, task, optimizer), states()
    losses = run_trial(work, CPU, model, task, optimizer)
    assert (described(model, task, optimizer), states()) == before
    assert work() == losses  # the trial computed what the run computes afterwards
    assert described(model, task, optimizer) != before[0]


@pytest.mark.process
def test_an_error_of_a_trial_is_raised_and_leaves_nothing() -> None:
    model = Buffers()

    def work() -> None:
        model(torch.rand(5, 3)).sum().backward()
        raise ValueError("rows")

    before = described(model), states()
    with pytest.raises(ValueError, match="rows"):
        run_trial(work, CPU, model)
    assert (described(model), states()) == before


def test_without_memory_for_a_copy_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_trace, "can_fork_safely", lambda: False)
    monkeypatch.setattr(without_trace, "read_free_bytes", lambda device: 100)
    with pytest.raises(TrialNotPossible, match="memory"):
        run_trial(lambda: pytest.fail("tried"), CPU, Net())
    monkeypatch.setattr(without_trace, "MOST_OBJECTS", 10)
    with pytest.raises(TrialNotPossible, match="objects"):
        run_trial(lambda: pytest.fail("tried"), CPU, Net())
