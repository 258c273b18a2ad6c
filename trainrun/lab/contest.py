"""Several runs against one, in interleaved turns: those that fall behind leave, the rest is looked at longer.

Source: successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943), with intervals: on a noisy machine the
slower half stays as long as it is not clearly behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trainrun.lab.bench import SubjectFailed
from trainrun.lab.duel import Duel
from trainrun.lab.orders import Turn
from trainrun.lab.statistics import EARLY, Ratio, settled

FIRST_ROUNDS: Final = 3
MOST_PAIRS: Final = 24
Take = Callable[[], Turn]


@dataclass(frozen=True)
class Limits:
    """deadline: by `clock`; the first rounds may go on until `last`, since without them all was for nothing.

    smallest: an effect below it does not matter. resolved: one below it is not seen.
    """

    clock: Callable[[], float]
    deadline: float
    smallest: float
    resolved: float
    last: float = 0.0

    @property
    def over(self) -> bool:
        return self.clock() >= self.deadline

    def first(self) -> Limits:
        return replace(self, deadline=max(self.deadline, self.last))


def contest(base: Take, others: Mapping[str, Take], limits: Limits) -> dict[str, Duel]:
    """All pairs that were taken, by name. One that fails keeps what it has, and `fault` says why."""
    found = {name: Duel() for name in others}
    staying, rounds, done = list(others), FIRST_ROUNDS, 0
    while staying and not (limits if done else limits.first()).over:
        now = limits if done else limits.first()
        for number in range(rounds):
            order = staying if number % 2 == 0 else staying[::-1]
            between(base, {name: others[name] for name in order}, found, now)
            staying = [name for name in staying if not found[name].fault]
            if now.over:
                break
        staying = kept(found, staying, limits)
        rounds, done = done + rounds, done + rounds
    return found


def between(base: Take, others: Mapping[str, Take], found: Mapping[str, Duel], limits: Limits) -> None:
    """One turn of the base between each two of the others."""
    before = base()
    for name, take in others.items():
        if found[name].fault:
            continue
        try:
            turn = take()
        except SubjectFailed as error:
            found[name].fault = str(error)
            continue
        after = base()
        speed = math.sqrt(before.speed * after.speed)  # the drift between them, halved
        found[name].pairs.append((speed, turn.speed))
        found[name].peak_bytes = max(found[name].peak_bytes, turn.peak_bytes)
        before = after
        if limits.over:
            return


def kept(found: Mapping[str, Duel], staying: list[str], limits: Limits) -> list[str]:
    """Who is looked at again, the fastest first; nobody once nothing more would be told."""
    seen = {name: found[name].ratio(EARLY) for name in staying if found[name].pairs}
    if not seen:
        return []
    order = sorted(seen, key=lambda name: -seen[name].value)
    leader = seen[order[0]]
    margin = 1 + max(limits.smallest, limits.resolved)
    half = order[: math.ceil(len(order) / 2)]
    near = [name for name in order if seen[name].value * margin >= leader.value]
    possible = [
        name for name in order
        if (name in half or name in near) and not seen[name].below(max(1 + limits.smallest, leader.low))
    ]  # fmt: skip
    if possible and seen[possible[0]].pairs >= MOST_PAIRS:
        return []
    if len(possible) == 1 and _clear(seen[possible[0]], limits):
        return []
    return possible


def _clear(ratio: Ratio, limits: Limits) -> bool:
    return ratio.pairs >= 2 * FIRST_ROUNDS and settled(ratio, limits.smallest)
