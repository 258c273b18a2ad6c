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
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainrun.config.schema import RunConfig
from trainrun.data.batch import map_leaves
from trainrun.data.split_batch import count_rows, list_tensors, select_rows
from trainrun.interfaces import Batches, Parallel
from trainrun.limits import SECOND, parse_any_duration, parse_seconds
from trainrun.precision import autocast
from trainrun.precision.autocast import is_tiny_step
from trainrun.precision.update import AUTOCAST_TYPES, FULL, MIXED, build_autocast_context
from trainrun.runtime.child_process import can_fork_safely
from trainrun.runtime.machine import wait_for_device
from trainrun.training.recovery.oom import describe_out_of_memory, find_batch_norm
from trainrun.training.without_trace import read_first_batches, run_trial

if TYPE_CHECKING:
    from trainrun.comparison.paired import Turn

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

    def compute_limit_seconds(self, run_seconds: float) -> float:
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
        began = self.read_clock()
        try:
            self(data, autocast)
        except (MemoryError, RuntimeError) as error:
            if not describe_out_of_memory(error):
                raise
            gc.collect()
            torch.cuda.empty_cache()  # nothing happens where no GPU is in use
            return math.inf
        return self.read_clock() - began

    def read_clock(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        wait_for_device(self.parallel.device)
        return self.clock()


class TimedChoice(NamedTuple):
    """The fastest of several choices, and the formatted time of each."""

    name: str
    times: dict[str, str]

    def __str__(self) -> str:
        others = ", ".join(f"{name}: {time}" for name, time in self.times.items() if name != self.name)
        own_time = self.times[self.name]
        return f"{own_time} a step ({others})" if own_time.endswith(" ms") else f"{own_time} ({others})"


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
    from trainrun.comparison.paired import StoppingRules, compare_in_turns

    rules = StoppingRules(smallest, limit, 1, ROUNDS, ROUNDS, MOST_ROUNDS)
    others = {name: turn for name, turn in fitting.items() if name != base}
    comparison = compare_in_turns(fitting[base], others, rules, lambda: clock() - began)
    speeds = comparison.speeds(base)
    times = dict.fromkeys(turns, "does not fit into memory")
    times |= dict.fromkeys(fitting, "not compared")
    times |= {name: f"{1e3 / speed:.3g} ms" for name, speed in speeds.items()}
    return TimedChoice(comparison.best(smallest, SURE) or base, times)


def find_agreed_choice(choices: Sequence[TimedChoice | None], usual: str) -> TimedChoice | None:
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


def explain_other_step(config: RunConfig) -> str:
    """Return why a timed step differs from the step of the run; "" if it does not."""
    if config.step:
        return "step is your own, so what it does is not known"
    if config.loop and not str(config.loop.get("_target_")).startswith(MEASURED_LOOPS):
        return "loop is your own, so the step is not known"
    return ""


def clone_batch(data: Any) -> Any:
    """Copy a batch, since a model may write into its inputs."""
    return map_leaves(data, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


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
    """Measure the settings in `wanted`. Add each choice to `chosen`, and a line about it to `notes`.

    wanted: of `precision` and `num_threads`. num_batches: of the whole run. Every rank calls this function and makes
        the same choices.
    """
    if num_batches < FEW_BATCHES:
        return
    here = parallel.device.type == "cpu" and can_fork_safely()
    if not all(
        parallel.gather(here and not explain_other_step(config) and not explain_unfair_trial(config, train))
    ):
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
        choice = find_agreed_choice(parallel.gather(choices.get(name)), usual[name])
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

    def measure_step_seconds(self) -> float | None:
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
        """Return the fastest number type and number of threads, by setting. Return {} if a step takes too long."""
        seconds, chosen = self.measure_step_seconds(), dict[str, TimedChoice | None]()
        if seconds is None:
            return {}
        run_length, mode, clock = (
            run_seconds(self._config, num_batches * seconds),
            self._mode,
            self._step.clock,
        )
        if "precision" in wanted:
            types = {name: partial(self._turn, name) for name in (FULL, MIXED)}
            choice = choose_fastest(
                types, FULL, NOTABLE, PRECISION.compute_limit_seconds(run_length), seconds, clock
            )
            chosen["precision"] = choice
            mode = mode if choice is None else choice.name
        usual = torch.get_num_threads()
        if "num_threads" in wanted and usual > 1:
            numbers = {
                str(number): partial(self._time_turn_with_threads, number, mode)
                for number in (usual, math.isqrt(usual), 1)
            }
            limit = THREADS.compute_limit_seconds(run_length)
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

    def _time_turn_with_threads(self, number: int, mode: str) -> float:
        torch.set_num_threads(number)
        self._turn(mode)  # wakes them
        return self._turn(mode)


def explain_unfair_trial(config: RunConfig, train: Batches) -> str:
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
