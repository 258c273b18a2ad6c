"""A run with one thing taken away: what it then gains is the most that mending this thing could give.

Each takes the parts of a run and returns other parts for a few steps whose outcome is thrown away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from trainrun import loop
from trainrun.config import RunConfig
from trainrun.data.stream import Around
from trainrun.interfaces import GradReport, MicroBatch, StepReport
from trainrun.lab.orders import SAVING, Ready
from trainrun.ledger import DATA, LOGGING, OPTIMIZER, RUNNER
from trainrun.parts import Parts

RING: Final = 12  # batches that are kept and given again and again
FILL_SECONDS: Final = 1.0  # after which those that are there are enough


class Ring(Around):
    """Fills `Batches`: a few batches that lie on the device already, forever. A model must not write into them."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.train)
        self._kept: list[MicroBatch] = []

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        while True:
            yield from self._kept

    def fill(self, windows: Iterator[list[MicroBatch]]) -> int:
        """Once, with what comes next, and before anything is asked of it. How many windows it took."""
        if self._kept:
            return 0
        until, epochs = time.monotonic() + FILL_SECONDS, 0
        for number, window in enumerate(windows, 1):
            epochs += window[-1].last
            for batch in window:  # the last of an epoch may be smaller
                if (batch.real and not (batch.last and self._kept)) or (epochs > 1 and not self._kept):
                    self._kept.append(batch._replace(last=False))
            if self._kept and (window[-1].last or len(self._kept) >= RING or time.monotonic() > until):
                return number
        return 0

    def close(self) -> None:
        self._kept.clear()


class Silence:
    """In place of the cadence: nothing is ever logged."""

    def __init__(self, cadence: Any) -> None:
        self._cadence = cadence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cadence, name)

    def log_due(self, step: int) -> bool:
        return False


def silent(parts: Parts) -> Parts:
    """No log points."""
    return replace(parts, cadence=Silence(parts.cadence))  # type: ignore[arg-type]


def without_update(parts: Parts) -> Parts:
    """Forward and backward, and the gradients thrown away."""
    return replace(parts, stepper=_without_update)


def forward_only(parts: Parts) -> Parts:
    """Forward and loss, with the graph that a backward would need."""
    return replace(parts, stepper=_forward_only)


def unsynced(parts: Parts) -> Parts:
    """The ranks keep their gradients to themselves."""
    return replace(parts, parallel=Unsynced(parts.parallel))


class Unsynced:
    """In place of the backend: every micro-batch is one that another follows."""

    def __init__(self, parallel: Any) -> None:
        self._parallel = parallel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel, name)

    def sync_gradients(self, last: bool) -> Any:
        return self._parallel.sync_gradients(last=False)


def one_type(parts: Parts) -> Parts:
    """Autocast everywhere, also where the model switches it off."""
    return replace(parts, stepper=partial(_one_type, parts.stepper))


def _one_type(stepper: Any, parts: Parts, window: list[MicroBatch], log: bool) -> StepReport:
    own: Any = torch.autocast.__enter__

    def entered(self: Any) -> Any:
        self._enabled = True
        return own(self)

    torch.autocast.__enter__ = entered  # type: ignore[method-assign]
    try:
        report: StepReport = stepper(parts, window, log)
    finally:
        torch.autocast.__enter__ = own  # type: ignore[method-assign]
    return report


def threads(number: int, parts: Parts) -> Parts:
    """Another number of threads for each operation."""
    return replace(parts, stepper=partial(_threads, number, parts.stepper))


def _threads(number: int, stepper: Any, parts: Parts, window: list[MicroBatch], log: bool) -> StepReport:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        report: StepReport = stepper(parts, window, log)
    finally:
        torch.set_num_threads(before)
    return report


def _without_update(parts: Parts, window: list[MicroBatch], log: bool) -> StepReport:
    found = loop.add_gradients(parts, window, log)
    parts.ledger.open(OPTIMIZER)
    for group in parts.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    parts.ledger.open(RUNNER)
    return StepReport(*found, GradReport(None, False))


def _forward_only(parts: Parts, window: list[MicroBatch], log: bool) -> StepReport:
    items = sum(batch.counted_by(parts.task) for batch in window)
    agreed = parts.parallel.agree(items, 0, 0)
    losses = []
    for batch in window:
        with parts.parallel.sync_gradients(last=False), parts.precision.autocast():
            losses.append(parts.task.step(parts.wrapped, batch.data).loss_sum.detach())
    return StepReport(losses, items, agreed, {}, GradReport(None, False))


REMOVALS: Final[dict[str, Callable[[Parts], Parts]]] = {
    "silent": silent,
    "without_update": without_update,
    "forward_only": forward_only,
    "unsynced": unsynced,
    "one_type": one_type,
}
CACHED: Final = "cached"  # no loading, no copying
SILENT: Final = "silent"
THREADS: Final = "threads="
FORWARD: Final = "cached+forward_only"
BARE: Final = "cached+silent"  # what is left when nothing around the step takes time
PHASES: Final = (FORWARD, BARE)  # no finding of their own
LARGER: Final = "larger"  # a batch; it shares log points too, which are another cause: both sides go without
BUCKET: Final = "bucket"
READING: Final = (SAVING, BUCKET)  # whose reading is not the base's, or goes on during something else
ABOUTS: Final = {"cached": ("data", "batches that are there already"), SILENT: ("logging", "no log points"),
                 "without_update": ("update", "no optimizer"), "one_type": ("islands", "autocast everywhere"),
                 "unsynced": ("ranks", "no exchange of gradients"), SAVING: ("checkpoint", "no checkpoints"),
                 BUCKET: ("padding", "data.padding=bucket")}  # fmt: skip


def removed(name: str, parts: Parts, ring: Ring) -> Parts:
    """`cached`, or several joined by `+`, and `threads=2` among them. ring: the batches that `cached` gives."""
    for one in name.split("+"):
        number = one.removeprefix(THREADS)
        if number != one:
            parts = threads(int(number), parts)
        elif one == CACHED:
            parts = replace(parts, train=ring)
        else:
            parts = REMOVALS[one](parts)
    return parts


def booked_of(facts: Ready) -> dict[str, int]:
    """Removals whose time the ledger of the untouched loop knows, and their accounts: those of a CPU, where nothing
    goes on behind the loop's back. Reading during the training takes its cores as well."""
    if facts.device != "cpu":
        return {}
    return {"silent": LOGGING} if facts.reads_ahead else {CACHED: DATA, "silent": LOGGING}


def telling(config: RunConfig, facts: Ready, steps: int) -> list[str]:
    """Every removal that can tell something of this run, of which a turn holds so many steps."""
    names = [CACHED, SILENT]
    if not config.trainer.optimizer_in_backward and config.trainer.compile.scope != "step":
        names += ["without_update"] + [BARE, FORWARD] * (steps > 1)  # phases, where steps are short
    keep = config.checkpoint
    if keep.enabled and keep.every_n_train_steps and keep.every_n_train_steps <= 2 * steps:
        names.append(SAVING)
    if "mixed" in config.precision.mode:
        names.append("one_type")
    if facts.world_size > 1:
        names.append("unsynced")
    elif facts.device == "cpu":
        names += [f"{THREADS}{number}" for number in _thread_numbers(facts.num_threads)]
    return names


def _thread_numbers(own: int) -> list[int]:
    cores = os.cpu_count() or 1
    return sorted({1, max(1, cores // 2), min(cores, 2 * own)} - {own})


def title_of(removal: str) -> str:
    """As it is told where there was no time for it."""
    if removal in (*PHASES, LARGER):
        return "a larger batch" if removal == LARGER else "phases"
    return ABOUTS.get(removal, ("", f"trainer.num_{removal}"))[1]
