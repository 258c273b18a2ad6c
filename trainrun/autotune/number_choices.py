"""Choose the number type and the number of threads of a run by short measurements in a child process.

what: float32 and bfloat16 autocast are timed, and bfloat16 is chosen if it is certainly at least 10 % faster. Then
    torch's default number of threads, its square root, and one thread are timed. Fewer threads are chosen if they
    are certainly at least 1.2x as fast. So the choice on a quiet machine is always the same.
when: runs that are long enough. The budget is 0.5 s and 1 % of the run for number types, and half of that for
    threads.
when not: short runs; resumes and evaluations, which use the choices of the run; settings that the user typed;
    compiled, recomputed or deterministic steps; steps of more than 60 ms; iterable sources, whose samples could be
    lost; no safe fork, as on a GPU. Rules decide there.
source: a tiny network spends its time in casts. Two threads beside busy processes wait for each other to be
    scheduled.
gain: none over the better one of the two if the user types it.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from trainrun.autotune.timed_step import (
    FEW_BATCHES,
    ROUNDS,
    Clock,
    TimedChoice,
    TimedStep,
    TrialBudget,
    agreed_choice,
    choose_fastest,
    other_step,
    run_seconds,
)
from trainrun.config.schema import RunConfig
from trainrun.data.split_batch import count_rows, list_tensors, select_rows
from trainrun.interfaces import Batches, Parallel
from trainrun.precision import autocast
from trainrun.precision.autocast import is_tiny_step
from trainrun.precision.update import AUTOCAST_TYPES, FULL, MIXED, build_autocast_context
from trainrun.runtime.child_process import can_fork_safely
from trainrun.training.recovery.oom import find_batch_norm
from trainrun.training.without_trace import read_first_batches, run_trial

PRECISION = TrialBudget(0.5, 0.01)
THREADS = TrialBudget(0.25, 0.005)
LONGEST_STEP = PRECISION.seconds / (2 * (ROUNDS + 1))
NOTABLE = 0.1  # numbers change by the choice: less is not worth it
NOTABLE_OF_THREADS = 0.2
HOPELESS = 20  # times as long a whole batch would take, were its rows as slow as a few are
LONG_FLOP = 5e10  # of the fewest samples: a second on a core


def choose_numbers(
    config: RunConfig, model: nn.Module, task: Any, train: Batches, parallel: Parallel, num_batches: float,
    wanted: list[str], chosen: dict[str, str], notes: list[str], clock: Clock = perf_counter,
) -> None:  # fmt: skip
    """Add to `chosen` what of `wanted` can be measured, and to `notes` a line about each.

    wanted: of precision and num_threads. num_batches: of the whole run. Every rank calls it, and chooses the same.
    """
    if num_batches < FEW_BATCHES:
        return
    here = parallel.device.type == "cpu" and can_fork_safely()
    if not all(parallel.gather(here and not other_step(config) and not other_cost(config, train))):
        return

    def measure() -> dict[str, TimedChoice | None]:
        with contextlib.closing(train):
            data = read_first_batches(train)[0]
        trial = NumberTrial(config, TimedStep(model, task, parallel, clock), data)
        return trial.choices(num_batches, wanted)

    choices: dict[str, TimedChoice | None] = {}
    # A fault of the user's own, in any of their code: the run meets it again and reports it.
    with contextlib.suppress(Exception):
        choices = run_trial(measure, parallel.device)
    usual = {"precision": FULL, "num_threads": str(torch.get_num_threads())}
    for name, key in (("precision", "precision"), ("num_threads", "trainer.num_threads")):
        choice = agreed_choice(parallel.gather(choices.get(name)), usual[name])
        if choice is not None:
            chosen[name] = choice.name
            notes.append(f"{key}: {choice.name}, {choice}")


class NumberTrial:
    """Steps on one batch with each number type and number of threads."""

    def __init__(self, config: RunConfig, step: TimedStep, data: Any) -> None:
        self._config, self._step, self._data = config, step, data
        self._device, self._count = step.parallel.device, count_rows(data)
        self._mode = config.precision.mode
        if self._mode == "auto":
            self._mode = autocast.choose_mode_by_rule(
                self._device, is_tiny_step(step.model, config.data.batch_size)
            )[0]

    def usual_seconds(self) -> float | None:
        """Return the seconds of a step; None if it takes too long, with a few rows or with the whole batch."""
        few = min(2 if find_batch_norm(self._step.model) else 1, self._count)
        weights = sum(parameter.numel() for parameter in self._step.model.parameters())
        numbers = list_tensors(self._data)[0]
        tokens = 1 if numbers.is_floating_point() else math.prod(numbers.shape[1:2])
        if 6.0 * weights * few * tokens > LONG_FLOP:
            return None
        for rows in (few, self._count):
            self._turn(self._mode, rows)  # kernels are chosen and built
            seconds = min(self._turn(self._mode, rows) for _ in range(2))
            if seconds > LONGEST_STEP or seconds * self._count / rows > HOPELESS * LONGEST_STEP:
                return None
        return seconds

    def choices(self, num_batches: float, wanted: list[str]) -> dict[str, TimedChoice | None]:
        """Return what is fastest, by name; nothing where a step takes too long."""
        seconds, chosen = self.usual_seconds(), dict[str, TimedChoice | None]()
        if seconds is None:
            return {}
        run_length, mode, clock = (
            run_seconds(self._config, num_batches * seconds),
            self._mode,
            self._step.clock,
        )
        if "precision" in wanted:
            types = {name: partial(self._turn, name) for name in (FULL, MIXED)}
            choice = choose_fastest(types, FULL, NOTABLE, PRECISION.limit_for(run_length), seconds, clock)
            chosen["precision"] = choice
            mode = mode if choice is None else choice.name
        usual = torch.get_num_threads()
        if "num_threads" in wanted and usual > 1:
            numbers = {
                str(number): partial(self._with_threads, number, mode)
                for number in (usual, math.isqrt(usual), 1)
            }
            limit = THREADS.limit_for(run_length)
            chosen["num_threads"] = choose_fastest(
                numbers, str(usual), NOTABLE_OF_THREADS, limit, 2 * seconds, clock
            )
        return chosen

    def _turn(self, mode: str, rows: int = 0) -> float:
        """Measure the seconds of a step. rows: of the batch; 0 for all."""
        data = select_rows(self._data, 0, rows, self._count) if rows else self._data
        return self._step.seconds(
            data, partial(build_autocast_context, AUTOCAST_TYPES.get(mode), self._device)
        )

    def _with_threads(self, number: int, mode: str) -> float:
        torch.set_num_threads(number)
        self._turn(mode)  # wakes them
        return self._turn(mode)


def other_cost(config: RunConfig, train: Batches) -> str:
    """Return why a trial would measure something else, or would take samples from the run; "" if it is fair."""
    if not getattr(train, "may_be_read_before", True):
        return "an iterable source"
    trainer = config.trainer
    if trainer.deterministic or trainer.compile.scope != "off" or trainer.gradient_checkpointing != "none":
        return "another cost"
    if trainer.activation_offload:
        return "another step"
    read_in_workers = config.data.num_workers not in ("auto", 0)
    return "workers would have to start" if read_in_workers else ""
