"""Report a race: the table on the screen, `race.csv`, and the page `race.html`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainrun.comparison.paired import Ratio
from trainrun.folder.run_folder import write_text
from trainrun.output import format_table, say
from trainrun.plots import page
from trainrun.plots.chart import Chart, Curve, charts_html
from trainrun.race.racers import Racer, Variation
from trainrun.race.standings import Equivalence, RaceResults, RaceRun, Standing
from trainrun.race.turns import Race
from trainrun.runtime.machine import describe_machine
from trainrun.sweep.points import format_mean
from trainrun.sweep.table import format_csv

Table = tuple[list[str], list[list[str]]]
LONGEST_LABEL = 40
CSV, PAGE = "race.csv", "race.html"
COLUMNS = (
    "racer",
    "seed",
    "arrived",
    "start_seconds",
    "training_seconds",
    "end",
    "end_seconds",
    "peak_bytes",
    "error",
)


def race_table(race: Race, results: RaceResults) -> Table:
    """Return the head and the rows of the table: each racer of the command line beside the first."""
    metric = race.goal.metric
    times = ["seconds", "times as fast", "without start", "times as fast"]
    head = ["racer", "arrived", *times, f"end {metric}", "end", "memory"]
    first = race.racers[0].name
    rows = []
    for racer in race.racers:
        if len(racer.name) == 1 and results.runs[racer.name]:
            rows.append([format_label(racer), *standing_cells(results.standing(racer.name, first))])
    return head, rows


def format_label(racer: Racer) -> str:
    """Return the letter of a racer with its settings. Long ones are left out; the first line of the race has them."""
    return racer.name if len(racer.about) > LONGEST_LABEL else f"{racer.name} {racer.about}"


def standing_cells(standing: Standing) -> list[str]:
    arrived = f"{len(standing.runs) - standing.late} of {len(standing.runs)}"
    ratios = [ratio_text(ratio, standing.bound) for ratio in (standing.ratio, standing.training_ratio)]
    over = "over " if standing.late else ""  # a run that did not arrive counts with its limit
    seconds = [over + seconds_text(value) for value in (standing.seconds, standing.training_seconds)]
    return [
        arrived, seconds[0], ratios[0], seconds[1], ratios[1],
        format_mean(standing.ends) or "-", equivalence_text(standing.equivalence), memory_text(standing.peak_bytes),
    ]  # fmt: skip


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g}" if math.isfinite(seconds) else "-"


def ratio_text(ratio: Ratio | None, bound: str) -> str:
    """Return `2.02x (1.90 to 2.14)`, or `at most 2.02x (...)` if some runs did not arrive."""
    return "" if ratio is None else f"{bound} {ratio}".strip()


def equivalence_text(equivalence: Equivalence | None) -> str:
    """Return `equal within 0.009`, or the verdict with the interval of the difference."""
    if equivalence is None:
        return ""
    if equivalence.verdict == "equal":
        return f"equal within {equivalence.margin:.2g}"
    return f"{equivalence.verdict} ({equivalence.low:+.2g} to {equivalence.high:+.2g})"


def memory_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes else ""


def variation_table(results: RaceResults, first: str, second: str, changes: Sequence[Variation]) -> Table:
    """Return the head and the rows of --table. Each difference is added to A and removed from B."""
    head = ["difference", "alone", "end", "memory", "in B", "end", "memory without"]
    rows = []
    for change in changes:
        cells = []
        for name, beside, is_alone in ((change.alone, first, True), (change.left_out, second, False)):
            if name is None or not results.runs.get(name.name) or not results.runs.get(beside):
                cells += ["refused" if name is None else "not run", "", ""]
                continue
            pair = (name.name, beside) if is_alone else (beside, name.name)
            standing = results.standing(*pair)
            memory = memory_text(results.standing(name.name, name.name).peak_bytes)
            cells += [
                ratio_text(standing.ratio, standing.bound),
                equivalence_text(standing.equivalence),
                memory,
            ]
        rows.append([change.about, *cells])
    return head, rows


def build_notes(race: Race, results: RaceResults) -> list[str]:
    """Return lines that explain the numbers of the table."""
    every = "" if race.every is None else f" every {race.every:,} samples"
    lines = [
        f"to {race.goal}, judged on all of {race.goal.metric.rpartition('/')[0]}{every}; the clock stops meanwhile",
        "seconds are geometric means from the start of the process, or from the first step; intervals of 95 %",
    ]
    runs = [run for several in results.runs.values() for run in several]
    if all(run.arrived is None for run in runs):
        lines.append("no run arrived, so there are no times to compare")
    elif any(map(results.is_late, runs)):
        first = results.runs[race.racers[0].name]
        a_arrived = any(run.arrived is not None for run in first)
        timed = "A" if a_arrived else "the others, as no run of A arrived"
        lines.append(
            f"a run that did not arrive counts with at most {results.limits[True]:.3g} s, three times the median of "
            f"{timed}; its ratio is a bound"
        )
    return lines


def print_report(race: Race, changes: Sequence[Variation]) -> None:
    results = race.results()
    say(format_table(*race_table(race, results)))
    if changes:
        say(format_table(*variation_table(results, race.racers[0].name, race.racers[1].name, changes)))
    for line in build_notes(race, results):
        say(line)


def write_report(race: Race, changes: Sequence[Variation]) -> None:
    """Write `race.csv` and `race.html`."""
    results = race.results()
    rows: list[list[Any]] = [list(COLUMNS)]
    for racer in race.racers:
        for run in results.runs[racer.name]:
            rows.append([racer.name, run.seed, not results.is_late(run), run.start, run.arrived, run.end, run.seconds,
                         run.peak_bytes, run.error])  # fmt: skip
    write_text(race.folder / CSV, format_csv(rows))
    title = f"Race to {race.goal}"
    settings = [(racer.name, racer.about) for racer in race.racers if len(racer.name) == 1]
    parts = [
        page.heading(title, level=1),
        page.html_table(*race_table(race, results)),
        page.names_and_values_table("Racers", settings),
    ]
    if changes:
        names = race.racers[0].name, race.racers[1].name
        parts += [page.heading("Differences"), page.html_table(*variation_table(results, *names, changes))]
    parts += [page.paragraph(line) for line in [*build_notes(race, results), describe_machine()]]
    parts.append(charts_html([curves_chart(race, results)]))
    write_text(race.folder / PAGE, page.html_page(title, parts))


def curves_chart(race: Race, results: RaceResults) -> Chart:
    """Return the metric of each run of the command line's racers over time and samples."""
    curves = [build_run_curve(f"{racer.name}, seed {run.seed}", run)
              for racer in race.racers if len(racer.name) == 1
              for run in results.runs[racer.name] if run.curve]  # fmt: skip
    return Chart(race.goal.metric, curves)


def build_run_curve(name: str, run: RaceRun) -> Curve:
    samples, seconds, values = np.asarray(run.curve, dtype=np.float64).T
    return Curve(name, {"time": seconds + run.start, "samples": samples}, values)


def race_facts(race: Race, changes: Sequence[Variation]) -> dict[str, Any]:
    """Return the results of a race as JSON values."""
    results = race.results()
    first = race.racers[0].name
    racers = []
    for racer in race.racers:
        if results.runs[racer.name]:
            standing = results.standing(racer.name, first)
            racers.append({"name": racer.name, "about": racer.about, **standing_facts(standing)})
    return {
        "folder": str(race.folder), "metric": race.goal.metric, "mode": race.goal.mode, "target": race.goal.value,
        "every": race.every, "limit_seconds": results.limits[True], "racers": racers,
        "differences": [change.about for change in changes],
    }  # fmt: skip


def standing_facts(standing: Standing) -> dict[str, Any]:
    def build_ratio_facts(ratio: Ratio | None) -> dict[str, float] | None:
        return None if ratio is None else {"value": ratio.value, "low": ratio.low, "high": ratio.high}

    equal = standing.equivalence
    return {
        "arrived": len(standing.runs) - standing.late, "runs": len(standing.runs), "seconds": standing.seconds,
        "training_seconds": standing.training_seconds, "ratio": build_ratio_facts(standing.ratio),
        "training_ratio": build_ratio_facts(standing.training_ratio), "bound": standing.bound, "ends": standing.ends,
        "peak_bytes": standing.peak_bytes,
        "equivalence": equal and {"verdict": equal.verdict, "low": equal.low, "high": equal.high,
                                  "margin": equal.margin},
    }  # fmt: skip
