"""Which of several things is faster: turns taken alternately, ratios with intervals, successive halving.

what: a candidate is never compared with a time of another minute: its turn stands next to one of the base, so what
    the machine does in between meets both. One pair gives the logarithm of one ratio; their median is the answer, and
    its interval comes from the pairs themselves. The slower half leaves, unless it is not clearly behind.
    Where rare things count as much as they take, totals are compared instead (`ratio_of_totals`).
when: whenever the package asks what is faster. Everything here is pure: turns, clock and ranks are the caller's, and
    the same answers lead to the same turns, so that several ranks whose answers are gathered stay together.
source: Bulej and others, Duet Benchmarking (2020, arXiv:2001.05811); Kalibera and Jones, Rigorous Benchmarking in
    Reasonable Time (2013); Jamieson and Talwalkar, successive halving (2016, arXiv:1502.07943); the ratio estimator of
    Cochran, Sampling Techniques (1977), chapter 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

RESAMPLES: Final = 2000
STUDENT: Final = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
    2.09, 2.08,
)  # fmt: skip  # 95 %, for 1, 2, 3 and so on degrees of freedom
WIDEST: Final = 0.99  # or there would be no upper end
EARLY: Final = 0.99  # the confidence of a look that may end the comparison, since there are many of them
ONE_PAIR: Final = 0.12  # by how much a single pair must speak for a candidate
SHORTEST: Final = 1e-12  # seconds
BASE: Final = ""  # the name of what all others are compared with

Turn = Callable[[], float]  # seconds of one item; infinite if it failed, and then it has no more turns


def turn_of(work: Callable[[], object], least_seconds: float = 0.01) -> Turn:
    """Seconds of one call, from as many in a row as the clock needs."""
    began = perf_counter()
    work()
    number = max(1, round(least_seconds / max(perf_counter() - began, 1e-6)))

    def turn() -> float:
        began = perf_counter()
        for _ in range(number):
            work()
        return (perf_counter() - began) / number

    return turn


class Ratio(NamedTuple):
    """How many times as fast the second thing is as the first. low, high: its interval, at the confidence asked for."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


class Spent(NamedTuple):
    """Seconds, and the items that were done in them."""

    seconds: float
    items: float

    @property
    def each(self) -> float:
        """Seconds an item."""
        return self.seconds / self.items


@dataclass(frozen=True)
class Rules:
    """When a comparison ends.

    smallest: an effect below it does not matter. deadline: by the clock; the first `least_rounds` are taken in any
    case. first_rounds: until the first halving; each later halving comes after twice as many rounds in all.
    least_pairs: of the last candidate, before a clear result ends the comparison. most_pairs: of any.
    """

    smallest: float = 0.02
    deadline: float = math.inf
    least_rounds: int = 1
    first_rounds: int = 3
    least_pairs: int = 6
    most_pairs: int = 24


@dataclass
class Comparison:
    """pairs: by candidate, items a second of the base and of the candidate in the turn next to it. failed: candidates
    whose last turn was infinite."""

    pairs: dict[str, list[tuple[float, float]]]
    failed: list[str] = field(default_factory=list)

    def ratio(self, name: str, confidence: float = 0.95) -> Ratio:
        """How many times as fast as the base; the candidate has at least one pair."""
        return paired_ratio(self.pairs[name], confidence)

    def speed(self, name: str) -> float:
        """Items a second of a candidate or of `BASE`, in the middle of all its turns."""
        if name == BASE:
            return median(base for pairs in self.pairs.values() for base, _ in pairs)
        return median(own for _, own in self.pairs[name])

    def speeds(self, base: str) -> dict[str, float]:
        """Items a second in the middle of all turns, of the candidates that did not fail and, under the name given, of
        the base; empty where there is no pair."""
        if not any(self.pairs.values()):
            return {}
        good = [name for name, pairs in self.pairs.items() if pairs and name not in self.failed]
        return {base: self.speed(BASE)} | {name: self.speed(name) for name in good}

    def best(self, smallest: float, confidence: float) -> str:
        """The first candidate that is as good as the fastest; `BASE` where none is surely, and notably, faster.

        Candidates stand in the order in which they are preferred.
        """
        seen = {name: self.ratio(name, confidence) for name, pairs in self.pairs.items() if pairs}
        better = {
            name: ratio for name, ratio in seen.items()
            if name not in self.failed
            and ratio.low > 1.0
            and ratio.value > 1 + (smallest if ratio.pairs > 1 else ONE_PAIR)
        }  # fmt: skip
        fastest = max((ratio.value for ratio in better.values()), default=1.0)
        return next((name for name, ratio in better.items() if ratio.value * (1 + smallest) >= fastest), BASE)


def compare(
    base: Turn, others: Mapping[str, Turn], rules: Rules, clock: Callable[[], float] = perf_counter
) -> Comparison:
    """Take turns until it is clear what is fastest, or the time is over. A base that fails ends it."""
    turns = Turns({BASE: base, **others}, clock, rules.deadline)
    found = Comparison({name: [] for name in others})
    staying, rounds, done = list(others), rules.first_rounds, 0
    while staying:
        for _ in range(rounds):
            order = staying if done % 2 == 0 else staying[::-1]
            if not turns.round(order, found, in_any_case=done < rules.least_rounds):
                return found
            done += 1
            staying = [name for name in staying if name not in found.failed]
        staying, rounds = survivors(found, staying, rules), min(done, rules.most_pairs - done)
    return found


def survivors(found: Comparison, staying: Sequence[str], rules: Rules) -> list[str]:
    """Those that get more turns; none once more turns would tell nothing new."""
    seen = {name: found.ratio(name, EARLY) for name in staying if found.pairs[name]}
    if not seen:
        return []
    order = sorted(seen, key=lambda name: -seen[name].value)
    leader = seen[order[0]]
    half = order[: math.ceil(len(order) / 2)]
    kept = [
        name for name in staying
        if name in seen
        and (name in half or seen[name].value * (1 + rules.smallest) >= leader.value)
        and seen[name].high >= max(1 + rules.smallest, leader.low)
    ]  # fmt: skip
    alone = len(kept) == 1 and leader.pairs >= rules.least_pairs and settled(leader, rules.smallest)
    return [] if alone or leader.pairs >= rules.most_pairs else kept


class Turns:
    """Turns in an order in which every candidate stands next to one of the base, as far as the time goes."""

    def __init__(self, turns: Mapping[str, Turn], clock: Callable[[], float], deadline: float) -> None:
        self._turns, self._clock, self._deadline = turns, clock, deadline
        self._took: dict[str, float] = {}
        self._rounds = 0

    def round(self, names: Sequence[str], found: Comparison, in_any_case: bool) -> bool:
        """A base turn between each two candidates, or alone. Returns whether there was time, and the base works.

        One that stands alone comes before the base and after it alternately, or the drift of the machine would favor
        one of the two.
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
            seconds = {name: self._take(name) for name in group}
            if seconds[BASE] == math.inf:
                return False
            for name in names_here:
                if seconds[name] == math.inf:
                    found.failed.append(name)
                else:
                    found.pairs[name].append((1 / seconds[BASE], 1 / seconds[name]))
        return True

    def _take(self, name: str) -> float:
        began = self._clock()
        seconds = max(self._turns[name](), SHORTEST)
        self._took[name] = self._clock() - began
        return seconds


def total(several: Iterable[Spent]) -> Spent:
    seconds, items = (sum(column) for column in zip(*several, strict=True))
    return Spent(seconds, items)


def paired_ratio(pairs: Sequence[tuple[float, float]], confidence: float = 0.95) -> Ratio:
    """Estimate the second speed over the first, from pairs (units a second) measured in turns."""
    logs = sorted(math.log(second / first) for first, second in pairs)
    low, high = _ranked(logs, confidence)
    return Ratio(math.exp(median(logs)), math.exp(low), math.exp(high), len(logs))


def grouped_ratio(groups: Sequence[Sequence[tuple[float, float]]], confidence: float) -> Ratio:
    """Estimate the ratio from pairs measured in several pairs of processes, one group each.

    A process may be a little faster than its twin for all of its life, so the interval reaches at least as far as
    resampling says that draws processes first, and then pairs of theirs (Kalibera and Jones).
    """
    logs = [np.array([math.log(second / first) for first, second in pairs]) for pairs in groups]
    plain = paired_ratio([pair for pairs in groups for pair in pairs], confidence)
    draw = np.random.default_rng(0)
    medians = []
    for _ in range(RESAMPLES):
        chosen = [logs[i] for i in draw.integers(len(logs), size=len(logs))]
        medians.append(np.median(np.concatenate([draw.choice(own, len(own)) for own in chosen])))
    outside = (1 - confidence) / 2
    low, high = map(float, np.quantile(medians, (outside, 1 - outside)))
    return plain._replace(low=min(plain.low, math.exp(low)), high=max(plain.high, math.exp(high)))


def ratio_of_totals(pairs: Sequence[tuple[Spent, Spent]]) -> Ratio:
    """How much faster the second thing is: seconds an item of all the firsts, over those of all the seconds. The mean
    of what each pair says would be another number where a batch of few items may take long.

    The interval is Student's, of what each pair leaves unexplained of the second's share of the first; a single pair
    has none.
    """
    count = len(pairs)
    both = [total(side) for side in zip(*pairs, strict=True)]
    value = both[0].each / both[1].each
    left = [sum(unexplained(one, whole) * sign for one, whole, sign in zip(pair, both, (1, -1), strict=True))
            for pair in pairs]  # fmt: skip
    width = half_interval(left)  # of the second's share of the first
    high = value / (1 - min(width, WIDEST)) if count > 1 else math.inf
    return Ratio(value, value / (1 + width), high, count)


def unexplained(one: Spent, whole: Spent) -> float:
    """What it took longer than its items take on average, as a share of the whole; over all of the whole 0."""
    return (one.seconds - one.items * whole.each) / whole.seconds


def half_interval(left: Sequence[float]) -> float:
    """Student's, of the sum of things whose mean is 0; endless for a single one."""
    count = len(left)
    if count < 2:
        return math.inf
    spread = math.sqrt(sum(one**2 for one in left) * count / (count - 1))
    return STUDENT[min(count - 1, len(STUDENT)) - 1] * spread


def _ranked(ordered: list[float], confidence: float) -> tuple[float, float]:
    """The interval of a sign test. With fewer than six pairs even the outermost are not sure to 95 %."""
    count, cut, left_out = len(ordered), 0, 0.0
    while cut < (count - 1) // 2:
        left_out += 2 * math.comb(count, cut) / 2**count
        if left_out > 1 - confidence:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return ordered[cut], ordered[-1 - cut]


def settled(ratio: Ratio, smallest: float) -> bool:
    """Whether more pairs would tell nothing new: the interval lies on one side of, or inside, 1 +- smallest."""
    return ratio.low > 1 + smallest or ratio.high < 1 - smallest or (
        1 - smallest <= ratio.low and ratio.high <= 1 + smallest
    )  # fmt: skip
