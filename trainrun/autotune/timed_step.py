"""Time the forward and backward passes of model and task, and choose the fastest of a few settings by paired turns.

A timed step changes gradients and buffers of its model, so it runs in a temporary child process.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainrun.config.schema import RunConfig
from trainrun.data.batch import map_leaves
from trainrun.interfaces import Parallel
from trainrun.limits import SECOND, parse_any_duration, parse_seconds
from trainrun.runtime.machine import wait_for_device
from trainrun.training.recovery.oom import describe_out_of_memory

if TYPE_CHECKING:
    from trainrun.timing.paired import Turn

FEW_BATCHES = 500  # a shorter run is not worth the first looks, which take about 25 steps
MEASURED_LOOPS = ("trainrun.benchmark.", "trainrun.race.")  # they make the usual steps
ROUNDS = 3  # of turns, or there is no time to measure
MOST_ROUNDS = 12
SURE = 0.75  # confidence of the interval that must be above 1, for what displaces the usual choice

Clock = Callable[[], float]
Autocast = Callable[[], AbstractContextManager[Any]]


class TrialBudget(NamedTuple):
    """The limit of one measurement: seconds, and a fraction of the run's time."""

    seconds: float
    fraction: float

    def limit_for(self, run_seconds: float) -> float:
        return min(self.seconds, self.fraction * run_seconds)


class TimedStep:
    """A model and a task whose forward and backward passes are timed."""

    def __init__(self, model: nn.Module, task: Any, parallel: Parallel, clock: Clock = perf_counter) -> None:
        self.model, self.task = model, task
        self.clock, self.parallel = clock, parallel

    def __call__(self, data: Any, autocast: Autocast) -> None:
        """Run one forward and backward, without an update."""
        try:
            with autocast():
                out = self.task.step(self.model, data)
            out.loss_sum.backward()
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None

    def seconds(self, data: Any, autocast: Autocast) -> float:
        """Measure one step on a copy of the batch; infinite if memory does not suffice."""
        data = clone_batch(data)
        began = self.now()
        try:
            self(data, autocast)
        except (MemoryError, RuntimeError) as error:
            if not describe_out_of_memory(error):
                raise
            gc.collect()
            torch.cuda.empty_cache()  # nothing happens where no GPU is in use
            return math.inf
        return self.now() - began

    def now(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        wait_for_device(self.parallel.device)
        return self.clock()


class TimedChoice(NamedTuple):
    """The fastest of several choices, and the formatted time of each."""

    name: str
    times: dict[str, str]

    def __str__(self) -> str:
        others = ", ".join(f"{name}: {time}" for name, time in self.times.items() if name != self.name)
        own = self.times[self.name]
        return f"{own} a step ({others})" if own.endswith(" ms") else f"{own} ({others})"


def choose_fastest(
    turns: Mapping[str, Turn], usual: str, smallest: float, limit: float, seconds: float, clock: Clock
) -> TimedChoice | None:
    """Return the fastest of several settings. Return None if there is no time to compare, or if none fits into
    memory.

    usual: the setting that is chosen unless another one is certainly faster by the fraction `smallest`. seconds:
        the approximate duration of one turn.
    """
    if (ROUNDS + 1) * len(turns) * seconds > limit:
        return None
    began = clock()
    fitting = {
        name: turn for name, turn in turns.items() if turn() < math.inf
    }  # the first turn builds kernels
    if not fitting:
        return None
    base = usual if usual in fitting else next(iter(fitting))
    from trainrun.timing.paired import StoppingRules, compare_in_turns

    rules = StoppingRules(smallest, limit, 1, ROUNDS, ROUNDS, MOST_ROUNDS)
    others = {name: turn for name, turn in fitting.items() if name != base}
    comparison = compare_in_turns(fitting[base], others, rules, lambda: clock() - began)
    speeds = comparison.speeds(base)
    times = dict.fromkeys(turns, "does not fit into memory")
    times |= dict.fromkeys(fitting, "not compared")
    times |= {name: f"{1e3 / speed:.3g} ms" for name, speed in speeds.items()}
    return TimedChoice(comparison.best(smallest, SURE) or base, times)


def agreed_choice(choices: Sequence[TimedChoice | None], usual: str) -> TimedChoice | None:
    """Return the choice of all ranks if they agree, else `usual`; None if a rank has no choice."""
    if any(choice is None for choice in choices):
        return None
    first, *others = (choice for choice in choices if choice is not None)
    return first if all(other.name == first.name for other in others) else first._replace(name=usual)


def run_seconds(config: RunConfig, seconds: float) -> float:
    """Estimate how long the run may take. seconds: by the number of its steps."""
    limit = parse_any_duration(config.trainer.max_duration)
    by_duration = limit.amount if limit is not None and limit.unit == SECOND else math.inf
    return min(seconds, parse_seconds(config.trainer.max_time) or math.inf, by_duration)


def other_step(config: RunConfig) -> str:
    """Return why a timed step differs from the step of the run; "" if it does not."""
    if config.step:
        return "step is your own, so what it does is not known"
    if config.loop and not str(config.loop.get("_target_")).startswith(MEASURED_LOOPS):
        return "loop is your own, so the step is not known"
    return ""


def clone_batch(data: Any) -> Any:
    """Copy a batch, since a model may write into its inputs."""
    return map_leaves(data, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
