"""What padding costs, by the sizes of all batches of an epoch and not only of those that were measured.

What: seconds of a step, as a part that every step has and a part for every position, fitted to the turns of both ways
of forming batches; both plans of a whole epoch are priced with it. When: the lengths are known beforehand. Of a few
long sequences half a minute meets too few for turns to speak by themselves. When not: several ranks, batches that the
user's own code pads, a step whose time is far from a straight line in its positions. Source: the regression estimator
of Cochran, Sampling Techniques (1977), chapter 7; Tukey's jackknife for its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from trainrun.lab.orders import Turn
from trainrun.lab.statistics import Ratio, half_interval

FEWEST: Final = 4  # turns
ALIKE: Final = 1e-9  # of what would differ


def padding_gain(
    padded: Sequence[Turn], grouped: Sequence[Turn], positions: Mapping[str, float], mode: str, other: str
) -> Ratio | None:
    """How many times as fast an epoch is whose batches are formed in the other mode, of as many samples each. None
    if too little is known.

    padded, grouped: turns in the one mode and in the other. positions: of an average step, by mode.
    """
    turns = [*padded, *grouped]
    known = all(turn.positions and turn.running_seconds > 0 for turn in turns)
    if not known or len(turns) < FEWEST or mode not in positions or other not in positions:
        return None

    def gain(turns: Sequence[Turn]) -> float:
        step, position = cost_of(turns)
        return (step + position * positions[mode]) / (step + position * positions[other])

    value, count = gain(turns), len(turns)
    each = [math.log(gain([*turns[:number], *turns[number + 1 :]])) for number in range(count)]
    mean = sum(each) / count
    spread = math.exp(half_interval([(one - mean) * (count - 1) / count for one in each]))
    return Ratio(value, value / spread, value * spread, count)


def cost_of(turns: Sequence[Turn]) -> tuple[float, float]:
    """Seconds of a step and of a position, none below 0: least squares, where a turn may be off by as much more as it
    has positions. Without a cost of steps that of a position is the mean."""
    steps, places, both, slow, far = 0.0, 0.0, 0.0, 0.0, 0.0
    for turn in turns:
        steps += turn.steps**2 / turn.positions
        places += turn.positions
        both += turn.steps
        slow += turn.steps * turn.running_seconds / turn.positions
        far += turn.running_seconds
    rest = steps * places - both**2
    step = (slow * places - far * both) / rest if rest > ALIKE * steps * places else 0.0
    if step <= 0:
        return 0.0, far / places
    position = (far * steps - slow * both) / rest
    return (step, position) if position > 0 else (slow / steps, 0.0)
