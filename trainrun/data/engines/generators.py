"""Seed the random numbers of the user's code for each sample by (seed, epoch, index).

A parameter always works: a `__getitem__` or a transform with a parameter `generator` gets a torch.Generator seeded by
(seed, epoch, index). A `__getitems__` with a parameter `generators` gets a list of them. Other code may use the
global generators of Python, NumPy and torch. In a worker, or in the main process between two steps, nothing else uses
them, so they are seeded before each call. A thread beside the training must not seed them, so its sources must not
use them.
"""

from __future__ import annotations

import ctypes
import inspect
import random
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from trainrun.seeding import NUMPY_GENERATOR, PYTHON_GENERATOR, derive_seed

PYTHON, NUMPY, TORCH = "random", "numpy.random", "torch"
GLOBAL_GENERATORS = (PYTHON, NUMPY, TORCH)


def has_parameter(function: Any, name: str) -> bool:
    """Return whether a callable has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some that are written in C cannot say
        return False


def build_generator(*parts: int) -> torch.Generator:
    """Return a new generator whose numbers depend only on `parts`."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def seed_globals(*parts: int) -> None:
    """Seed the global generators that a user's `__getitem__` may use, by a hash of `parts`."""
    _seed(derive_seed(*parts), GLOBAL_GENERATORS)


def _seed(seed: int, names: tuple[str, ...]) -> None:
    for name in names:
        if name == PYTHON:
            random.seed(seed)
        elif name == NUMPY:
            np.random.seed(seed % 2**32)
        else:
            # torch.manual_seed would seed every accelerator as well, or record a stack trace for each call.
            torch.default_generator.manual_seed(seed)


class SeedsCalls(Protocol):
    """A protocol to prepare the global generators for each call of the user's code.

    before: called before the call, with its name and the numbers on which its random numbers depend. after: called
        after the call. is_idle: whether both do nothing.
    """

    @property
    def is_idle(self) -> bool: ...

    def before(self, what: str, *parts: int) -> None: ...

    def after(self, what: str) -> None: ...


class SeedGlobals:
    """Seeds some of the global generators before each call. The others are known to be unused."""

    def __init__(self, names: tuple[str, ...] = GLOBAL_GENERATORS) -> None:
        self.names = names
        self.others = tuple(name for name in GLOBAL_GENERATORS if name not in names)
        self.is_idle = not names

    def before(self, what: str, *parts: int) -> None:
        if self.names:
            _seed(derive_seed(*parts), self.names)

    def after(self, what: str) -> None:
        """Do nothing."""


class LeaveGlobals:
    """Leaves the global generators unchanged, for a thread beside the training."""

    is_idle = True

    def before(self, what: str, *parts: int) -> None:
        """Do nothing."""

    def after(self, what: str) -> None:
        """Do nothing."""


class RecordDraws:
    """Seeds all global generators before each call, and records which calls use which of them.

    moved: the used generators by call. seconds, busy_seconds: wall time and processor time of all calls. pauses: how
        often a call waited and so gave up the processor. Losing the processor to another process does not count.
    """

    is_idle = False

    def __init__(self) -> None:
        self.moved: dict[str, set[str]] = {}
        self.seconds = self.busy_seconds = 0.0
        self.pauses = self._began_pauses = 0
        self._before: list[Any] = []
        self._began = self._began_busy = 0.0

    def before(self, what: str, *parts: int) -> None:
        seed_globals(*parts)
        self._before = read_generator_states()
        self._began_pauses = _count_pauses()
        self._began, self._began_busy = perf_counter(), process_time()

    def after(self, what: str) -> None:
        self.seconds += perf_counter() - self._began
        self.busy_seconds += process_time() - self._began_busy
        self.pauses += _count_pauses() - self._began_pauses
        pairs = zip(GLOBAL_GENERATORS, self._before, read_generator_states(), strict=True)
        changed = {name for name, before, after in pairs if after != before}
        if changed:
            self.moved.setdefault(what, set()).update(changed)


def _count_pauses() -> int:
    """Return how often this process has voluntarily given up the processor."""
    return psutil.Process().num_ctx_switches().voluntary


def read_torch_state_bytes() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())  # `.numpy().tobytes()` takes 4 us more


MARKS: dict[str, Callable[[], Any]] = {
    PYTHON: PYTHON_GENERATOR.mark,
    NUMPY: NUMPY_GENERATOR.mark,
    TORCH: read_torch_state_bytes,
}


def read_generator_states(names: tuple[str, ...] = GLOBAL_GENERATORS) -> list[Any]:
    """Return values that change when one of these generators is used."""
    return [MARKS[name]() for name in names]
