"""What pairs of turns say: a ratio, and how sure it is.

Two things are compared turn by turn, so that what the machine does in between meets both. One pair gives the
logarithm of one ratio; their median is the answer, and its interval comes from the pairs themselves. Source:
Bulej and others, Duet Benchmarking (2020, arXiv:2001.05811); Kalibera and Jones, Rigorous Benchmarking in
Reasonable Time (2013). Where rare things count as much as they take, totals are compared instead: the ratio
estimator of Cochran, Sampling Techniques (1977), chapter 6.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

RESAMPLES = 2000
FEW_PAIRS = 30  # below that resampling is too sure of itself: the order of the pairs decides
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11,
           2.10, 2.09, 2.09, 2.08)  # fmt: skip  # 95 %, for 1, 2, 3 and so on degrees of freedom
WIDEST = 0.99  # or there would be no upper end
EARLY = 0.99  # the confidence of a look that may end the comparison, since there are many of them


class Ratio(NamedTuple):
    """How many times as fast the second thing is as the first. low, high: its interval, at the confidence asked for."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"

    def above(self, bound: float) -> bool:
        return self.low > bound

    def below(self, bound: float) -> bool:
        return self.high < bound


class Spent(NamedTuple):
    """Seconds, and the items that were done in them."""

    seconds: float
    items: float

    @property
    def each(self) -> float:
        """Seconds an item."""
        return self.seconds / self.items


def total(several: Iterable[Spent]) -> Spent:
    seconds, items = (sum(column) for column in zip(*several, strict=True))
    return Spent(seconds, items)


def paired_ratio(pairs: Sequence[tuple[float, float]], confidence: float = 0.95) -> Ratio:
    """Estimate the second speed over the first, from pairs (units a second) measured in turns."""
    logs = sorted(math.log(second / first) for first, second in pairs)
    low, high = _ranked(logs, confidence) if len(logs) < FEW_PAIRS else resampled(logs, confidence)
    return Ratio(math.exp(median(logs)), math.exp(low), math.exp(high), len(logs))


def grouped_ratio(groups: Sequence[Sequence[tuple[float, float]]], confidence: float) -> Ratio:
    """Estimate the ratio from pairs measured in several pairs of processes, one group each.

    A process may be a little faster than its twin for all of its life, so the interval reaches at least as far as
    resampling says that draws processes first, and then pairs of theirs (Kalibera and Jones).
    """
    logs = [[math.log(second / first) for first, second in pairs] for pairs in groups]
    plain = paired_ratio([pair for pairs in groups for pair in pairs], confidence)
    draw = random.Random(0)
    medians = sorted(
        median([value for own in draw.choices(logs, k=len(logs)) for value in draw.choices(own, k=len(own))])
        for _ in range(RESAMPLES)
    )
    low, high = _outermost(medians, confidence)
    return plain._replace(low=min(plain.low, math.exp(low)), high=max(plain.high, math.exp(high)))


def ratio_of_totals(pairs: Sequence[tuple[Spent, Spent]], doubt: float = 0.0) -> Ratio:
    """How much faster the second thing is: seconds an item of all the firsts, over those of all the seconds. The mean
    of what each pair says would be another number where a batch of few items may take long.

    The interval is Student's, of what each pair leaves unexplained of the second's share of the first; a single pair
    has none. doubt: half of an interval, as a share of the firsts, of what the pairs do not show.
    """
    count = len(pairs)
    both = [total(side) for side in zip(*pairs, strict=True)]
    value = both[0].each / both[1].each
    left = [sum(unexplained(one, whole) * sign for one, whole, sign in zip(pair, both, (1, -1), strict=True))
            for pair in pairs]  # fmt: skip
    width = math.hypot(half_interval(left), doubt)  # of the second's share of the first
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
    return STUDENT[min(count - 1, len(STUDENT)) - 1] * math.sqrt(
        sum(one**2 for one in left) * count / (count - 1)
    )


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


def resampled(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """The interval of the median, by resampling."""
    draw = random.Random(0)  # the same pairs always say the same
    return _outermost(
        sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)), confidence
    )


def _outermost(ordered: list[float], confidence: float) -> tuple[float, float]:
    outside, count = (1 - confidence) / 2, len(ordered)
    return ordered[int(outside * count)], ordered[min(math.ceil((1 - outside) * count), count) - 1]


def settled(ratio: Ratio, smallest: float) -> bool:
    """Whether more pairs would tell nothing new: the interval lies on one side of, or inside, 1 +- smallest."""
    return ratio.low > 1 + smallest or ratio.high < 1 - smallest or (
        1 - smallest <= ratio.low and ratio.high <= 1 + smallest
    )  # fmt: skip
