"""Ablations: runs in which one cost is removed. The gain is an upper bound of what a remedy for this cost can give.

Each ablation replaces a part of the run for a few steps, whose results are discarded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from trainrun.benchmark.pacing import OpenStream
from trainrun.benchmark.worker_messages import SAVING, RunInfo
from trainrun.config.schema import RunConfig
from trainrun.data.engines.stream import BatchesWrapper
from trainrun.interfaces import GradReport, MicroBatch, StepReport
from trainrun.timing.phases import OPTIMIZER, RUNNER
from trainrun.training.components import Components


class CachedBatches(BatchesWrapper):
    """A stream that repeats the batches of the last turn of the unchanged run, which are on the device already.

    The same batches are used because batches of other shapes would take another time. A model must not write into
    them.
    """

    def __init__(self, train: OpenStream) -> None:
        super().__init__(train)
        self._stream = train

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        recorded = [batch._replace(last=False) for batch in self._stream.kept]
        batches = [batch for batch in recorded if batch.real] or recorded
        if not batches:
            raise RuntimeError("no turn of the run kept its batches")
        while True:
            yield from batches


class NoLogging:
    """The triggers of a run without any log point."""

    def __init__(self, triggers: Any) -> None:
        self._triggers = triggers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._triggers, name)

    def is_log_due(self, step: int) -> bool:
        return False


class NoGradientSync:
    """A parallel backend that treats every micro-batch as not the last of its step, so that gradients are never
    exchanged.
    """

    def __init__(self, parallel: Any) -> None:
        self._parallel = parallel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel, name)

    def sync_gradients(self, last: bool) -> Any:
        return self._parallel.sync_gradients(last=False)


def step_without_update(run: Components, micro_batches: list[MicroBatch]) -> StepReport:
    gradients = run.accumulate(run, micro_batches)
    run.phases.open(OPTIMIZER)
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    run.phases.open(RUNNER)
    return StepReport(*gradients, GradReport(None, False))


def step_with_autocast_everywhere(step: Any, run: Components, micro_batches: Any) -> StepReport:
    """Run a step with autocast, also where the model switches autocast off."""
    enter: Any = torch.autocast.__enter__

    def enabled(self: Any) -> Any:
        self._enabled = True
        return enter(self)

    torch.autocast.__enter__ = enabled  # type: ignore[method-assign]
    try:
        report: StepReport = step(run, micro_batches)
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    return report


def step_with_threads(number: int, step: Any, run: Components, micro_batches: Any) -> StepReport:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        report: StepReport = step(run, micro_batches)
    finally:
        torch.set_num_threads(before)
    return report


CACHED: Final = "cached"
NO_LOGGING: Final = "no_logging"
NO_UPDATE: Final = "no_update"
THREADS: Final = "threads="
LARGER: Final = "larger_batch"  # without logging, which is another cause
BUCKET: Final = "bucket"
# Read other data than the base, or while something else goes on.
OTHER_RUNS: Final = (BUCKET, LARGER)  # with a setting of their own
OTHER_READING: Final = (SAVING, BUCKET, LARGER)
ABLATIONS: Final[dict[str, Callable[[Components], Any]]] = {
    NO_LOGGING: lambda run: replace(run, triggers=NoLogging(run.triggers)),  # type: ignore[arg-type]
    NO_UPDATE: lambda run: replace(run, step=step_without_update),
    "no_gradient_sync": lambda run: replace(run, parallel=NoGradientSync(run.parallel)),
    "one_type": lambda run: replace(run, step=partial(step_with_autocast_everywhere, run.step)),
}
# The cause that an ablation shows, and what was done; the order in which they matter when time is short.
CAUSES_OF: Final = {
    CACHED: ("data", "batches that are there already"), SAVING: ("checkpoint", "no checkpoints"),
    "no_gradient_sync": ("ranks", "no exchange of gradients"), "one_type": ("islands", "autocast everywhere"),
    NO_LOGGING: ("logging", "no log points"), NO_UPDATE: ("update", "no optimizer"),
    BUCKET: ("padding", "data.padding=bucket"),
}  # fmt: skip


def apply_ablations(name: str, run: Components, cached: CachedBatches) -> Components:
    """Return the run with one ablation, or with several joined by `+`. `threads=2` is an ablation too."""
    for ablation in name.split("+"):
        if ablation.startswith(THREADS):
            step = partial(step_with_threads, int(ablation.removeprefix(THREADS)), run.step)
            run = replace(run, step=step)
        else:
            run = replace(run, train=cached) if ablation == CACHED else ABLATIONS[ablation](run)
    return run


def useful_ablations(config: RunConfig, info: RunInfo, steps: int) -> list[str]:
    """Return the ablations that can matter for this run, the most important first. steps: the number of steps in a
    turn.
    """
    keep, cores = config.checkpoint, os.cpu_count() or 1
    counts = sorted({1, max(1, cores // 2), min(cores, 2 * info.num_threads)} - {info.num_threads})
    plain_step = config.trainer.compile.scope != "step"
    every = keep.every_n_train_steps
    often = keep.enabled and isinstance(every, int) and every <= 2 * steps
    return [
        CACHED,
        *[SAVING] * bool(often),
        *["no_gradient_sync"] * (info.world_size > 1),
        *["one_type"] * ("mixed" in config.precision.mode),
        *[f"{THREADS}{number}" for number in counts if info.world_size == 1 and info.device == "cpu"],
        NO_LOGGING,
        *[NO_UPDATE] * plain_step,
    ]


def ablation_title(name: str) -> str:
    """Return the name of an ablation for the list of those that were not measured."""
    return "a larger batch" if name == LARGER else CAUSES_OF.get(name, ("", f"trainer.num_{name}"))[1]
