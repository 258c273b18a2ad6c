"""Which candidate is fastest, found with few measurements: an open contest in rounds.

What: every round measures what is left, in alternating order, and drops clear losers. The most promising
are measured first, and only as many as leave time for a second look at the best of them and the simplest; one that
could not win even if it divided the loading perfectly, or hid it wholly behind the step, is not measured at all.
Two candidates are compared by the measurements of the same rounds, and nothing displaces the simplest on one look,
unless it is faster by far. Of what is not notably slower than the fastest, the simplest wins.
Source: successive halving, Jamieson and Talwalkar 2016, arXiv:1502.07943.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from trainrun.data.undecided import Candidate

NOTABLE = 0.03  # a difference below this share is none
MOST_NOISE = 0.05  # a difference above this share is one, however the measurements scatter
ONE_LOOK = 0.05  # the same as NOTABLE, where both were measured once
ONE_LOOK_AT_FIRST = 0.12  # the same, where the slower one is the simplest of all
WORTH_A_LOOK = 0.02  # who cannot be faster by this share is not measured
GUESSED = 0.85  # times the loading that the first look saw: it may have met a bad moment
CLEAR_LOSS = 1.25  # times the fastest
ROUNDS_OF_FIRST = 2  # that the simplest is in, however slow it is
MAX_ROUNDS = 7
LEAST_BATCHES, MOST_BATCHES = 3, 256  # in one measurement
PARTS = 20  # of the whole time, of which one is a measurement without its start
FIRST_START = {"workers": 0.1, "threads": 0.005}  # seconds for each, until one was measured


class Alone(NamedTuple):
    """Seconds of one batch: to load it while nobody trains, and to train on it while nobody loads.

    load_busy, step_busy: seconds of all cores in them, which the cores can at best share.
    """

    load: float
    step: float
    load_busy: float = 0.0
    step_busy: float = 0.0

    @property
    def both(self) -> float:
        """Seconds of a batch that is loaded first and then trained on."""
        return self.load + self.step


class Reading(NamedTuple):
    """seconds: per batch, None if the candidate failed or time ran out; left: seconds to go in all."""

    seconds: float | None
    left: float


class Outcome(NamedTuple):
    """scores: seconds per batch, one for each round a candidate was in.

    unheard: those that no time was left for. failed: engines that gave no batches.
    """

    scores: Scores
    unheard: list[str]
    failed: list[str]


Measure = Callable[[Candidate, int], Reading]
Scores = dict[str, list[float]]


def contest(candidates: Sequence[Candidate], alone: Alone, left: float, measure: Measure,
            prefetch_factor: int = 2, cores: int = 1) -> Outcome:  # fmt: skip
    """Measure those that could win, until one is left, nothing changes, or time is up.

    candidates: the simplest first; `alone` was measured with the first of them. left: seconds that all
    of it may take. measure: times a candidate over a number of batches, with the step. cores: that this
    rank may use.
    """
    budget = _Budget(alone, left, measure, prefetch_factor)
    bounds = _Bounds(candidates, alone, cores)
    scores: Scores = {}
    unheard = []
    first, waiting = candidates[0], list(candidates)
    by_name = {candidate.name: candidate for candidate in candidates}
    if first.number == 0 and sum(map(budget.cost, candidates)) > left:  # no time for all
        scores[first.name] = [alone.both]  # it loads and trains in turn: nothing new to measure
        waiting.remove(first)
    while waiting:
        candidate = first if first in waiting else min(waiting, key=lambda each: bounds.hope(each, scores))
        waiting.remove(candidate)
        if candidate.engine in budget.failed or bounds.is_hopeless(candidate, scores):
            continue
        if not budget.add(scores, candidate, budget.cost_of_duel(scores, by_name, first.name)):
            unheard.append(candidate.name)
    for turn in range(1, MAX_ROUNDS):
        names = survivors(scores, first.name)
        if len(names) < 2:
            break
        duel = {names[0], first.name}
        names = sorted(names, key=lambda name: name not in duel)  # time may not be enough for all
        names[:2] = names[:2][:: 1 if turn % 2 else -1]
        done = [budget.add(scores, by_name[name]) for name in names]
        if not any(done):
            break
    return Outcome(scores, unheard, sorted(budget.failed))


def survivors(scores: Scores, first: str) -> list[str]:
    """The faster half, and all that the fastest does not beat; no clear loser, but at first the simplest."""
    ranked = sorted(scores, key=lambda name: median(scores[name]))
    if not ranked:
        return []
    best = median(scores[ranked[0]])
    half = (len(ranked) + 1) // 2
    close = 1 + 2 * noise_of(scores)
    kept = {
        name
        for i, name in enumerate(ranked)
        if min(scores[name]) <= best * (CLEAR_LOSS if i < half or name == first else close)
    }
    if first in scores and len(kept) + (first not in kept) > 1 and len(scores[first]) < ROUNDS_OF_FIRST:
        kept.add(first)
    return [name for name in ranked if name in kept]


def winner(candidates: Sequence[Candidate], scores: Scores) -> str | None:
    """The simplest candidate that the fastest does not beat; None if nothing was measured."""
    if not scores:
        return None
    fastest = min(scores, key=lambda name: median(scores[name]))
    noise = noise_of(scores)
    return next(
        c.name for c in candidates
        if c.name in scores and not beats(scores[fastest], scores[c.name], noise, c is candidates[0])
    )  # fmt: skip


def beats(fast: list[float], slow: list[float], noise: float, displaces: bool) -> bool:
    """Whether one is notably faster than the other, in the middle of the rounds that both were in.

    displaces: the slow one is the simplest of all.
    """
    gains = [math.log(other / one) for one, other in zip(fast, slow, strict=False)]
    if len(gains) == 1:
        return gains[0] > math.log1p(ONE_LOOK_AT_FIRST if displaces else max(ONE_LOOK, noise))
    return median(gains) > math.log1p(noise)


def noise_of(scores: Scores) -> float:
    """A share of the time: how far the ratios of two candidates scatter from round to round, within bounds."""
    spreads = []
    fastest = min(scores.values(), key=median)
    for times in scores.values():
        if times is not fastest and min(len(times), len(fastest)) > 1:
            gains = [math.log(other / one) for one, other in zip(fastest, times, strict=False)]
            spreads.append((max(gains) - min(gains)) / 2 / math.sqrt(len(gains)))
    return min(MOST_NOISE, max(NOTABLE, min(spreads, default=ONE_LOOK)))


def lead(candidate: Candidate, prefetch_factor: int) -> int:
    """Steps until the readers are as far ahead as they get; while they catch up, they disturb the training more."""
    return 1 + 2 * prefetch_factor if candidate.number else 1


class _Bounds:
    """What a candidate can reach at best, from the times of loading and training alone and from the scores."""

    def __init__(self, candidates: Sequence[Candidate], alone: Alone, cores: int) -> None:
        self._candidates, self._alone, self._cores = candidates, alone, cores

    def hope(self, candidate: Candidate, scores: Scores) -> float:
        """For the order: what is perfect, times how far its engine, with another number, was from it."""
        perfect = self._perfect(candidate, scores)
        if not candidate.number:
            return perfect
        short = [
            median(scores[other.name]) / self._perfect(other, scores)
            for other in self._candidates
            if other.number and other.engine == candidate.engine and other.name in scores
        ]
        return perfect * min(short, default=1.0)

    def is_hopeless(self, candidate: Candidate, scores: Scores) -> bool:
        """Whether it cannot be notably faster than the fastest so far."""
        if not scores:
            return False
        bounds = [self._perfect(candidate, scores, GUESSED)]
        for other in self._candidates:  # more of the same: at best in proportion
            fewer = other.engine == candidate.engine and 0 < other.number < candidate.number
            if fewer and other.name in scores:
                bounds.append(median(scores[other.name]) * other.number / candidate.number)
        return max(bounds) > min(map(median, scores.values())) * (1 - WORTH_A_LOOK)

    def _perfect(self, candidate: Candidate, scores: Scores, trusted: float = 1.0) -> float:
        """Seconds per batch, could it divide the loading among its readers and hide it behind the step."""
        if not candidate.number:
            return self._alone.step
        load = min(self._alone.load, self._load_heard(scores))
        busy = min(self._alone.load_busy, load)
        shared = (busy + self._alone.step_busy) / self._cores
        return max(self._alone.step, trusted * load / candidate.number, shared)

    def _load_heard(self, scores: Scores) -> float:
        """As it was with the step: the first look saw few batches, the first perhaps from a cold disk."""
        first = self._candidates[0]
        if first.number or first.name not in scores:
            return math.inf
        return max(median(scores[first.name]) - self._alone.step, 0.0)


class _Budget:
    """Measures only what still fits into the time that is left."""

    def __init__(self, alone: Alone, left: float, measure: Measure, prefetch_factor: int) -> None:
        self._alone, self._left, self._measure = alone, left, measure
        self._prefetch_factor = prefetch_factor
        one = alone.load + alone.step
        self._batches = round(left / PARTS / one) if one else MOST_BATCHES
        self._starts = dict(FIRST_START)
        self.failed: set[str] = set()

    def cost(self, candidate: Candidate, per_batch: float | None = None) -> float:
        """Seconds of one measurement, as far as can be foreseen."""
        load, step = self._alone[:2]
        if per_batch is None:
            per_batch = max(step, load / candidate.number) if candidate.number else load + step
        return self._number(candidate) * per_batch + self._before(candidate)

    def cost_of_duel(self, scores: Scores, candidates: dict[str, Candidate], first: str) -> float:
        """Seconds of another look at the fastest so far and at the simplest; 0 if these are one."""
        fastest = min(scores, key=lambda name: median(scores[name]), default=first)
        if first not in scores or fastest == first:
            return 0.0
        return sum(self.cost(candidates[name], scores[name][-1]) for name in (fastest, first))

    def add(self, scores: Scores, candidate: Candidate, kept: float = 0.0) -> bool:
        """Whether there was time for it. kept: seconds that it must leave."""
        known = scores.get(candidate.name)
        if self.cost(candidate, known[-1] if known else None) + kept > self._left:
            return False
        number = self._number(candidate)
        reading = self._measure(candidate, number)
        if reading.seconds is not None:
            scores.setdefault(candidate.name, []).append(reading.seconds)
            if candidate.number:
                more = (self._left - reading.left - self.cost(candidate, reading.seconds)) / candidate.number
                self._starts[candidate.engine] = max(self._starts.get(candidate.engine, 0.0) + more, 0.0)
        elif reading.left > 0:
            self.failed.add(candidate.engine)
            scores.pop(candidate.name, None)
        self._left = reading.left
        return True

    def _number(self, candidate: Candidate) -> int:
        """Batches in one measurement: whole bursts, for the batches of several readers come in bursts."""
        several = max(1, candidate.number)
        return several * -(-max(LEAST_BATCHES, min(MOST_BATCHES, self._batches)) // several)

    def _before(self, candidate: Candidate) -> float:
        """Seconds until the readers have started, what lay ready is used up and all are in their stride."""
        load, step = self._alone[:2]
        if not candidate.number:
            return load + step
        ahead, per_batch = self._prefetch_factor, max(step, load / candidate.number)
        start = self._starts.get(candidate.engine, 0.0) * candidate.number
        return start + ahead * load + lead(candidate, ahead) * per_batch
