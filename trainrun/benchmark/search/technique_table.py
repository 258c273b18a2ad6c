"""Well-known techniques on this machine, each alone against the user's own settings.

A technique that is on already is measured by taking it away. What helps together is what `Search` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainrun.benchmark.run_overrides import config_of, replaced
from trainrun.benchmark.search.candidates import FIRST_ROUNDS, Candidate
from trainrun.benchmark.search.options import TECHNIQUES, Technique, TriedSetting
from trainrun.benchmark.search.search import NO_TIME, SMALLEST, Search
from trainrun.errors import ConfigError
from trainrun.timing.paired import Ratio, Rules, compare

AT_ONCE: Final = 4  # runs besides the base: as many share its turns, and lie in memory
MOST_ROUNDS: Final = 9


@dataclass(frozen=True)
class Row:
    """A technique. alone: over the user's settings; on: it is in them already, and was taken away to be measured."""

    title: str
    overrides: tuple[str, ...]
    gate: str
    alone: Ratio | None = None
    on: bool = False
    reason: str = ""
    peak_bytes: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class TechniqueTable:
    """noise, speed, unit: of the user's own settings, as in `Results`."""

    rows: tuple[Row, ...]
    unit: str
    speed: float
    noise: Ratio
    seconds: float


def measure_table(search: Search, techniques: Sequence[Technique] = TECHNIQUES) -> TechniqueTable:
    """search: a new one, with `gate=SHOWN`. Raises what a run of its settings would raise."""
    search.measure_base()
    rows = [planned(technique, search) for technique in techniques]
    waiting = [row for row in rows if not row.reason]
    found = {row.title: row for row in rows}
    while waiting:
        group, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        left = search.budget.left()
        needed = 1.5 * len(group) * search.starter.start_seconds + search.starter.rounds_seconds(len(group))
        seconds = max(needed, left * len(group) / (len(group) + len(waiting)))
        found |= {row.title: row for row in measured_alone(search, group, min(left, seconds))}
    search.base.close()
    unit = search.facts.info.unit
    return TechniqueTable(tuple(found.values()), unit, search.speed, search.noise, search.budget.spent)


def planned(technique: Technique, search: Search) -> Row:
    """Return what is to be run for a technique, or why nothing is."""
    row = Row(technique.title, (), technique.gate, reason=technique.skip(search.facts))
    if row.reason:
        return row
    on = technique.on(search.facts)
    try:
        if on and config_of(replaced(search.overrides, on)) != search.facts.config:
            return replace(row, overrides=on)
    except ConfigError as error:
        return replace(row, overrides=on, reason=error.faults[0])
    return replace(row, overrides=technique.off, on=True, reason="" if technique.off else "on already")


def measured_alone(search: Search, group: Sequence[Row], seconds: float) -> list[Row]:
    clock = search.budget.clock
    ends, running, found = clock() + seconds, dict[str, Candidate](), {}
    for row in group:
        setting = TriedSetting(row.overrides, row.gate)
        candidate, trial = search.start_setting(row.title, setting, ends, len(running))
        found[row.title] = replace(row, reason=trial.reason, loss=trial.loss)
        if candidate is not None:
            running[row.title] = candidate
    turns = {title: candidate.item_seconds for title, candidate in running.items()}
    rules = Rules(SMALLEST, ends, FIRST_ROUNDS, most_pairs=MOST_ROUNDS)
    seen = compare(search.base.item_seconds, turns, rules, clock)
    for title, candidate in running.items():
        candidate.close()
        if candidate.error or not seen.pairs[title]:
            found[title] = replace(found[title], reason=candidate.error or NO_TIME)
        else:
            ratio = inverse(seen.ratio(title)) if found[title].on else seen.ratio(title)
            found[title] = replace(found[title], alone=ratio, peak_bytes=candidate.peak_bytes)
    return list(found.values())


def inverse(ratio: Ratio) -> Ratio:
    return Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.pairs)
