"""Compare speeds in alternating turns: ratios with Student's t intervals, and successive halving of candidates.

what: every turn of a candidate is next to a turn of the base, so that changes of the machine affect both. One pair
    of turns gives the logarithm of one ratio. A claim about a setting in general counts processes
    (`compute_process_ratio`), because a process may be a few per cent faster than an equal one for all of its life.
    More turns in one process do not show that. For a decision inside one process, its turns are enough
    (`compute_turn_ratio`). With fewer than `LEAST_REPLICATES` pairs no interval is printed. If rare slow events must
    count by their duration, totals are compared (`compute_total_ratio`). The slower half of the candidates is dropped
    early, except those that are not clearly slower. A comparison ends early only at a high confidence: checking
    several times costs at most one hundredth of the claimed confidence.
when: whenever the package measures what is faster. All functions are pure: the caller provides turns, clock and
    ranks. Equal results lead to the same next turn, so ranks that gather their results stay in step.
source: Student (1908); Kalibera and Jones, Rigorous Benchmarking in Reasonable Time (2013); Bulej and others, Duet
    Benchmarking (2020, arXiv:2001.05811); Jamieson and Talwalkar, successive halving (2016, arXiv:1502.07943); the
    ratio estimator of Cochran, Sampling Techniques (1977), chapter 6.
gain: `tests/timing/test_coverage.py` simulates processes with known ratios. The intervals contain them as often as
    claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, median, stdev
from time import perf_counter
from typing import Final, NamedTuple

LEAST_REPLICATES: Final = 4  # of fewer the pairs are printed, and no interval
PROCESS_SPREAD: Final = (
    0.05  # by how much two processes of the same settings may differ for all of their lives
)
WIDEST: Final = 0.99  # or there would be no upper end
EARLY: Final = 0.99  # the confidence with which all checks together end a comparison before its time
DROPPED: Final = 0.90  # the confidence with which a candidate leaves: nothing is claimed of it
ONE_PAIR: Final = 0.12  # by how much a single pair must speak for a candidate
SHORTEST: Final = 1e-12  # seconds
BASE: Final = ""  # the name of what all others are compared with

Turn = Callable[[], float]  # seconds of one item; infinite if it failed, and then it has no more turns


def build_turn(work: Callable[[], object], least_seconds: float = 0.01) -> Turn:
    """Return a function that measures the seconds of one call, averaged over at least `least_seconds` of calls."""
    began = perf_counter()
    work()
    number = max(1, round(least_seconds / max(perf_counter() - began, 1e-6)))

    def measure_turn() -> float:
        began = perf_counter()
        for _ in range(number):
            work()
        return (perf_counter() - began) / number

    return measure_turn


class Ratio(NamedTuple):
    """A speed ratio: how many times as fast the second candidate is as the first.

    low, high: Student's interval at the requested confidence; 0 and infinity for a single pair. pairs: the number of
        pairs of processes or turns. each: the ratio of every pair; empty if nothing was compared in turns.
    """

    value: float
    low: float
    high: float
    pairs: int
    each: tuple[float, ...] = ()

    @property
    def has_interval(self) -> bool:
        """Return whether there are enough pairs for a reliable interval."""
        return self.pairs >= LEAST_REPLICATES

    def interval(self) -> str:
        """Return the interval as text (`1.38 to 1.49`), or every pair if there are too few (`pairs: 1.40, 1.49`)."""
        if self.has_interval:
            return f"{self.low:.2f} to {self.high:.2f}"
        listed = ", ".join(f"{ratio:.2f}" for ratio in sorted(self.each))
        return f"pairs: {listed}" if self.pairs > 1 else "one pair"

    def turns(self) -> str:
        """Return the range of all turns as text (`1.38 to 1.49 in 12 turns`).

        The turns are of one process, so the range is no interval for other processes.
        """
        if len(self.each) < 2:
            return "one turn"
        return f"{min(self.each):.2f} to {max(self.each):.2f} in {self.pairs} turns"

    def map(self, change: Callable[[float], float]) -> Ratio:
        """Return the ratio with an increasing function applied to its value, its bounds, and every pair."""
        value, low, high = map(change, self[:3])
        return Ratio(value, low, high, self.pairs, tuple(map(change, self.each)))

    def multiply(self, factor: float) -> Ratio:
        return self.map(lambda ratio: factor * ratio)

    def inverse(self) -> Ratio:
        """Return how many times as fast the first candidate is as the second."""
        high = 1 / self.low if self.low > 0 else math.inf
        return Ratio(1 / self.value, 1 / self.high, high, self.pairs, tuple(1 / ratio for ratio in self.each))

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.interval()})"


class TimedItems(NamedTuple):
    """A number of items, and the seconds in which they were processed."""

    seconds: float
    items: float

    @property
    def seconds_per_item(self) -> float:
        """Return the seconds per item."""
        return self.seconds / self.items


@dataclass(frozen=True)
class StoppingRules:
    """The rules that end a comparison.

    smallest: the smallest gain that matters, as a fraction. deadline: the time on the clock at which the comparison
        ends; the first `least_rounds` rounds run in any case.
    first_rounds: rounds before the first halving. Each later halving comes after twice as many rounds in all.
    least_pairs: pairs that the last candidate needs before a clear result ends the comparison. most_pairs: the
        maximum of any candidate.
    """

    smallest: float = 0.02
    deadline: float = math.inf
    least_rounds: int = 1
    first_rounds: int = 3
    least_pairs: int = 6
    most_pairs: int = 24

    @property
    def num_checks(self) -> int:
        """Return the maximum number of checks that may end the comparison."""
        doublings = math.log2(max(1.0, self.most_pairs / self.first_rounds))
        return 1 + math.ceil(doublings)


@dataclass
class Comparison:
    """The results of several candidates, each compared with a base.

    pairs: for each candidate, the items per second of the base and of the candidate in neighbouring turns. failed:
        candidates whose last turn failed.
    """

    pairs: dict[str, list[tuple[float, float]]]
    failed: list[str] = field(default_factory=list)

    def ratio(self, name: str, confidence: float = 0.95) -> Ratio:
        """Return how many times as fast as the base a candidate is. The candidate needs at least one pair.

        The interval of a candidate that was dropped early is slightly too low, because unlucky turns made it drop.
        """
        return compute_turn_ratio(self.pairs[name], confidence)

    def speed(self, name: str) -> float:
        """Return the median items per second of a candidate, or of `BASE`."""
        if name == BASE:
            return median(base for pairs in self.pairs.values() for base, _ in pairs)
        return median(rate for _, rate in self.pairs[name])

    def speeds(self, base: str) -> dict[str, float]:
        """Return the median items per second of the candidates that did not fail and of the base, which gets the
        name `base`.
        """
        if not any(self.pairs.values()):
            return {}
        good = [name for name, pairs in self.pairs.items() if pairs and name not in self.failed]
        return {base: self.speed(BASE)} | {name: self.speed(name) for name in good}

    def best(self, smallest: float, confidence: float) -> str:
        """Return the first candidate that is as good as the fastest; `BASE` if no candidate is reliably faster.

        The candidates are in the order of preference. confidence: the probability to return `BASE` if none is
        faster.
        """
        confidence = split_confidence(confidence, len(self.pairs))
        ratios = {name: self.ratio(name, confidence) for name, pairs in self.pairs.items() if pairs}
        better = {
            name: ratio for name, ratio in ratios.items()
            if name not in self.failed
            and (ratio.low > 1.0 or ratio.pairs == 1)
            and ratio.value > 1 + (smallest if ratio.pairs > 1 else ONE_PAIR)
        }  # fmt: skip
        fastest = max((ratio.value for ratio in better.values()), default=1.0)
        return next((name for name, ratio in better.items() if ratio.value * (1 + smallest) >= fastest), BASE)


def compare_in_turns(
    base: Turn, others: Mapping[str, Turn], rules: StoppingRules, clock: Callable[[], float] = perf_counter
) -> Comparison:
    """Take turns until the fastest candidate is clear or the time is over. The comparison ends if the base fails."""
    turns = TurnSchedule({BASE: base, **others}, clock, rules.deadline)
    comparison = Comparison({name: [] for name in others})
    staying, rounds, done = list(others), rules.first_rounds, 0
    while staying:
        for _ in range(rounds):
            order = staying if done % 2 == 0 else staying[::-1]
            if not turns.round(order, comparison, in_any_case=done < rules.least_rounds):
                return comparison
            done += 1
            staying = [name for name in staying if name not in comparison.failed]
        staying, rounds = choose_remaining(comparison, staying, rules), min(done, rules.most_pairs - done)
    return comparison


def choose_remaining(comparison: Comparison, staying: Sequence[str], rules: StoppingRules) -> list[str]:
    """Return the candidates that need more turns; none if more turns would not change the result."""
    early = split_confidence(EARLY, rules.num_checks)
    ratios = {name: comparison.ratio(name, early) for name in staying if comparison.pairs[name]}
    if not ratios:
        return []
    order = sorted(ratios, key=lambda name: -ratios[name].value)
    leader = ratios[order[0]]
    half = order[: math.ceil(len(order) / 2)]
    least = max(1 + rules.smallest, leader.low)
    surviving = []
    for name in staying:
        if name not in ratios:
            continue
        close = ratios[name].value * (1 + rules.smallest) >= leader.value
        hopeless = compute_turn_ratio(comparison.pairs[name], DROPPED).high < least
        if (name in half or close) and not hopeless:
            surviving.append(name)
    alone = len(surviving) == 1 and leader.pairs >= rules.least_pairs and is_settled(leader, rules.smallest)
    return [] if alone or leader.pairs >= rules.most_pairs else surviving


class TurnSchedule:
    """A schedule of turns in which every candidate is next to the base, until the deadline."""

    def __init__(self, turns: Mapping[str, Turn], clock: Callable[[], float], deadline: float) -> None:
        self._turns, self._clock, self._deadline = turns, clock, deadline
        self._took: dict[str, float] = {}
        self._rounds = 0

    def round(self, names: Sequence[str], comparison: Comparison, in_any_case: bool) -> bool:
        """Take the turns of one round, with a turn of the base between each two candidates.

        Return False if there was no time or the base failed. A single candidate runs alternately before and after
        the base. Otherwise drift of the machine would favour one of them.
        """
        self._rounds += 1
        for first in range(0, len(names) or 1, 2):
            names_here = names[first : first + 2]
            group = [*names_here[:1], BASE, *names_here[1:]]
            group = group[::-1] if len(group) == 2 and self._rounds % 2 else group
            if (
                not in_any_case
                and self._clock() + sum(self._took.get(name, 0.0) for name in group) > self._deadline
            ):
                return False
            seconds = {name: self._take_turn(name) for name in group}
            if seconds[BASE] == math.inf:
                return False
            for name in names_here:
                if seconds[name] == math.inf:
                    comparison.failed.append(name)
                else:
                    comparison.pairs[name].append((1 / seconds[BASE], 1 / seconds[name]))
        return True

    def _take_turn(self, name: str) -> float:
        began = self._clock()
        seconds = max(self._turns[name](), SHORTEST)
        self._took[name] = self._clock() - began
        return seconds


def sum_timed_items(several: Iterable[TimedItems]) -> TimedItems:
    seconds, items = (sum(column) for column in zip(*several, strict=True))
    return TimedItems(seconds, items)


def estimate_ratio(logs: Sequence[float], confidence: float) -> Ratio:
    """Return a ratio estimated from its independent logarithms, with Student's interval of their mean."""
    count, middle = len(logs), fmean(logs)
    half = math.inf
    if count > 1:
        half = student_quantile(confidence, count - 1) * stdev(logs, middle) / math.sqrt(count)
    each = tuple(math.exp(log_ratio) for log_ratio in logs)
    return Ratio(math.exp(middle), math.exp(middle - half), exp_or_infinity(middle + half), count, each)


def compute_turn_ratio(pairs: Sequence[tuple[float, float]], confidence: float = 0.95) -> Ratio:
    """Return the second speed divided by the first, from pairs (items per second) of turns in the same processes.

    The interval is valid for these processes only: others with the same settings may differ by more.
    """
    return estimate_ratio([math.log(second / first) for first, second in pairs], confidence)


def compute_process_ratio(groups: Sequence[Sequence[tuple[float, float]]], confidence: float) -> Ratio:
    """Return the second speed divided by the first, from the turns of several pairs of processes, one group for each
    pair.

    Each pair of processes counts once, by the median ratio of its turns, so that a disturbed turn has little weight.
    """
    logs = [median(math.log(second / first) for first, second in pairs) for pairs in groups]
    return estimate_ratio(logs, confidence)


def compute_total_ratio(pairs: Sequence[tuple[TimedItems, TimedItems]]) -> Ratio:
    """Return the total seconds per item of the first turns, divided by the total seconds per item of the second turns.

    The mean of the ratios of pairs would be different if a batch of few items can take long. The interval is Student's
    95 % interval from the residuals of the pairs. A single pair has none.
    """
    count = len(pairs)
    both = [sum_timed_items(side) for side in zip(*pairs, strict=True)]
    value = both[0].seconds_per_item / both[1].seconds_per_item
    left = [sum(relative_residual(turn, total) * sign for turn, total, sign in zip(pair, both, (1, -1), strict=True))
            for pair in pairs]  # fmt: skip
    width = half_interval(left)  # of the second's share of the first
    high = value / (1 - min(width, WIDEST)) if count > 1 else math.inf
    each = tuple(first.seconds_per_item / second.seconds_per_item for first, second in pairs)
    return Ratio(value, value / (1 + width), high, count, each)


def relative_residual(one: TimedItems, whole: TimedItems) -> float:
    """Return the measured minus the expected seconds, divided by the total seconds. The residuals of all turns sum
    to 0.
    """
    return (one.seconds - one.items * whole.seconds_per_item) / whole.seconds


def half_interval(residuals: Sequence[float], confidence: float = 0.95) -> float:
    """Return half the width of Student's interval of a sum of numbers with mean 0; infinity for a single number."""
    count = len(residuals)
    if count < 2:
        return math.inf
    spread = math.sqrt(sum(residual**2 for residual in residuals) * count / (count - 1))
    return student_quantile(confidence, count - 1) * spread


@lru_cache(maxsize=256)
def student_quantile(confidence: float, degrees: int) -> float:
    """Return the half-width of Student's interval in standard errors (the two-sided quantile of t)."""
    low, high = 0.0, 1.0
    while student_probability(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if student_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high


def student_probability(bound: float, degrees: int) -> float:
    """Return the probability that Student's t is between -bound and bound.

    The finite series of Abramowitz and Stegun, 26.7.3 (odd degrees of freedom) and 26.7.4 (even).
    """
    angle = math.atan(bound / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    series = term if degrees > 1 else 0.0
    for number in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (number - 1) / number
        series += term
    return 2 / math.pi * (angle + sine * series) if odd else sine * series


def split_confidence(confidence: float, chances: int) -> float:
    """Return the confidence that each of `chances` statements needs, so that all are true with `confidence`
    (Bonferroni).
    """
    return 1 - (1 - confidence) / max(chances, 1)


def exp_or_infinity(number: float) -> float:
    """Return e to the power of `number`; infinity if a float cannot hold it."""
    return math.exp(number) if number < 700 else math.inf


def is_settled(ratio: Ratio, smallest: float) -> bool:
    """Return whether more pairs would not change the verdict: the interval is above, below, or inside 1 +-
    `smallest`.
    """
    return ratio.low > 1 + smallest or ratio.high < 1 - smallest or (
        1 - smallest <= ratio.low and ratio.high <= 1 + smallest
    )  # fmt: skip
