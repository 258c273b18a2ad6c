"""Find the bottleneck of a training: the run takes turns with variants of itself in which one cost is removed.

What: the real loop with the real components. The gain of an ablation is an upper bound of what a remedy can give. No
    result comes from a profile. When: before anything is tuned. Cost: 20 to 60 seconds. Source: the phases of
    DS-Analyzer (Mohan and others, 2021, arXiv:2007.06775), applied to every part and not only to the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from trainrun.benchmark.budget import TURN_SECONDS, Budget, TimedTurns, find_steps_per_turn, warm_up_steps
from trainrun.benchmark.diagnose.ablations import (
    BUCKET,
    CACHED,
    CAUSES_OF,
    LARGER,
    NO_LOGGING,
    OTHER_READING,
    OTHER_RUNS,
    THREADS,
    ablation_title,
    useful_ablations,
)
from trainrun.benchmark.diagnose.rounds import Rounds, Side, compute_total_gain
from trainrun.benchmark.measured_run import CHECKPOINT, measure_rare_work, rare_work_intervals
from trainrun.benchmark.run_overrides import compose_config, replace_overrides, start_choice_overrides
from trainrun.benchmark.worker_messages import (
    KEEPING,
    SAVING,
    Load,
    Profile,
    ProfileResult,
    RunInfo,
    Turn,
)
from trainrun.benchmark.worker_process import WorkerPool, WorkerProcess
from trainrun.comparison.paired import PROCESS_SPREAD, Ratio
from trainrun.errors import TrainrunError
from trainrun.timing.phases import COMPILE, DATA, LOGGING

CLEAR: Final = 1.10  # a gain below it is not worth a word
END_SECONDS, TRACE_SECONDS = 2.0, 2.0  # for what comes after the rounds
LEAST_TURN: Final = 0.1
LONG_STEP: Final = 0.5  # seconds; what the first steps of a turn take longer is nothing compared with it
MOST_SIDES: Final = 10
FEWEST_ROUNDS, MOST_ROUNDS = 3, 12
SLOWER: Final = 0.9  # an ablation below it is not worth more turns
MOST_PACING, MOST_STARTING = 0.6, 0.5  # of the time: to find the pace, and to start another run
QUICK_START: Final = 1.0  # second; what the base chose by trials at its start is given to the others
PADDED: Final = 1.05  # positions, for each that is not padding
TINY_BATCH: Final = 8
MOST_OF_LARGER: Final = 1 / 3  # of the time that is left: turns of a tiny batch made larger
LOG_SECONDS: Final = 1.0  # from one log point to the next, at most


@dataclass(frozen=True)
class WhatIf:
    """How much faster the whole run would be without one cost.

    name: one of `verdict.CAUSES`. setting: the override that was measured, if the ablation is an override.
    """

    name: str
    gain: Ratio
    about: str
    setting: str = ""

    @property
    def is_computed(self) -> bool:
        """Return whether the gain was computed from measured seconds, instead of being measured in turns."""
        return self.gain.low == self.gain.high

    @property
    def is_reliable(self) -> bool:
        """Return whether the gain is computed, or measured in enough turns for an interval."""
        return self.is_computed or self.gain.has_interval

    @property
    def is_between_processes(self) -> bool:
        """Return whether two processes were compared. Their speeds may differ for all of their lives."""
        return self.name in (CAUSES_OF[BUCKET][0], "dispatch")

    def is_faster(self) -> bool:
        """Return whether the run is certainly faster without this cost: by more than turns and processes differ."""
        return self.gain.low > 1.0 + PROCESS_SPREAD * self.is_between_processes


@dataclass(frozen=True)
class Diagnosis:
    """All results of a diagnosis.

    speed: items per second of the loop. step_seconds: of a step, with its share of validation and checkpoints.
    load_speed: items per second of loading without training. load_cores: the number of cores that loading would keep
        busy on an idle machine.
    overrides: of the run. untried: the ablations for which there was no time.
    """

    info: RunInfo
    speed: float
    step_seconds: float
    what_ifs: list[WhatIf]
    load_speed: float
    load_cores: float
    overrides: tuple[str, ...] = ()
    profiled: ProfileResult | None = None
    untried: tuple[str, ...] = ()


def diagnose(
    overrides: Sequence[str], budget: Budget, progress: Callable[[str, float], None], trace: bool = False
) -> Diagnosis:
    """Measure a run with these overrides, and how much faster it would be without each cost.

    Raise the errors that the run would raise before its first step. trace: also profile a few steps.
    """
    with WorkerPool() as pool:
        progress("starting the run", budget.remaining_seconds())
        base = pool.start(compose_config(overrides))
        reserved = END_SECONDS + TRACE_SECONDS * trace
        diagnosis = Examination(pool, base, overrides, budget, reserved, progress).diagnosis()
        if trace:
            progress("a few steps under torch's profiler", budget.remaining_seconds())
            diagnosis = replace(diagnosis, profiled=base.request(Profile()))
        return diagnosis


class Examination:
    """One base run, and all variants that are compared with it. reserved: seconds that are kept free at the end of
    the budget.
    """

    def __init__(self, pool: WorkerPool, base: WorkerProcess, overrides: Sequence[str], budget: Budget,
                 reserved: float, progress: Callable[[str, float], None]) -> None:  # fmt: skip
        self._pool, self._base, self._overrides = pool, base, list(overrides)
        self._config, self._budget, self._reserved = compose_config(overrides), budget, reserved
        self._say, self._untried, self._compiling = progress, list[str](), 0.0
        # On a CPU the account of time says it exactly: all the work is the loop's.
        self._known = {NO_LOGGING: LOGGING, CACHED: DATA} if base.info.device == "cpu" else {}
        if base.info.reads_ahead:
            self._known.pop(CACHED, None)
        self._own = "" if CACHED in self._known else KEEPING
        self._others: list[WorkerProcess] = []
        self._settings = {BUCKET: "data.padding=bucket"}  # of the ablations that are runs of their own

    def _seconds_left(self) -> float:
        return self._budget.remaining_seconds() - self._reserved

    def _is_over(self, grace: float = 0.0) -> bool:
        """Return whether less time is left than the longest compilation takes, which cannot be interrupted."""
        return self._seconds_left() + grace <= self._compiling

    def diagnosis(self) -> Diagnosis:
        pace = self._find_pace()
        load: Turn = self._base.request(Load(max(2, min(self._steps, 50)) if self._warm else 1, self._warm))
        names = self._choose_ablations()
        sides = {name: self._build_side(self._base, name) for name in names if name not in OTHER_RUNS}
        for (
            name,
            side,
        ) in sides.items():  # their first steps are the slowest, and those without loading far shorter
            if (self._steps > 1 or name == CACHED) and not self._is_over(1.0):
                side()
        sides |= dict(self._start_other_runs([name for name in names if name in OTHER_RUNS], pace))
        rounds = Rounds(
            self._take_base_turn, sides, self._budget.deadline() - self._reserved, self._budget.clock
        )
        self._measure(rounds, list(sides), pace)
        for run in self._others:
            run.close()
        return self._build_diagnosis(rounds, load)

    def _find_pace(self) -> Turn:
        self._say("finding its pace", self._seconds_left())
        self._seconds = min(TURN_SECONDS, max(LEAST_TURN, self._seconds_left() / (8 * MOST_SIDES)))
        turns: list[Turn] = []

        def take(steps: int) -> Turn:
            turns.append(self._train(self._base, steps, warm_up_steps(steps), self._own, MOST_PACING))
            return turns[-1]

        steps = find_steps_per_turn(take, self._seconds)
        self._steps = max(1, steps - warm_up_steps(steps))
        self._step_seconds = turns[-1].running_seconds / turns[-1].steps
        positions, real_positions = (
            sum(getattr(turn, unit) for turn in turns) for unit in ("positions", "real_positions")
        )
        self._has_padding = positions > PADDED * real_positions
        self._warm = warm_up_steps(self._steps) if self._step_seconds < LONG_STEP else 0
        self._reserved += (3 if self._warm else 1) * self._step_seconds  # a save needs a step to be saved
        return turns[-1]

    def _train(self, run: WorkerProcess, steps: int, warm: int, variant: str, part: float = 1.0) -> Turn:
        turn = run.train(steps, warm, variant, max(part * self._seconds_left(), LEAST_TURN))
        self._compiling = max(self._compiling, turn.phase(COMPILE))
        return turn

    def _take_base_turn(self) -> Turn:
        return self._train(self._base, self._steps, self._warm, self._own)

    def _build_side(self, run: WorkerProcess, variant: str) -> Side:
        if variant == SAVING:  # a turn that is cut may save nothing
            every = self._config.checkpoint.every_n_train_steps or 1
            return TimedTurns(
                lambda steps: run.train(steps, self._warm, SAVING), self._steps, self._seconds, every
            )

        def take(steps: int) -> Turn:
            return self._train(run, steps, min(self._warm, warm_up_steps(steps)), variant)

        return TimedTurns(take, self._steps, self._seconds)

    def _choose_ablations(self) -> list[str]:
        """Choose the most important ablations that fit into the time, at least one. Record the others as untried."""
        info, config = self._base.info, self._config
        names = [name for name in useful_ablations(config, info, self._steps) if name not in self._known]
        if self._has_padding and config.data.padding in ("longest", "max"):
            names.insert(0, BUCKET)
        names.append(LARGER)
        turn = (self._warm + self._steps) * self._step_seconds
        most = max(1, int(self._seconds_left() / (FEWEST_ROUNDS * turn * 1.5)) - 1)
        self._untried += [ablation_title(name) for name in names[most:]]
        return names[:most]

    def _start_other_runs(self, names: Sequence[str], pace: Turn) -> Iterator[tuple[str, Side]]:
        """Start the same run with batches of similar lengths, and with a larger batch.

        The first turn of each may take half of the time that is left.
        """
        batch, self._times = self._config.data.batch_size, 2
        # Twice a tiny batch says little: products of a few rows take other kernels than those of some more.
        if batch <= TINY_BATCH and self._has_room_for_tiny(pace):
            self._times = TINY_BATCH
        self._settings[LARGER] = f"data.batch_size={self._times * batch}"
        for name in names:
            override, batches = self._settings[name], self._times if name == LARGER else 1
            turns = 2 * (self._warm + 1) * self._step_seconds * batches
            limit = MOST_STARTING * self._seconds_left() - self._compiling - turns
            if limit < QUICK_START:
                self._untried.append(override)
                continue
            self._say(f"starting it with {override}", self._seconds_left())
            choices, until = (
                start_choice_overrides(self._config, self._base.info),
                self._seconds_left() - limit,
            )
            try:
                run = self._pool.start(
                    compose_config(
                        replace_overrides(replace_overrides(self._overrides, choices), [override])
                    ),
                    limit,
                )
                self._others.append(run)
                side = self._build_side(run, NO_LOGGING if name == LARGER else "")
                side()
                yield name, side
            except TrainrunError:  # too few samples, or no memory: then it tells nothing
                self._untried += [override] * (self._seconds_left() <= until)

    def _has_room_for_tiny(self, pace: Turn) -> bool:
        """Return whether turns with a batch `TINY_BATCH` times as large fit into the time and the memory.

        The estimate assumes that a step with this batch takes `TINY_BATCH` times as long.
        """
        seconds = FEWEST_ROUNDS * (self._warm + 1) * TINY_BATCH * self._step_seconds
        fits_memory = 2 * TINY_BATCH * pace.peak_bytes < self._base.info.memory_bytes
        return seconds <= MOST_OF_LARGER * self._seconds_left() and fits_memory

    def _measure(self, rounds: Rounds, names: list[str], pace: Turn) -> None:
        """Take rounds until the cause is clear or the time is over. The last rounds measure the ablations with the
        largest gain.

        If finding the number of steps per turn took all the time, there are no rounds.
        """
        if CACHED in names:  # which trains on the batches of such a turn
            rounds.take([], in_any_case=True)
        for number in count():
            if number >= MOST_ROUNDS and not self._is_unclear(rounds):
                break
            was_taken, order = False, names if number % 2 == 0 else names[::-1]
            if number >= FEWEST_ROUNDS:  # there may not be time for all of them
                worth = [name for name in names if rounds.ratio(name).value > SLOWER]
                order = sorted(worth, key=lambda name: -rounds.ratio(name).value)
            self._say(f"round {number + 1}", self._seconds_left())
            for first in range(0, len(order) or 1, 2):  # the account of time needs turns of the base too
                if self._is_over(1.0) or not rounds.take(order[first : first + 2], in_any_case=number == 0):
                    break
                was_taken = True
            if not was_taken:
                break
            names = [name for name in names if rounds.pairs[name]]
        if not rounds.own:
            rounds.own.append(pace)
        self._untried += [ablation_title(name) for name, pairs in rounds.pairs.items() if not pairs]

    def _is_unclear(self, rounds: Rounds) -> bool:
        """Return whether no cause is certain yet, while some cause is still possible."""
        ratios = self._estimate_gains(rounds).values()
        certain = any(ratio.value >= CLEAR and ratio.low > 1.0 for ratio in ratios)
        return not certain and any(ratio.high > CLEAR for ratio in ratios)

    def _build_diagnosis(self, rounds: Rounds, load: Turn) -> Diagnosis:
        info, num_steps = self._base.info, sum(turn.steps for turn in rounds.own)
        loop_seconds = rounds.base.seconds / num_steps
        items_per_step = rounds.base.items / num_steps
        load_seconds, busy_seconds = load.seconds / load.steps, load.busy_seconds / load.steps
        if CACHED in self._known:  # the loop has read more, so it has its share of rare stalls
            load_seconds = max(rounds.read_phase_seconds([DATA]) * items_per_step, 1e-9)
        ratios = self._estimate_gains(rounds)
        late = self._budget.remaining_seconds() <= self._compiling
        self._untried += ["validation and checkpoints"] * late
        costs = {} if late else self._measure_rare_costs(loop_seconds, ratios.get(SAVING))
        costs["compile"] = rounds.compile_seconds(info.total_steps)
        step_seconds = loop_seconds + sum(costs.values())
        if not late:
            costs |= self._logging_cost(loop_seconds)
        what_ifs = [
            WhatIf(name, compute_total_gain(ratios[ablation], step_seconds, loop_seconds), about, setting)
            for name, ablation, about, setting in self._iterate_causes(ratios)
            if name not in costs
        ]
        for name, seconds in costs.items():
            if seconds > 0:
                value = step_seconds / max(step_seconds - seconds, 1e-9)
                so_far = ", so far" if name == "compile" and rounds.own[-1].phase(COMPILE) else ""
                about = f"{1e3 * seconds:.3g} ms a step{so_far}"
                what_ifs.append(WhatIf(name, Ratio(value, value, value, 1), about))
        return Diagnosis(
            info, 1 / rounds.base.seconds_per_item, step_seconds, what_ifs, items_per_step / load_seconds,
            busy_seconds / load_seconds, tuple(self._overrides), untried=tuple(dict.fromkeys(self._untried)),
        )  # fmt: skip

    def _estimate_gains(self, rounds: Rounds) -> dict[str, Ratio]:
        """Return the gain of each ablation. The reading time of both sides is left out, so that a slow read is not a
        gain.
        """
        read = [DATA] if CACHED in self._known else []
        ratios = {name: rounds.compute_phase_ratio(phase) for name, phase in self._known.items()}
        for name, pairs in rounds.pairs.items():
            if pairs:
                same = [LOGGING] if name == LARGER else [] if name in OTHER_READING else read
                # Batches of the same run have the same share of padding.
                unit = "real_positions" if name in OTHER_RUNS else "positions"
                ratios[name] = rounds.ratio(name, same, unit)
        return ratios

    def _measure_rare_costs(self, loop_seconds: float, saving: Ratio | None) -> dict[str, float]:
        """Return the seconds per step of validation and of checkpoints, each timed separately.

        saving: the gain without frequent checkpoints, whose writing also slows the steps after them.
        """
        intervals = rare_work_intervals(self._config, self._base.info, loop_seconds)
        if saving is not None:
            intervals.pop(CHECKPOINT, None)
        costs = dict(measure_rare_work(self._base, intervals, 3 if self._warm else 1))
        if saving is not None:
            costs[CHECKPOINT] = max(loop_seconds / saving.value - loop_seconds, 0.0)
        return costs

    def _logging_cost(self, loop_seconds: float) -> dict[str, float]:
        """Return the seconds per step of logging, measured over a whole log interval; {} if the turns contain log
        points.
        """
        every = self._config.monitor.log_every_n_steps
        if not isinstance(every, int) or not self._steps < every <= LOG_SECONDS / loop_seconds:
            return {}
        turns = [self._base.train(every, 0, most_seconds=END_SECONDS) for _ in range(2)]
        if min(turn.steps for turn in turns) < every:  # shapes that were compiled meanwhile
            return {}
        return {"logging": min(turn.phase(LOGGING) / turn.seconds for turn in turns) * loop_seconds}

    def _iterate_causes(self, ratios: dict[str, Ratio]) -> Iterator[tuple[str, str, str, str]]:
        """Yield for each measured ablation: its cause, its name, how it was measured, and the override that was
        measured.
        """
        for ablation, (name, about) in CAUSES_OF.items():
            if ablation in ratios:
                about = "its time in the unchanged loop" if ablation in self._known else about
                yield name, ablation, about, self._settings.get(ablation, "")
        if counts := [name for name in ratios if name.startswith(THREADS)]:
            best = max(counts, key=lambda name: ratios[name].value)
            yield "threads", best, f"trainer.num_{best}", f"trainer.num_{best}"
        if LARGER in ratios:
            yield "dispatch", LARGER, f"a batch {self._times} times as large", self._settings[LARGER]
