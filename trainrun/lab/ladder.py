"""The folklore, measured: every rung alone against the user's own words, and all that helped together.

Three passes: each rung alone, in interleaved turns; then one on top of the other, in the order of `rungs`; then the
whole against the user's words in fresh processes. A rung that is on already is measured by taking it away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from trainrun.errors import ConfigError
from trainrun.lab.choices import config_of, exchanged
from trainrun.lab.confirm import confirmed, inverse
from trainrun.lab.contender import Contender, Stand
from trainrun.lab.contest import Limits, between
from trainrun.lab.duel import Duel
from trainrun.lab.evidence import Trial, ratio_row
from trainrun.lab.facts import Facts
from trainrun.lab.gate import SHOWN
from trainrun.lab.look import look, measure_for, measured_twins
from trainrun.lab.rungs import CADENCE, FEWER, OTHER, STEPS, Step
from trainrun.lab.starter import Starter
from trainrun.lab.statistics import Ratio, paired_ratio

ALONE_SHARE, TOGETHER_SHARE = 0.55, 0.85  # of the budget, until when
AT_ONCE: Final = 4  # runs besides the base: as many share its turns, and lie in memory
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
TURNS: Final = 0.5  # as long as those of `tune`: there are more rungs than knobs
SMALLEST: Final = 0.02
NO_TIME: Final = "no time left for it"
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Height:
    """One rung. alone: over the user's words; on: it is in them already, and was taken away to be measured.
    together: over all before it that helped. held: whether it stays for those after it. reason: why there is none."""

    title: str
    words: tuple[str, ...]
    mathematics: str
    alone: Ratio | None = None
    together: Ratio | None = None
    on: bool = False
    held: bool = False
    reason: str = ""
    peak_bytes: int = 0
    loss: float | None = None

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"alone": ratio_row(self.alone), "together": ratio_row(self.together)}


@dataclass(frozen=True)
class Heights:
    """total: of all that was held, in fresh processes; None if nothing was, or no time was left."""

    rungs: tuple[Height, ...]
    noise: Ratio
    speed: float
    unit: str
    total: Ratio | None
    total_words: tuple[str, ...]
    total_reason: str
    seconds: float

    def row(self) -> dict[str, Any]:
        told = {"rungs": [rung.row() for rung in self.rungs], "noise": ratio_row(self.noise)}
        return asdict(self) | told | {"total": ratio_row(self.total)}


class Ladder:
    """words: of a run, by the names that the config has. cores: that it may use. budget: seconds."""

    def __init__(self, words: Sequence[str], stand: Stand, cores: int, budget: float, progress: Progress,
                 steps: Sequence[Step] = STEPS) -> None:  # fmt: skip
        self._words, self._stand, self._cores, self._budget = list(words), stand, cores, budget
        self._say, self._steps = progress, steps
        self._began = stand.clock()
        self._starter = Starter(stand, measure_for(TURNS * budget))
        self._facts: Facts
        self._base: Contender

    def run(self) -> Heights:
        self._progress("your own words")
        self._facts, pins = look(self._words, self._stand, self._starter.measure, self._cores, self._budget)
        self._words = exchanged(self._words, pins)
        self._facts = replace(self._facts, config=config_of(self._words))
        self._progress("noise: your own words against themselves")
        twins = measured_twins(
            self._words, self._stand, self._starter, self._budget, lambda: self._left(ALONE_SHARE)
        )
        self._base = twins.base
        heights = self._each_alone()
        heights, words = self._climbed(heights)
        total, reason = None, ""
        if words:
            self._progress("all that helped against your own words, in fresh processes")
            found = confirmed(self._starter, self._stand, self._words, words, SHOWN, self._left)
            total, reason = found.ratio, found.trial.reason
        seconds = self._stand.clock() - self._began
        return Heights(
            tuple(heights),
            twins.noise,
            twins.speed,
            self._facts.ready.unit,
            total,
            tuple(words),
            reason,
            seconds,
        )

    def _left(self, share: float = 1.0) -> float:
        return share * self._budget - (self._stand.clock() - self._began)

    def _progress(self, about: str) -> None:
        self._say(about, max(0.0, self._left()))

    def _ends(self, seconds: float) -> Limits:
        return Limits(self._stand.clock, self._stand.clock() + max(0.0, seconds), SMALLEST, 0.0)

    def _each_alone(self) -> list[Height]:
        heights = [self._planned(step) for step in self._steps]
        waiting = [height for height in heights if not height.reason]
        found = {height.title: height for height in heights}
        while waiting:
            group, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            share = self._left(ALONE_SHARE) * len(group) / (len(group) + len(waiting))
            found |= {height.title: height for height in self._group(group, self._ends(share))}
        return [self._rare(found[step.title], step) for step in self._steps]

    def _planned(self, step: Step) -> Height:
        """What is to be run for a rung, or why nothing is."""
        reason = step.applies(self._facts)
        if reason or step.mathematics == CADENCE:
            return Height(step.title, (), step.mathematics, reason=reason or CADENCE)
        on, off = step.on(self._facts), step.off(self._facts)
        height = Height(step.title, on, step.mathematics)
        try:
            if not on or config_of(exchanged(self._words, on)) == self._facts.config:
                if not off:
                    return replace(height, on=True, reason="on already")
                return replace(height, words=off, on=True)
        except ConfigError as error:
            return replace(height, reason=error.faults[0])
        return height

    def _group(self, group: list[Height], ends: Limits) -> list[Height]:
        running: dict[str, Contender] = {}
        told: dict[str, Height] = {}
        for height in group:
            self._progress(height.title)
            gate = None if height.mathematics == OTHER else SHOWN
            left = ends.deadline - self._stand.clock()
            height, contender = self._started(height, self._words, left, gate)
            told[height.title] = height
            if contender is not None:
                running[height.title] = contender
        duels = {title: Duel() for title in running}
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and ends.over:
                break
            between(
                self._base.turn, {title: one.turn for title, one in running.items()}, duels, self._unhurried()
            )
            if self._left(TOGETHER_SHARE) < 0:
                break
        for title, contender in running.items():
            contender.close()
            told[title] = _weighed(told[title], duels[title])
        return list(told.values())

    def _unhurried(self) -> Limits:
        """A round that was begun is ended, as long as there is any time at all."""
        return self._ends(self._left(TOGETHER_SHARE))

    def _started(self, height: Height, words: Sequence[str], left: float,
                 gate: str | None) -> tuple[Height, Contender | None]:  # fmt: skip
        if left < self._starter.measure.seconds:
            return replace(height, reason=NO_TIME), None
        trial = Trial(height.title, height.words, height.mathematics)
        patient = any("compile" in word for word in height.words)
        one = self._starter.candidate(exchanged(words, height.words), trial, left, patient, gate)
        reason = one.trial.reason
        return replace(height, reason=reason, loss=one.trial.loss), one.contender

    def _climbed(self, heights: list[Height]) -> tuple[list[Height], list[str]]:
        """Each rung on top of those that helped; of rungs that say the same word the last that helps stays."""
        words: list[str] = []
        champion = self._base
        found = []
        for height in heights:
            same = not height.on and height.mathematics not in (OTHER, CADENCE)
            may_help = (
                height.alone is not None and height.alone.value > 1 + SMALLEST and height.alone.high > 1
            )
            if not (same and may_help) or self._left(TOGETHER_SHARE) < 0:
                found.append(height)
                continue
            self._progress(f"together with {height.title}")
            left = self._left(TOGETHER_SHARE)
            taken, one = self._started(height, exchanged(self._words, words), left, SHOWN)
            if one is None:
                found.append(height if taken.reason == NO_TIME else taken)
                continue
            duels = {height.title: Duel()}
            for _ in range(2 * LEAST_ROUNDS):
                between(champion.turn, {height.title: one.turn}, duels, self._unhurried())
            height = _climb(height, duels[height.title])
            found.append(height)
            loser = champion if height.held else one
            champion = one if height.held else champion
            words = exchanged(words, height.words) if height.held else words
            if loser is not self._base:
                loser.close()
        return found, words

    def _rare(self, height: Height, step: Step) -> Height:
        """Validations that come less often, by what one takes: a whole run is too long to be timed."""
        if step.mathematics != CADENCE or height.reason != CADENCE:
            return height
        steps = self._facts.ready.val_every or 1.0
        pairs = []
        for _ in range(2 * LEAST_ROUNDS):
            turn, check = self._base.turn(), self._base.validate()
            trained = steps * turn.seconds / turn.steps
            pairs.append((1 / (trained + check.seconds), 1 / (trained + check.seconds / FEWER)))
            if self._left(TOGETHER_SHARE) < check.seconds:
                break  # one that takes minutes is timed once
        return replace(height, alone=paired_ratio(pairs), reason="")


def _weighed(height: Height, duel: Duel) -> Height:
    if duel.fault or not duel.pairs:
        return replace(height, reason=duel.fault or NO_TIME)
    ratio = duel.ratio()
    alone = inverse(ratio) if height.on else ratio
    return replace(height, alone=alone, peak_bytes=duel.peak_bytes)


def _climb(height: Height, duel: Duel) -> Height:
    if duel.fault or not duel.pairs:
        return replace(height, reason=duel.fault)
    ratio = duel.ratio()
    return replace(height, together=ratio, held=ratio.low > 1 and ratio.value > 1 + SMALLEST)
