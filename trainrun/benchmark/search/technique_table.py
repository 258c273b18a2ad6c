"""Well-known techniques on this machine: each alone against the user's own settings, and all that helped together.

A technique that is on already is measured by taking it away. Those that help and leave the training the same then go
through the usual search, one on top of the other, which also measures them all together in fresh processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainrun.benchmark.run_overrides import config_of, replaced
from trainrun.benchmark.search.candidates import FIRST_ROUNDS, Candidate, Trial
from trainrun.benchmark.search.options import OTHER, TECHNIQUES, SearchOption, Technique, TriedSetting
from trainrun.benchmark.search.search import NO_TIME, SMALLEST, Results, Search
from trainrun.errors import ConfigError
from trainrun.timing.paired import Ratio, Rules, compare

ALONE_UNTIL: Final = 0.5  # of the budget
AT_ONCE: Final = 4  # runs besides the base: as many share its turns, and lie in memory
MOST_ROUNDS: Final = 9


@dataclass(frozen=True)
class Row:
    """A technique. alone: over the user's settings; on: it is in them already, and was taken away to be measured.
    together: over all before it that helped; kept: it is among those that were measured together."""

    title: str
    overrides: tuple[str, ...]
    gate: str
    alone: Ratio | None = None
    together: Ratio | None = None
    on: bool = False
    kept: bool = False
    reason: str = ""
    peak_bytes: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class TechniqueTable:
    rows: tuple[Row, ...]
    results: Results


def measure_table(search: Search, techniques: Sequence[Technique] = TECHNIQUES) -> TechniqueTable:
    """search: a new one, with `gate=SHOWN`. Raises what a run of its settings would raise."""
    search.measure_base()
    rows = [planned(technique, search) for technique in techniques]
    waiting = [row for row in rows if not row.reason]
    found = {row.title: row for row in rows}
    while waiting:
        group, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        left = search.budget.left(ALONE_UNTIL)
        needed = 1.5 * len(group) * search.starter.start_seconds + search.starter.rounds_seconds(len(group))
        seconds = max(needed, left * len(group) / (len(group) + len(waiting)))
        found |= {row.title: row for row in measured_alone(search, group, min(left, seconds))}
    helps = [row for row in found.values() if not row.on and row.gate != OTHER and may_help(row.alone)]
    results = search.search([option_of(row) for row in helps])
    together = {trial.option: trial for trial in results.trials}
    kept = {part.option for part in results.parts}
    return TechniqueTable(
        tuple(with_search(row, together.get(row.title), row.title in kept) for row in found.values()), results
    )


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
            ratio = seen.ratio(title).inverse() if found[title].on else seen.ratio(title)
            found[title] = replace(found[title], alone=ratio, peak_bytes=candidate.peak_bytes)
    return list(found.values())


def may_help(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.value > 1 + SMALLEST and ratio.high > 1


def option_of(row: Row) -> SearchOption:
    return SearchOption(row.title, lambda facts: [TriedSetting(row.overrides, row.gate)])


def with_search(row: Row, trial: Trial | None, kept: bool) -> Row:
    return (
        row if trial is None else replace(row, together=trial.ratio, kept=kept, loss=trial.loss or row.loss)
    )
