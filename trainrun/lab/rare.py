"""What a run does now and then: validation, checkpoints, log points that most turns do not hold.

Each is timed by itself, and told as seconds a step at the pace of the config.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final

from trainrun.config import RunConfig
from trainrun.lab.bench import Subject
from trainrun.lab.statistics import Ratio
from trainrun.lab.time_left import TimeLeft
from trainrun.ledger import ACCOUNTS, LOGGING
from trainrun.words.checks import parse_seconds

RARE_SECONDS: Final = 1.0  # from one log point to the next
LAST_SECONDS: Final = 2.0  # for validation, checkpoints and loading, which come last


class Rare:
    """few: each as seldom as can be; compared with a long step a slow one of them is nothing. time: until when the
    rest of the diagnosis is over; none of them is asked LAST_SECONDS later."""

    def __init__(self, base: Subject, config: RunConfig, few: bool, time: TimeLeft) -> None:
        self._base, self._config, self._time = base, config, time
        self.num_saves, self._num_validations = (1, 1) if few else (3, 2)

    def is_too_late(self) -> bool:
        return self._time.is_over(LAST_SECONDS)

    def fixed_costs(self, loop_seconds: float, saving: Ratio | None) -> Iterator[tuple[str, float]]:
        """Yield the seconds a step that validation and checkpoints cost.

        loop_seconds: of a step without them. saving: the speed with frequent checkpoints, whose writing also slows
        the steps after them.
        """
        every = self._base.facts.val_every
        if every:
            turns = [self._base.validate() for _ in range(self._num_validations)]
            yield "validation", min(turn.seconds for turn in turns) / every  # the first is the slowest
        if saving is not None:
            yield "checkpoint", max(loop_seconds / saving.value - loop_seconds, 0.0)
        keep = self._config.checkpoint
        if not keep.enabled or saving is not None:
            return
        rate = 1 / keep.every_n_train_steps if keep.every_n_train_steps else 0.0
        interval = parse_seconds(keep.train_time_interval)
        if keep.save_last and interval:
            rate += loop_seconds / interval
        if rate:
            yield "checkpoint", median(self._base.save().seconds for _ in range(self.num_saves)) * rate

    def logging(self, turn_steps: int, loop_seconds: float) -> Iterator[tuple[str, float]]:
        """From as many steps as hold a log point, where turns of so many steps need not."""
        every = self._config.monitor.log_every_n_steps
        if turn_steps < every <= RARE_SECONDS / loop_seconds:
            turns = [self._base.train(every, 0, most_seconds=LAST_SECONDS) for _ in range(2)]
            if min(turn.steps for turn in turns) < every:  # shapes that were compiled meanwhile
                return
            shares = [turn.accounts.get(ACCOUNTS[LOGGING], 0.0) / turn.seconds for turn in turns]
            yield "logging", min(shares) * loop_seconds
