"""Settings of Python's garbage collector that keep it out of imports and steps.

What: during start-up it hardly runs. At the first step, everything that was built is frozen (never examined again).
    Garbage of steps is collected at log points and validations. When not: if user code has called `gc.disable()` or
    `gc.freeze()`. Source: torchtitan and nanochat. Gain: `import torch` takes 0.88x its time; a full collection 6 us
    instead of 280 ms (AMD EPYC, torch 2.13).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STARTING = (100_000, 50, 50)  # objects that are new, and younger collections, until Python collects
BETWEEN = 10_000  # new objects that are looked at also where nothing is ever logged
ENOUGH = 700  # new objects at a log point or a validation; fewer are left alone, as Python leaves them
BETWEEN_SECONDS = 1.0  # two looks at all that is not frozen

_usual = gc.get_threshold()
_frozen_at_start = gc.get_freeze_count()  # Python 3.12 begins with objects of its own that are frozen
_has_frozen = False  # by this module; counting frozen objects takes 8 ms in a large process


def suspend_collector() -> None:
    """Suspend garbage collection during imports, which make many objects and no garbage. For trainrun's own
    processes only.
    """
    gc.set_threshold(*STARTING)


def freeze_objects() -> None:
    """Freeze all objects before a process ends, so that Python does not search them for cycles."""
    gc.freeze()


@contextmanager
def restore_collector() -> Iterator[None]:
    """Restore the settings of the garbage collector at the end of the block."""
    global _has_frozen
    thresholds, had_frozen = gc.get_threshold(), _has_frozen
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if _has_frozen and not had_frozen:
            gc.unfreeze()
            _has_frozen = False


def restore_usual_collection() -> None:
    """Undo `suspend_collector`. Thresholds that the user has set stay."""
    if gc.get_threshold() == STARTING:
        gc.set_threshold(*_usual)


def collect_between_steps() -> None:
    """Freeze all existing objects and collect garbage between steps. Called when everything is built.

    Does nothing if user code has disabled or frozen the collector.
    """
    global _has_frozen
    if gc.isenabled() and gc.get_freeze_count() <= _frozen_at_start:
        gc.freeze()
        _has_frozen = True
        gc.set_threshold(BETWEEN, *_usual[1:])


def freeze_new_objects() -> None:
    """Freeze objects that were built after `collect_between_steps`, such as a compiler with its modules."""
    if _has_frozen:
        gc.collect()
        gc.freeze()


class LogPointCollector:
    """A callable that collects garbage between steps.

    It collects young objects at a log point, and all unfrozen ones at a validation, at most once a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = -math.inf

    def __call__(self, thorough: bool) -> None:
        if not gc.isenabled():
            return
        if thorough and self._clock() >= self._due:
            gc.collect()
            self._due = self._clock() + BETWEEN_SECONDS
        elif gc.get_count()[0] > ENOUGH:
            gc.collect(1)
