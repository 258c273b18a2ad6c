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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from trainrun.seeding import cuda_states, derive_seed, set_cuda_states

PYTHON, NUMPY, TORCH = "random", "numpy.random", "torch"
GLOBAL_GENERATORS = (PYTHON, NUMPY, TORCH)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
MT19937_BYTES = 624 * 4 + 4  # its key and the position in it


def takes(function: Any, name: str) -> bool:
    """Return whether a callable has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some that are written in C cannot say
        return False


def generator_of(*parts: int) -> torch.Generator:
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
        self._before: dict[str, Any] = {}
        self._began = self._began_busy = 0.0

    def before(self, what: str, *parts: int) -> None:
        seed_globals(*parts)
        self._before = states()
        self._began_pauses = _pauses()
        self._began, self._began_busy = perf_counter(), process_time()

    def after(self, what: str) -> None:
        self.seconds += perf_counter() - self._began
        self.busy_seconds += process_time() - self._began_busy
        self.pauses += _pauses() - self._began_pauses
        changed = {name for name, state in states().items() if state != self._before[name]}
        if changed:
            self.moved.setdefault(what, set()).update(changed)


def _pauses() -> int:
    """Return how often this process has given the processor up."""
    return psutil.Process().num_ctx_switches().voluntary


def states() -> dict[str, Any]:
    """Return where the global generators of this process stand, to be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        PYTHON: random.getstate(),
        NUMPY: (name, keys.tobytes(), *rest),  # type: ignore[union-attr]
        TORCH: torch.default_generator.get_state().numpy().tobytes(),
    }


def marks(names: tuple[str, ...]) -> list[Any]:
    """Return values that differ once one of these generators has been drawn from, quicker than `states`."""
    return [MARKS[name]() for name in names]


def _mark_of_numpy() -> Any:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its types lack it
    if type(generator) is np.random.MT19937:  # 1 us in place of 40
        return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
    return states()[NUMPY]


def _mark_of_torch() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


MARKS: dict[str, Callable[[], Any]] = {
    PYTHON: random.getstate, NUMPY: _mark_of_numpy, TORCH: _mark_of_torch,
}  # fmt: skip


@contextmanager
def apart_from_training() -> Iterator[None]:
    """Put the global generators back where they were, after a batch that the training's process reads.

    As `trainrun.seeding.kept_random_state`, but NumPy's state is written only if it was moved (40 us in each batch).
    """
    python, cpu, cuda = random.getstate(), torch.get_rng_state(), cuda_states()
    numpy_state: Any = np.random.get_state(legacy=True)
    has_gauss = numpy_state[3]
    if has_gauss:  # a normal number that waits would be given out, and no mark would tell
        np.random.set_state((*numpy_state[:3], 0, 0.0))
    before = _mark_of_numpy()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        set_cuda_states(cuda)
        if has_gauss or _mark_of_numpy() != before:
            np.random.set_state(numpy_state)
