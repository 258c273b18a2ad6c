"""Choose the data engine: rules name at most three candidates, and paired turns with real training steps decide.

what: the loading alone and the step alone are timed for a moment. Loading that takes next to nothing is left to the
    simplest engine. Else the simplest, the number of threads and the number of workers that should be best (or the
    rule's) read in turns, each with forward and backward of a copy of the model on batches that none has read before,
    so that no engine finds them in the page cache. Of what is about as fast as the fastest, the simplest is taken.
when: `data.engine`, `data.num_workers` or `data.num_threads` is auto and the run is long enough; at most 2.5 s and 4 %
    of the run.
when not: a loop of one's own, data that draws random numbers of its own, models that cannot be copied: the rule stays.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainrun.autotune.timed_step import (
    FEW_BATCHES,
    SURE,
    Clock,
    TimedStep,
    TrialBudget,
    cloned,
    obstacle,
    run_seconds,
)
from trainrun.data.engines.auto_stream import AutoStream, Option, simplicity
from trainrun.data.split_batch import tensors_in
from trainrun.interfaces import Batches, MicroBatch
from trainrun.output import duration, quantity
from trainrun.runtime.machine import usable_cores
from trainrun.seeding import kept_random_state
from trainrun.training.components import Components

if TYPE_CHECKING:
    from trainrun.timing.paired import Comparison, Turn

ENGINES = TrialBudget(2.5, 0.04)
LOOKS = 4  # batches of the first look
LOOK_SECONDS = 0.1  # for loading, and the same for the steps
LEAST_STEPS = 3  # however long: the first is far slower than the others, since kernels are chosen and built
LONGEST_STEPS = 0.5  # seconds, however few
NEGLIGIBLE = 0.03  # of a step: loading that cannot matter; and a difference that is none
SHIPPING = 1.25  # times as long as alone loading may take beside the training
WORKER_START = 0.1  # seconds
LEAST_BATCHES, MOST_BATCHES = 3, 256  # in one turn
TURNS = 20  # of which the whole time is made, without their starts
LEFT_OVER = 0.9  # of the time, for turns; the rest is for what takes longer


class Alone(NamedTuple):
    """Seconds of one batch: to load it while nobody trains, and to train on it while nobody loads.

    load_busy, step_busy: seconds of all cores in them, which the cores can at best share.
    """

    load: float = 0.0
    step: float = 0.0
    load_busy: float = 0.0
    step_busy: float = 0.0

    def beside(self, number: int, cores: int) -> float:
        """What is expected where so many readers load beside the step (0: before it)."""
        if not number:
            return self.load + self.step
        return max(self.step, SHIPPING * self.load / number, (self.load_busy + self.step_busy) / cores)


def choose_engine(run: Components, clock: Clock = perf_counter) -> str:
    """Decide how `run.train` is read. Returns choice and reason in one line; "" if there is no choice.

    Every rank calls it, and decides the same.
    """
    stream = run.train
    if not isinstance(stream, AutoStream) or total_batches(run) < FEW_BATCHES:
        return ""
    all_names = run.parallel.gather([option.name for option in stream.options])
    options = [option for option in stream.options if all(option.name in names for names in all_names)]
    if len(options) < 2:
        return ""
    name, why = stream.default.name, ""
    try:
        with kept_random_state():
            name, why = _timed(run, stream, options, clock)
    finally:
        stream.decide(name)
    for other in run.splits().values():
        if isinstance(other, AutoStream) and other.default.engine == "workers":
            other.follow(name)
    return f"data: {name}, {why}"


def _timed(run: Components, stream: AutoStream, options: list[Option], clock: Clock) -> tuple[str, str]:
    """The choice, and its reason."""
    gather, began = run.parallel.gather, clock()
    wanted = gather(stream.default.name)[0]
    rule = next((option for option in options if option.name == wanted), options[0])
    problem = obstacle(run.config, run.model, stream, run.parallel)
    trial, alone = None, Alone()
    try:
        if not problem:
            trial = EngineTrial(run, stream, clock)
            alone = trial.alone(options[0])
    # A fault of the user's own, in any of their code: the run meets it again and reports it.
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    told = gather((problem, alone))
    problem = next((one for one, _ in told if one), "")
    if problem or trial is None:
        return rule.name, f"not measured: {problem}"
    alone = Alone(*map(max, zip(*(its for _, its in told), strict=True)))  # the slowest counts
    samples = samples_per_batch(run)
    if alone.load < NEGLIGIBLE * alone.step:
        reason = f"loading takes {100 * alone.load / alone.step:.2g} % of a step"
        return options[0].name, f"{quantity(samples / (alone.load + alone.step))} samples/s ({reason})"
    cores = max(1, min(gather(usable_cores())) // run.parallel.local_world_size)
    whole = expected_seconds(run, alone)
    limit = ENGINES.of(whole)
    left = LEFT_OVER * limit - max(gather(clock() - began))
    base, *others = at_most_three(options, rule, alone, cores)
    turns = {option.name: EngineTurn(trial, option, alone, cores, left) for option in others}
    first = EngineTurn(trial, base, alone, cores, left)
    usual: Turn = first
    if not base.number and first.cost + sum(turn.cost for turn in turns.values()) > left:
        usual = partial(alone.beside, 0, cores)  # as it was in the first look: there is no time for more
    cost = first.cost if usual is first else 0.0
    while turns and cost + sum(turn.cost for turn in turns.values()) > left:
        turns.pop(max(turns, key=lambda name: (name != rule.name, turns[name].cost)))
    if not turns:
        slow = f"a batch takes {duration(alone.load + alone.step)}, too long to compare engines in {duration(limit)}"
        short = f"a short run, about {duration(whole)}"
        return rule.name, f"not measured: {slow if limit == ENGINES.seconds else short}"
    from trainrun.timing.paired import Rules, compare

    rules = Rules(NEGLIGIBLE, left, first_rounds=2, least_pairs=4, most_pairs=8)
    found = compare(usual, turns, rules, clock_of_all(run, clock))
    if not any(found.pairs.values()) and not found.failed:
        return rule.name, f"not measured: {base.name} gave no batches"
    name = found.best(NEGLIGIBLE, SURE) or base.name
    if name != base.name and not all(gather(trial.reads_the_same(name))):
        return rule.name, f"not measured: {name} reads other samples: data.train gives another at each read"
    return name, described(name, base.name, found, samples, alone)


def at_most_three(options: Sequence[Option], default: Option, alone: Alone, cores: int) -> list[Option]:
    """The simplest; of threads and of workers the rule's choice, or the fewest that are expected to be the fastest."""
    found = [options[0]]
    for engine in ("threads", "workers"):
        some = [option for option in options if option.engine == engine and option.number]
        times = {option: alone.beside(option.number, cores) for option in some}
        if some and options[0] not in some:
            enough = (1 + NEGLIGIBLE) * min(times.values())
            found.append(default if default in some else next(one for one in some if times[one] <= enough))
    rest = sorted(options, key=lambda option: alone.beside(option.number, cores))
    return sorted(list(dict.fromkeys([*found, default, *rest]))[:3], key=simplicity)


def described(name: str, base: str, found: Comparison, samples: float, alone: Alone) -> str:
    """`5.9k samples/s (workers=2: 4.8k, threads=1: 5.1k)`, the fastest first."""
    measured = found.speeds(base) or {base: 1 / (alone.load + alone.step)}
    speeds = {key: samples * speed for key, speed in measured.items()}
    others = sorted((key for key in speeds if key != name), key=lambda key: -speeds[key])
    listed = [f"{key}: {quantity(speeds[key])}" for key in others] + [
        f"{key}: failed" for key in found.failed
    ]
    return f"{quantity(speeds[name])} samples/s ({', '.join(listed)})"


class EngineTrial:
    """Copies of model and task that train while an engine reads, and the place in the data."""

    def __init__(self, run: Components, stream: AutoStream, clock: Clock) -> None:
        from trainrun.training.without_trace import stand_ins

        self.run, self.stream = run, stream
        model, task = stand_ins(run.model, run.task)
        self.step = TimedStep(model, task, run.parallel, clock)
        self._first: Any = None
        self._place = [0, 0]  # epoch, batch

    def train(self, data: Any) -> None:
        self.step(data, self.run.precision.autocast)

    def batches(self, stream: Batches) -> Generator[MicroBatch, None, None]:
        """Batches without an end, from where the last measurement ended."""
        from trainrun.training.without_trace import endless

        return endless(stream, self._place)

    def alone(self, option: Option) -> Alone:
        """Load a few batches with nothing else to do, then train on them with nothing else to do."""
        stream, kept, loads, now = self.stream.stream(option.name), [], [], self.step.now
        with contextlib.closing(self.batches(stream)) as batches:
            began, busy = now(), process_time()
            kept.append(next(batches).data)
            loads, load_busy = [now() - began], process_time() - busy
            if loads[0] < LOOK_SECONDS:  # else the first must do, with all that comes only once
                loads.clear()
                for _ in range(option.number * self.stream.prefetch_factor):
                    next(batches)
                busy = process_time()
            while not loads or (len(loads) < LOOKS and sum(loads) < LOOK_SECONDS):
                began = now()
                kept.append(next(batches).data)
                loads.append(now() - began)
                load_busy = (process_time() - busy) / len(loads)
        stream.close()
        self._first = cloned(kept[0])
        steps: list[float] = []
        busies: list[float] = []
        while len(steps) < LEAST_STEPS or (len(steps) <= LOOKS and sum(steps) <= LOOK_SECONDS):
            began, busy = now(), process_time()
            self.train(kept[len(steps) % len(kept)])
            steps.append(now() - began)
            busies.append(process_time() - busy)
            if sum(steps) > LONGEST_STEPS:
                break
        return Alone(sum(loads) / len(loads), min(steps), load_busy, min(busies))

    def reads_the_same(self, name: str) -> bool:
        """Whether its first batch has the bits of the first that was read at all."""
        self._place = [0, 0]
        try:
            with contextlib.closing(self.batches(self.stream.stream(name))) as batches:
                pairs = zip(tensors_in(next(batches).data), tensors_in(self._first), strict=True)
                return all(torch.equal(own, its) for own, its in pairs)
        # It cannot read this data, or gives another number of tensors: no run depends on it.
        except Exception:
            return False


class EngineTurn:
    """Seconds of a batch with loading and training as in the run. cost: of one turn, as far as can be foreseen."""

    def __init__(self, trial: EngineTrial, option: Option, alone: Alone, cores: int, left: float) -> None:
        self._trial, self._option = trial, option
        several, seconds = max(1, option.number), alone.beside(option.number, cores)
        wanted = round(left / TURNS / seconds) if seconds else MOST_BATCHES
        # whole bursts, for the batches of several readers come in bursts
        self._number = several * -(-max(LEAST_BATCHES, min(MOST_BATCHES, wanted)) // several)
        prefetch = trial.stream.prefetch_factor
        self._ready = option.number * prefetch  # made while nobody trained
        self._lead = 1 + prefetch if option.number else 1  # until the readers are as far ahead as they get
        start = WORKER_START * option.number * (option.engine == "workers")
        ahead = prefetch * alone.load * bool(option.number)
        self.cost = start + ahead + (self._lead + self._number) * seconds

    def __call__(self) -> float:
        """The slowest rank's; infinite if the engine fails on one."""
        try:
            seconds = self._seconds()
        # An engine that cannot read this data, or not on this machine, loses: no run depends on it.
        except Exception:
            seconds = math.inf
        return float(max(self._trial.run.parallel.gather(seconds)))

    def _seconds(self) -> float:
        trial, stream = self._trial, self._trial.stream.stream(self._option.name)
        try:
            with contextlib.closing(trial.batches(stream)) as batches:
                for _ in range(self._ready):
                    next(batches)
                for _ in range(self._lead):
                    trial.train(next(batches).data)
                began = trial.step.now()
                for _ in range(self._number):
                    trial.train(next(batches).data)
                return (trial.step.now() - began) / self._number
        finally:
            if self._option.engine != "workers":  # those stay for the next turn: their start takes long
                stream.close()


def clock_of_all(run: Components, clock: Clock) -> Clock:
    """Seconds from here on, the same on every rank; endless once the run is to stop."""
    began = clock()

    def elapsed() -> float:
        stopped = run.triggers.stop_request() > 0
        return float(max(run.parallel.gather(math.inf if stopped else clock() - began)))

    return elapsed


def total_batches(run: Components) -> float:
    """Micro-batches of the whole run; infinite if nothing but time or a signal ends it."""
    total = run.triggers.rhythm.total_steps
    return math.inf if total is None else total * run.triggers.rhythm.accumulate


def expected_seconds(run: Components, alone: Alone) -> float:
    """How long the run may take, as far as loading and steps say."""
    return run_seconds(run.config, total_batches(run) * (alone.step + alone.load))


def samples_per_batch(run: Components) -> float:
    """Return the average number of samples in a batch of all ranks together."""
    train = run.train
    if train.num_batches and train.num_samples:
        return train.num_samples / train.num_batches
    return run.config.data.batch_size * run.parallel.world_size
