"""What a search or a table of techniques found, for people and for programs: text and JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from trainrun.benchmark.search.acceptance import EXACT, NUMERIC
from trainrun.benchmark.search.candidates import KEPT, NEEDLESS, REJECTED, UNCONFIRMED, UNTRIED, Trial
from trainrun.benchmark.search.options import OTHER
from trainrun.benchmark.search.search import Results
from trainrun.benchmark.search.technique_table import Row, TechniqueTable
from trainrun.output import quantity
from trainrun.plots.compare import text_table
from trainrun.timing.paired import PROCESS_SPREAD, Ratio

SEARCH_HEAD: Final = ("speed", "x before", "its turns", "x yours", "memory", "loss off", "kept", "setting")
TABLE_HEAD: Final = (
    "technique", "alone", "its turns", "helps?", "on top", "memory", "loss off", "training", "settings",
)  # fmt: skip
LONGEST_REASON: Final = 20
CHANGES: Final = {EXACT: "the same", NUMERIC: "rounds more", OTHER: "another"}


def as_plain(value: Any) -> Any:
    """Return dataclasses and named tuples as dictionaries, for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Ratio):
        bounds = (value.low, value.high) if value.has_interval else (None, None)
        low, high = bounds
        return {
            "value": value.value,
            "low": low,
            "high": high,
            "pairs": value.pairs,
            "each": list(value.each),
        }
    if hasattr(value, "_asdict"):
        return {name: as_plain(one) for name, one in value._asdict().items()}
    return [as_plain(one) for one in value] if isinstance(value, list | tuple) else value


def search_lines(results: Results, explain: bool) -> list[str]:
    """All that was measured, in its order, and how the best of it went on. explain: why a setting was not taken."""
    noise = results.noise
    rows = [[f"{quantity(results.speed)} {results.unit}/s", "", "", "1.00x", "", "", "", "your own settings"]]
    gain = 1.0
    for trial in results.trials:
        if (ratio := trial.ratio) is not None:
            held = gain * ratio.value
            state = f"yes ({trial.gate})" if trial.state == KEPT else f"no ({trial.state})"
            rows.append([
                f"{quantity(results.speed * held)} {results.unit}/s", f"{ratio.value:.2f}x", ratio.turns(),
                f"{held:.2f}x", *memory_and_loss(trial), state, f"+ {trial.title}",
            ])  # fmt: skip
            gain = held if trial.state == KEPT else gain
    lines = [
        f"noise: two processes of your settings differ by {100 * abs(noise.value - 1):.1f} % ({noise.turns()})",
        text_table(SEARCH_HEAD, rows),
        *[f"note: {note}" for note in results.notes],
    ]
    left = [trial for trial in results.trials if trial.state != KEPT]
    if explain:
        lines += list(dict.fromkeys(f"{trial.option}: {trial.title}: {why(trial)}" for trial in left))
    else:
        for state in (REJECTED, UNCONFIRMED, UNTRIED, NEEDLESS):
            names = list(dict.fromkeys(trial.option for trial in left if trial.state == state))
            lines += [f"{state}: {', '.join(names)} (why: --explain)"] if names else []
    return [*lines, f"result: {results.verdict}"]


def why(trial: Trial) -> str:
    ratio = f" {trial.ratio.value:.2f}x ({trial.ratio.turns()})" if trial.ratio is not None else ""
    return f"{trial.state}{ratio}" + (f", {trial.reason}" if trial.reason else "")


def table_lines(table: TechniqueTable) -> list[str]:
    results = table.results
    lines = [text_table(TABLE_HEAD, [table_row(row) for row in table.rows])]
    lines += [f"{row.title}: {row.reason}" for row in table.rows if len(row.reason) > LONGEST_REASON]
    lines.append(
        f"noise: two processes of your settings differ by {100 * abs(results.noise.value - 1):.1f} % "
        f"({results.noise.turns()}), at {quantity(results.speed)} {results.unit}/s"
    )
    settings = " ".join(one for part in results.parts for one in part.overrides)
    if not settings:
        untried = sum(row.alone is None and row.reason.startswith("no time") for row in table.rows)
        short_of_time = f"; for {untried} there was no time (--budget)" if untried else ""
        return [*lines, f"total: nothing that leaves the training the same helped clearly{short_of_time}"]
    if results.claim is None:
        return [*lines, f"total: not measured, {results.verdict}; what helped: {settings}"]
    total = f"{results.claim} (99 %, {results.claim.pairs} pairs of fresh processes)"
    return [*lines, f"total of all that leaves the training the same and helped: {total}: {settings}"]


def table_row(row: Row) -> list[str]:
    settings = " ".join(row.overrides)
    if row.alone is None:
        reason = row.reason if len(row.reason) <= LONGEST_REASON else "see below"
        return [row.title, "-", "", reason, "", "", "", CHANGES[row.gate], settings]
    helps = "not clear"  # within what two processes of the same settings may differ by
    if row.alone.low > 1 + PROCESS_SPREAD:
        helps = "yes"
    elif row.alone.high < 1 - PROCESS_SPREAD:
        helps = "NO, slower"
    together = "" if row.together is None else f"{row.together.value:.2f}x{'' if row.kept else ' (left out)'}"
    on = "is on; without it: " if row.on else ""
    return [row.title, f"{row.alone.value:.2f}x", row.alone.turns(), helps, together, *memory_and_loss(row),
            CHANGES[row.gate], f"{on}{settings}"]  # fmt: skip


def memory_and_loss(found: Trial | Row) -> list[str]:
    loss = "" if found.loss is None else f"{found.loss:.0e}" if found.loss else "0"
    return [f"{found.peak_bytes / 1e6:,.0f} MB" if found.peak_bytes else "", loss]
