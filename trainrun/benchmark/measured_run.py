"""A run in a separate process that takes turns with others. Its result is seconds per item with all costs.

What: turns of steps, with the validations and checkpoints that fall into a turn. The cost of rarer ones, of
    compilation and of a slow start is spread over all steps of the run. When: whenever two settings are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

from trainrun.benchmark.budget import TURN_SECONDS, find_steps_per_turn, warm_up_steps
from trainrun.benchmark.worker_messages import SAVING, VALIDATING, RunInfo, Save, Turn, Validate
from trainrun.benchmark.worker_process import WorkerFailed
from trainrun.config.schema import RunConfig
from trainrun.limits import parse_seconds

LONGEST_TURN: Final = 3.0  # times the usual turn, to hold a validation, a checkpoint, or several slow steps
STEADY: Final = 0.1  # the relative deviation of a turn that steps of different length may cause
LEAST_AHEAD: Final = 3  # steps of a turn at least: not all of its batches may have been read ahead
VALIDATION, CHECKPOINT = "validation", "checkpoint"


def rare_work_intervals(config: RunConfig, info: RunInfo, step_seconds: float) -> dict[str, float]:
    """Return the number of steps between two validations and between two checkpoints, without those that the run
    does not have.
    """
    intervals = {VALIDATION: info.val_every} if info.val_every else {}
    keep, saves_a_step = config.checkpoint, 0.0
    if isinstance(keep.every_n_train_steps, int):
        saves_a_step += 1 / keep.every_n_train_steps
    seconds = parse_seconds(keep.train_time_interval)
    if keep.save_last and seconds:
        saves_a_step += step_seconds / seconds
    if keep.enabled and saves_a_step:
        intervals[CHECKPOINT] = 1 / saves_a_step
    return intervals


def measure_rare_work(
    worker: Any, intervals: dict[str, float], repeats: int = 3
) -> Iterator[tuple[str, float]]:
    """Yield the seconds per step of validation and of checkpoints, each timed separately."""
    if VALIDATION in intervals:
        turns = [worker.request(Validate()) for _ in range(min(repeats, 2))]
        fastest = min(turn.seconds for turn in turns)  # the first is the slowest
        yield VALIDATION, fastest / intervals[VALIDATION]
    if CHECKPOINT in intervals:
        turns = [worker.request(Save()) for _ in range(repeats)]
        yield CHECKPOINT, median(turn.seconds for turn in turns) / intervals[CHECKPOINT]


class MeasuredRun:
    """A run that is measured in turns with others. Every turn starts with the same weights and averages.

    Otherwise a run that was trained longer could be up to twice as slow, because of denormal numbers.

    usual_start: a start that takes more seconds counts as slow. items_per_second: of the last turn. error: why the last
        turn failed.
    """

    def __init__(
        self,
        worker: Any,
        config: RunConfig,
        turn_seconds: float = TURN_SECONDS,
        usual_start: float = math.inf,
    ) -> None:
        self.worker, self.config = worker, config
        self.info: RunInfo = worker.info
        self.error, self.peak_bytes, self.items_per_second = "", 0, 0.0
        self._work, self._work_steps = 0.0, 0
        self._turn_seconds = turn_seconds
        self._slow_start = max(0.0, worker.start_seconds - usual_start)
        self._steps, self._most_steps, self._multiple = 1, 1.0, 1
        self._variant, self._rare = "", 0.0

    def find_pace(self) -> None:
        """Choose the number of steps per turn, and time the work that is too rare for a turn. Raises WorkerFailed."""
        least = LEAST_AHEAD if self.info.reads_ahead else 1
        self.worker.train(1, 1)  # compiles, if the run does
        steps = max(least, find_steps_per_turn(self.worker.train, self._turn_seconds))
        turn = self.worker.train(steps, warm_up_steps(steps))
        step_seconds = turn.running_seconds / turn.steps
        intervals = rare_work_intervals(self.config, self.info, step_seconds)
        most_steps = LONGEST_TURN * self._turn_seconds / step_seconds
        inside = {name: every for name, every in intervals.items() if every <= most_steps}
        variants = {VALIDATION: VALIDATING, CHECKPOINT: SAVING}
        self._variant = "+".join(variants[name] for name in inside)
        self._multiple = math.ceil(max(inside.values(), default=1))  # a turn holds the rarer of the two
        self._steps, self._most_steps = steps, most_steps
        self._lengthen_turns(turn)
        outside = {name: every for name, every in intervals.items() if name not in inside}
        self._rare = sum(seconds for _, seconds in measure_rare_work(self.worker, outside))

    def _lengthen_turns(self, turn: Turn) -> None:
        """Choose more steps per turn if the steps of this turn differ much. So each turn has its share of slow ones."""
        steady_steps = (turn.step_deviation / STEADY) ** 2
        steps = max(self._steps, min(steady_steps, self._most_steps))
        self._steps = self._multiple * max(1, round(steps / self._multiple))

    def measure_item_seconds(self) -> float:
        """Take a turn and return its seconds per item. Return infinity and set `error` if the run failed."""
        try:
            turn: Turn = self.worker.train(self._steps, warm_up_steps(self._steps), self._variant)
        except WorkerFailed as error:
            self.error = str(error).strip().splitlines()[-1]
            return math.inf
        self._lengthen_turns(turn)
        self.peak_bytes = max(self.peak_bytes, turn.peak_bytes)
        seconds = turn.running_seconds + turn.steps * self._rare_seconds_per_step(turn)
        self.items_per_second = turn.items / seconds
        work = turn.real_positions or turn.items  # a few batches may be long or short
        self._work, self._work_steps = self._work + work, self._work_steps + turn.steps
        return seconds / work

    @property
    def work_per_step(self) -> float:
        """Return the mean number of positions without padding in a step, or of items if positions are unknown."""
        return self._work / max(self._work_steps, 1)

    def _rare_seconds_per_step(self, turn: Turn) -> float:
        """Return the seconds per step of the work that is in no turn."""
        total_steps = self.info.total_steps
        once = (turn.compile_seconds + self._slow_start) / total_steps if total_steps else 0.0
        return self._rare + once

    def close(self) -> None:
        self.worker.close()
