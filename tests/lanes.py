"""The lane of a test says what it may do; its folder sets it.

unit: starts no training and no process, but for the child of a look at data, which has ended by then. train: trains in
this process. process: starts others (ranks, workers of a loader, the real command), sends signals, or is in a room
whose tests train several whole runs (runs, export, smaller). fault: random kills, damage and power loss; the pretended
GPU. A file, or a test, of another lane than its folder says so itself:
`pytestmark = pytest.mark.process`.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from trainrun.training import loop

UNIT, TRAIN, PROCESS, FAULT = LANES = ("unit", "train", "process", "fault")
# Folders of tests/; what is not here is of the lane `unit`.
LANE_OF = {
    "benchmark": TRAIN, "cli": TRAIN, "scheduler": TRAIN, "step": TRAIN, "training": TRAIN, "transform": TRAIN,
    "starter": TRAIN,
    "convert": PROCESS, "export": PROCESS, "launch": PROCESS, "runs": PROCESS, "scripts": PROCESS, "smaller": PROCESS,
    "verify": PROCESS,
    "faults": FAULT, "pretended_gpu": FAULT,
}  # fmt: skip
STARTERS = ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")  # of os
HARMLESS = ("git", "uname")  # of the facts that every run notes
TRIALS = "trainrun.runtime.child_process"  # forks for a moment, at the start of every run


def lane_of_item(item: pytest.Item) -> str:
    """The lane of the nearest marker of one."""
    return next(mark.name for mark in item.iter_markers() if mark.name in LANES)


class Watch:
    """Notes the processes and trainings that the present test starts."""

    def __init__(self) -> None:
        self.processes: list[str] = []
        self.trainings = 0

    def install(self) -> None:
        """For the rest of this process. An audit hook would see more, and be called by each `id()`: 7 % of all time."""
        for name in filter(partial(hasattr, os), STARTERS):
            noting = self.note_calls(getattr(os, name))
            for module in (os, sys.modules[os.name]):  # pickle looks for `posix.system`
                setattr(module, name, noting)
        subprocess.Popen.__init__ = self.note_calls(subprocess.Popen.__init__)  # type: ignore[method-assign]
        fit, start = loop.fit, multiprocessing.process.BaseProcess.start

        @functools.wraps(fit)
        def noted_fit(*arguments: Any, **named: Any) -> Any:
            self.trainings += 1
            return fit(*arguments, **named)

        def noted_start(process: multiprocessing.process.BaseProcess) -> None:
            self.processes.append(process.name)
            start(process)

        loop.fit = noted_fit
        multiprocessing.process.BaseProcess.start = noted_start  # type: ignore[method-assign]

    def note_calls(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that starts a process, so that it notes what it starts."""

        @functools.wraps(start)
        def noted(*arguments: Any, **named: Any) -> Any:
            words = [text for text in (*arguments, named.get("args")) if isinstance(text, str | list | tuple)]
            first = words[0] if words and words[0] else start.__name__
            name = str(first if isinstance(first, str) else first[0])
            if name not in HARMLESS and sys._getframe(1).f_globals.get("__name__") != TRIALS:
                self.processes.append(name)
            return start(*arguments, **named)

        return noted

    @contextmanager
    def of_lane(self, lane: str) -> Iterator[None]:
        """Fails if what runs inside does more than `lane` allows, or slows down the tests that follow."""
        self.processes, self.trainings = [], 0
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        yield
        if os.getpriority(os.PRIO_PROCESS, 0) != priority:
            pytest.fail("leaves another priority to this process, and so to every later test")
        if lane in (UNIT, TRAIN) and self.processes:
            pytest.fail(
                f"starts a process ({self.processes[0]}): its lane is `process`, not `{lane}` (tests/lanes.py)"
            )
        if lane == UNIT and self.trainings:
            pytest.fail("trains: its lane is `train`, not `unit` (tests/lanes.py)")
