"""The result of a search or of a table of techniques, as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from typing import Any, Final

from trainrun.benchmark.tune.techniques import Row, TechniqueTable, is_skipped_for_time
from trainrun.benchmark.tune.tuner import NO_TIME, Trial, Tuning
from trainrun.output import format_quantity, format_table
from trainrun.timing.paired import PROCESS_SPREAD, Ratio

TABLE_HEAD: Final = ("technique", "alone", "its turns", "helps?", "memory", "training", "settings")
LONGEST_REASON: Final = 20


def to_json_values(value: Any) -> Any:
    """Return dataclasses and named tuples as dictionaries, for JSON."""
    if isinstance(value, Ratio):
        bounds = (value.low, value.high) if value.has_interval else (None, None)
        names = ("value", "low", "high", "pairs", "each")
        return dict(zip(names, (value.value, *bounds, value.pairs, list(value.each)), strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: to_json_values(item) for name, item in value._asdict().items()}
    return [to_json_values(item) for item in value] if isinstance(value, list | tuple) else value


def tuning_lines(tuning: Tuning) -> list[str]:
    """Return the lines of a report: the diagnoses, the trials in order, the gains that need the user's decision, and
    the claim.
    """
    lines = [f"your settings: {format_quantity(tuning.speed)} {tuning.unit}/s; {tuning.diagnoses[0]}"]
    for (cause, promised), trials in groupby(tuning.trials, lambda trial: (trial.cause, trial.promised)):
        without = "" if promised is None else f" (without it {promised:.2f}x)"
        lines += [f"{cause}{without}:", *map(trial_line, trials)]
    if len(tuning.diagnoses) > 1:
        lines.append(f"with what is used: {tuning.diagnoses[-1]}")
    offered = [trial for trial in tuning.trials if trial.is_faster and trial.reason.startswith("--allow")]
    lines += [
        f"your decision: {trial.remedy} is {speed_text(trial)} as fast and {trial.remedy.effect_text} "
        f"(add it, or {trial.reason})"
        for trial in offered
    ]
    return [*lines, f"result: {tuning.verdict}"]


def trial_line(trial: Trial) -> str:
    """Return `  data.cache=memory    21.08x  13.92 to 31.19 in 6 turns  used`."""
    turns = "" if trial.ratio is None else trial.ratio.turns()
    used = "used" if trial.is_used else f"not used: {trial.reason}"
    return f"  {trial.remedy!s:<44} {speed_text(trial):>7}  {turns:<26}  {used}"


def table_lines(table: TechniqueTable) -> list[str]:
    lines = [f"your settings: {format_quantity(table.speed)} {table.unit}/s"]
    lines.append(format_table(TABLE_HEAD, [technique_row(row) for row in table.rows]))
    reasons = {row.trial.cause: row.trial.reason for row in table.rows}
    lines += [f"{title}: {reason}" for title, reason in reasons.items() if len(reason) > LONGEST_REASON]
    late = sum(map(is_skipped_for_time, table.rows))
    rest = f"; for {late} there was no time (--budget)" if late else ""
    settings = " ".join(table.found)
    if not settings:
        return [*lines, f"together: nothing that leaves the training the same helps clearly{rest}"]
    if table.claim is None:
        return [*lines, f"together: not measured ({table.problem}): {settings}{rest}"]
    pairs = f"99 %, {table.claim.pairs} pairs of fresh processes"
    return [*lines, f"together: {table.claim} ({pairs}): {settings}{rest}"]


def technique_row(row: Row) -> list[str]:
    trial, alone = row.trial, row.speedup_alone
    note = "is on; without it: " if row.is_on and trial.remedy.overrides else ""
    settings = f"{note}{trial.remedy}"
    effect = trial.remedy.effect_text
    if alone is None:
        reason = (
            trial.reason if len(trial.reason) <= LONGEST_REASON or trial.reason == NO_TIME else "see below"
        )
        return [trial.cause, "-", "", reason, "", effect, settings]
    helps = "not clear"  # within what two processes of the same settings may differ by
    if alone.low > 1 + PROCESS_SPREAD:
        helps = "yes"
    elif alone.high < 1 - PROCESS_SPREAD:
        helps = "NO, slower"
    memory = f"{trial.peak_bytes / 1e6:,.0f} MB" if trial.peak_bytes else ""
    return [trial.cause, f"{alone.value:.2f}x", alone.turns(), helps, memory, effect, settings]


def speed_text(trial: Trial) -> str:
    return "" if trial.ratio is None else f"{trial.ratio.value:.2f}x"
