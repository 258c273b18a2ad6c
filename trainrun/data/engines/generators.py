"""Random numbers of a user's own code: seeded for each sample by (seed, epoch, index).

A parameter always works: a `__getitem__`, or a transform, with `generator` gets a torch.Generator seeded by (seed,
epoch, index), a `__getitems__` with `generators` a list of them. Other code may draw from the global generators of
Python, NumPy and torch. Where nothing else draws meanwhile (in a worker, in the main process between two steps), they
are seeded before each call. A thread beside the training must not: its sources draw from no global generator.
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


def new_generator(*parts: int) -> torch.Generator:
    """Return a new generator whose numbers depend on `parts` alone."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def seed_globals(*parts: int) -> None:
    """Seed the generators that a user's `__getitem__` may draw from, by a hash of `parts`."""
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
    """Prepares the global generators for each call of the user's code.

    before: called with what is called and with the numbers that its random numbers depend on. after: once it returned.
    is_idle: neither of them does anything.
    """

    @property
    def is_idle(self) -> bool: ...

    def before(self, what: str, *parts: int) -> None: ...

    def after(self, what: str) -> None: ...


class SeedGlobals:
    """Seeds some of the global generators before each call; the others are known not to be drawn from."""

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
    """Leaves the global generators alone, for a thread beside the training."""

    is_idle = True

    def before(self, what: str, *parts: int) -> None:
        """Do nothing."""

    def after(self, what: str) -> None:
        """Do nothing."""


class RecordDraws:
    """Seeds all global generators before each call, and records which calls move which of them.

    moved: the generators that were moved, by what was called. seconds, busy_seconds: of all calls, on the clock and of
    the processor. pauses: how often a call gave the processor up, to wait for something; to lose it to others is none.
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
    """Return how often this process has given the processor up."""
    return psutil.Process().num_ctx_switches().voluntary


def mark_of_torch() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())  # `.numpy().tobytes()` takes 4 us more


MARKS: dict[str, Callable[[], Any]] = {
    PYTHON: PYTHON_GENERATOR.mark,
    NUMPY: NUMPY_GENERATOR.mark,
    TORCH: mark_of_torch,
}


def read_generator_states(names: tuple[str, ...] = GLOBAL_GENERATORS) -> list[Any]:
    """Return values that differ once one of these generators has been drawn from."""
    return [MARKS[name]() for name in names]
