"""Which candidate is fastest, found with few measurements: an open contest in rounds.

What: every round measures what is left, in turn and in alternating order, and drops clear losers. A
candidate that could not win even if it divided the loading perfectly, or hid it wholly behind the step,
is not measured at all. Of those within the noise of the fastest, the simplest wins.
Source: successive halving, Jamieson and Talwalkar 2016, arXiv:1502.07943.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from trainrun.data.undecided import Candidate

NOTABLE = 0.03  # a difference below this share is none
ONE_LOOK = 0.05  # the same where everything was measured once
MOST_NOISE = 0.10  # a difference above this share is one, however the measurements scatter
CLEAR_LOSS = 1.25  # times the fastest
MAX_ROUNDS = 5
LEAST_BATCHES, MOST_BATCHES = 3, 256  # in one measurement
FIRST_START = {"workers": 0.1, "threads": 0.005}  # seconds for each, until one was measured


class Alone(NamedTuple):
    """Seconds of one batch: to load it while nobody trains, and to train on it while nobody loads."""

    load: float
    step: float


class Reading(NamedTuple):
    """seconds: per batch, None where the candidate failed or time ran out; left: seconds to go in all."""

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


def contest(
    candidates: Sequence[Candidate], alone: Alone, left: float, measure: Measure, prefetch_factor: int = 2
) -> Outcome:
    """Measures those that could win, until one is left, nothing changes, or time is up.

    candidates: the simplest first; `alone` was measured with the first of them. left: seconds that all
    of it may take. measure: times a candidate over a number of batches, beside the step.
    """
    budget = _Budget(candidates, alone, left, measure, prefetch_factor)
    scores: Scores = {}
    unheard = []
    order = list(candidates)
    if sum(map(budget.cost, candidates)) > left:  # no time for all: the most promising first
        order.sort(key=lambda candidate: _bound(candidate, alone.load, alone.step))
        if candidates[0].number == 0:
            scores[candidates[0].name] = [sum(alone)]  # it loads and trains in turn: nothing new to hear
            order.remove(candidates[0])
    for candidate in order:
        if candidate.engine in budget.failed or _is_hopeless(candidate, candidates, alone, scores):
            continue
        if not budget.add(scores, candidate):
            unheard.append(candidate.name)
    for turn in range(1, MAX_ROUNDS):
        names = survivors(scores)
        if len(names) < 2:
            break
        again = [candidate for candidate in candidates if candidate.name in names]
        done = [budget.add(scores, candidate) for candidate in (again[::-1] if turn % 2 else again)]
        if not any(done):
            break
    return Outcome(scores, unheard, sorted(budget.failed))


def survivors(scores: Scores) -> list[str]:
    """The faster half, and all within the noise of the fastest; never a clear loser."""
    ranked = sorted(scores, key=lambda name: median(scores[name]))
    if not ranked:
        return []
    best = median(scores[ranked[0]])
    limit = best * (1 + 2 * noise_of(scores))
    half = (len(ranked) + 1) // 2
    return [
        name
        for i, name in enumerate(ranked)
        if median(scores[name]) <= limit or (i < half and median(scores[name]) <= best * CLEAR_LOSS)
    ]


def winner(candidates: Sequence[Candidate], scores: Scores) -> str | None:
    """The simplest candidate that the fastest does not beat notably; None where nothing was measured."""
    if not scores:
        return None
    limit = min(map(median, scores.values())) * (1 + noise_of(scores))
    return next(c.name for c in candidates if c.name in scores and median(scores[c.name]) <= limit)


def noise_of(scores: Scores) -> float:
    """A share of the time: how far measurements of one candidate scatter, within bounds."""
    spreads = [(max(times) - min(times)) / median(times) / 2 for times in scores.values() if len(times) > 1]
    return min(MOST_NOISE, max(NOTABLE, median(spreads) if spreads else ONE_LOOK))


def _is_hopeless(candidate: Candidate, candidates: Sequence[Candidate], alone: Alone, scores: Scores) -> bool:
    """Whether it cannot be notably faster than the fastest so far."""
    if not scores:
        return False
    load = alone.load  # seen on a few batches, the first perhaps from a cold disk
    if candidates[0].number == 0 and candidates[0].name in scores:
        load = min(load, median(scores[candidates[0].name]) - alone.step)
    bounds = [_bound(candidate, load, alone.step)]
    for other in candidates:  # more of the same: at best in proportion
        if other.engine == candidate.engine and 0 < other.number < candidate.number and other.name in scores:
            bounds.append(median(scores[other.name]) * other.number / candidate.number)
    return max(bounds) > min(map(median, scores.values())) * (1 - NOTABLE)


def _bound(candidate: Candidate, load: float, step: float) -> float:
    """Seconds per batch, could it divide the loading among its readers and hide it behind the step."""
    return max(step, load / candidate.number) if candidate.number else step


class _Budget:
    """Measures only what still fits into the time that is left."""

    def __init__(self, candidates: Sequence[Candidate], alone: Alone, left: float, measure: Measure,
                 prefetch_factor: int) -> None:  # fmt: skip
        self._alone, self._left, self._measure = alone, left, measure
        self._prefetch_factor = prefetch_factor
        one = alone.load + alone.step
        self._batches = round(left / (3 * len(candidates)) / one) if one else MOST_BATCHES
        self._starts = dict(FIRST_START)
        self.failed: set[str] = set()

    def cost(self, candidate: Candidate, per_batch: float | None = None) -> float:
        """Seconds of one measurement, as far as can be foreseen."""
        load, step = self._alone
        if per_batch is None:
            per_batch = _bound(candidate, load, step) if candidate.number else load + step
        return self._number(candidate) * per_batch + self._before(candidate)

    def add(self, scores: Scores, candidate: Candidate) -> bool:
        """Whether there was time for it."""
        known = scores.get(candidate.name)
        if self.cost(candidate, known[-1] if known else None) > self._left:
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
        return several * max(2, -(-max(LEAST_BATCHES, min(MOST_BATCHES, self._batches)) // several))

    def _before(self, candidate: Candidate) -> float:
        """Seconds until the readers have started, what lay ready is used up and all are in their stride."""
        load, step = self._alone
        if not candidate.number:
            return load + step
        start = self._starts.get(candidate.engine, 0.0) * candidate.number
        return start + (self._prefetch_factor + 1) * load + step
