"""Many things against one base: in each round every one of them has a turn, and the base one between every two.

What: seconds an item, over all rounds together, because what a run would gain is a sum of time: a stall that comes
once in a hundred steps is in few turns, and in no median. A slow drift of the machine meets all in a round alike.
When: `diagnose`, which asks what each of many removals gains and not which is the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import Final

from trainrun.lab.findings import UNCHANGED, Slowed
from trainrun.lab.orders import Turn
from trainrun.lab.statistics import Ratio, Spent, half_interval, ratio_of_totals, total, unexplained
from trainrun.ledger import ACCOUNTS, COMPILE, DATA, LOGGING

BASE: Final = ""  # its name in a round
BOOKED: Final = (DATA, LOGGING)
LEAST: Final = 1e-12  # seconds
ALONE: Final = 0.8  # of what became slower: other processes slow all of a step
Side = Callable[[], Turn]


@dataclass
class Rounds:
    """told: of each round what each spent, by name, without compilation; a name need not be in every one. Under the
    name of `without` what was booked on an account is taken off. own: all turns of the base. readings: of every turn
    that reads as the base does. reads_otherwise: whether one of that name does. took: seconds of the last turn of each,
    with the steps ahead of it. turns: all of each but the base."""

    told: list[dict[str, Spent]] = field(default_factory=list)
    own: list[Turn] = field(default_factory=list)
    readings: list[Spent] = field(default_factory=list)
    reads_otherwise: Callable[[str], bool] = lambda name: False
    took: dict[str, float] = field(default_factory=dict)
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def take(self, base: Side, others: Mapping[str, Side], over: Callable[[], bool] = lambda: False) -> None:
        """One more round, in the opposite order of the one before. over: then the rest of it is left out."""
        names = list(others) if len(self.told) % 2 == 0 else list(others)[::-1]
        own = [self._timed(BASE, base)]
        found: dict[str, Spent] = {}
        for number, name in enumerate(names, 1):
            if over():
                break
            turn = self._timed(name, others[name])
            self.note_reading(name, turn)
            self.turns.setdefault(name, []).append(turn)
            found[name] = Spent(turn.running_seconds, turn.items)
            found[without(DATA, name)] = Spent(turn.running_seconds - turn.booked(DATA), turn.items)
            if number % 2 == 0 or number == len(names):
                own.append(self._timed(BASE, base))
        found[BASE] = total(Spent(turn.running_seconds, turn.items) for turn in own)
        for account in BOOKED:
            spent = sum(turn.booked(account) for turn in own)
            found[without(account)] = Spent(found[BASE].seconds - spent, found[BASE].items)
        for turn in own:
            self.note_reading(BASE, turn)
        self.told.append(found)
        self.own += own

    def note_reading(self, name: str, turn: Turn) -> None:
        """What it read is known, in the steps ahead of the turn too; also of turns that are in no round."""
        if not self.reads_otherwise(name):
            seconds = turn.booked(DATA) + turn.ahead_data_seconds
            self.readings.append(Spent(seconds, turn.items + turn.ahead_items))

    def _timed(self, name: str, side: Side) -> Turn:
        began = time.monotonic()
        turn = side()
        self.took[name] = time.monotonic() - began
        return turn

    @property
    def others(self) -> list[str]:
        """All that had a turn besides the base."""
        return [name for name in self.took if name != BASE]

    def seconds_of_a_round(self, names: Iterable[str]) -> float:
        """As long as the last turns of these took, and of the base in between."""
        each = [self.took[name] for name in names]
        return sum(each) + self.took[BASE] * (1 + (len(each) + 1) // 2)

    def fitting(
        self,
        names: Sequence[str],
        seconds: float,
        compared: Mapping[str, str] = MappingProxyType({}),
        at_least_one: bool = True,
    ) -> list[str]:
        """Those whose next turns take no longer than so many seconds: what gained most so far comes first, and is
        asked in any case, because nothing is said by one turn. compared: what one cannot be asked without."""
        chosen: list[str] = []
        for name in sorted(names, key=lambda name: -self.ratio(name).value):
            wanted = [one for one in (name, compared.get(name, name)) if one in names]
            more = list(dict.fromkeys([*chosen, *wanted]))
            if (at_least_one and not chosen) or self.seconds_of_a_round(more) <= seconds:
                chosen = more
        return chosen

    def seconds(self, name: str = BASE) -> float:
        """Return the average seconds of an item in the turns of `name`."""
        return total(told[name] for told in self.told if name in told).each

    def ratio(self, name: str, to: str = BASE) -> Ratio:
        """How many times as fast it is as another, by the rounds that hold both."""
        return ratio_of_totals([(told[to], told[name]) for told in self.told if name in told and to in told])

    def ratio_unread(self, name: str) -> Ratio:
        """`ratio`, of what reads nothing, to the base with the mean reading of all that read the same: so few stalls
        say more. Their own interval is part of it."""
        whole = total(self.readings)
        both = [(told[without(DATA)], told[name]) for told in self.told if name in told]
        usual = [(Spent(own.seconds + own.items * whole.each, own.items), its) for own, its in both]
        left = half_interval([unexplained(one, whole) for one in self.readings]) if whole.seconds else 0.0
        share = whole.each / total(own for own, _ in usual).each
        return ratio_of_totals(usual, doubt=share * left)

    def apart(self, name: str, to: str = BASE) -> Ratio:
        """`ratio`, where the same is read, and while nobody trains: what is not reading is compared, and the mean
        reading of `to` added to both, so that a stall of the data says nothing. Of a reading that was shorter in
        every round the middle counts."""
        both = [
            told for told in self.told if name in told and to in told and told[name].items and told[to].items
        ]
        found = ratio_of_totals([(told[without(DATA, to)], told[without(DATA, name)]) for told in both])
        usual, its = ([told[one].each - told[without(DATA, one)].each for told in both] for one in (to, name))
        saved = median(usual) - median(its) if min(usual) > max(its) else 0.0
        around = total(told[without(DATA, to)] for told in both).each
        reading = total(told[to] for told in both).each - around
        value, low, high = (
            (around + reading) / max(around / value + reading - saved, LEAST) if value else 0.0
            for value in found[:3]
        )
        return Ratio(value, low, high, found.pairs)

    def compiling(self, total_steps: int | None) -> float:
        """Seconds a step of the whole run: torch compiles a function for a few shapes and then no more, so what was
        compiled up to here is paid once. Of a run without an end, what these rounds still compiled."""
        if total_steps is None:
            return sum(turn.seconds - turn.running_seconds for turn in self.own) / sum(
                turn.steps for turn in self.own
            )
        return self.own[-1].compile_seconds / total_steps

    def slowed(self, flushed: bool = False) -> Slowed:
        """From the first quarter of the base's turns to the last. Nothing, where it is not one account alone: then the
        machine did it."""
        few = max(1, len(self.own) // 4)
        first, last = a_step(self.own[:few]), a_step(self.own[-few:])
        grown = {name: last.get(name, 0.0) - first.get(name, 0.0) for name in first | last}
        account = max(grown, key=lambda name: grown[name], default="")
        if not account or not 0 < ALONE * sum(grown.values()) < grown[account]:
            return UNCHANGED
        usual = sum(turn.booked(one) for turn in self.own for one in BOOKED) / sum(
            one.steps for one in self.own
        )
        before = max(usual + sum(first.values()), LEAST)
        return Slowed(1 + sum(grown.values()) / before, account, flushed)

    def always_below(self, name: str, bound: float) -> bool:
        """Whether in each of its rounds it had less than that ratio to the base."""
        return all(
            own.seconds * its.items < bound * its.seconds * own.items
            for own, its in ((told[BASE], told[name]) for told in self.told if name in told)
        )


def without(account: int, name: str = BASE) -> str:
    """The name under which a round tells what it would take without that account."""
    return f"{name} without {ACCOUNTS[account]}"


def a_step(turns: Sequence[Turn]) -> dict[str, float]:
    """Seconds by account, but of what comes by chance."""
    rare, steps = {ACCOUNTS[one] for one in (*BOOKED, COMPILE)}, sum(turn.steps for turn in turns)
    names = {name for turn in turns for name in turn.accounts} - rare
    return {name: sum(turn.accounts.get(name, 0.0) for turn in turns) / steps for name in names}


def uncompiled(turn: Turn) -> Turn:
    return replace(turn, seconds=turn.running_seconds)
