"""Compare several runs: their curves in one chart per metric, and tables of results and differences."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainrun.checkpoint.load import read_manifest
from trainrun.errors import CheckpointError, ConfigError
from trainrun.folder.run_folder import RunDir, read_identity, write_text
from trainrun.output import (
    find_throughput,
    format_duration,
    format_number,
    format_quantity,
    format_table,
    table_width,
)
from trainrun.plots import page
from trainrun.plots.chart import UNITS, Chart, Curve, build_curve, charts_html
from trainrun.plots.history import History, flatten_dict, read_config, read_environment, read_history
from trainrun.plots.report import format_setting
from trainrun.plots.series import collect_curves, column_names

MOST_WIDE = 160  # characters of a line of the table in a file or a pipe
PACKAGES = "packages that others have not"
UNEQUAL_ALWAYS = ("run_name",)  # differs without saying anything about the training


@dataclass(frozen=True)
class RunComparison:
    """The result of a comparison of runs.

    file: the HTML page. table: results and settings as text. further: other differences as text.
    columns: the cells of the table, by run and by column.
    """

    file: Path
    table: str
    further: str
    columns: dict[str, dict[str, str]]


def compare_runs(runs: list[RunDir], out: Path) -> RunComparison:
    """Compare the runs and write `compare.html` into the folder `out`."""
    histories = dict(zip(relative_run_names(runs), (read_history(run) for run in runs), strict=True))
    head, rows = comparison_table(histories)
    title = f"{len(runs)} runs side by side"
    same = describe_loss_difference(histories)
    charts = charts_html(comparison_charts(histories))
    parts = [page.heading(title, level=1), page.html_table(head, rows), page.paragraph(same), charts]
    texts, width = [same], table_width(MOST_WIDE)
    for name, facts in {"environment": environment_facts, "data": data_facts}.items():
        differences = difference_table(
            {run: flatten_dict(facts(history)) for run, history in histories.items()}
        )
        parts += (
            [page.heading(f"{name}: what differs"), page.html_table(*differences)] if differences[1] else []
        )
        texts.append(
            f"{name}:\n{format_table(*differences, width)}" if differences[1] else f"{name}: nothing differs"
        )
    file = out / "compare.html"
    out.mkdir(parents=True, exist_ok=True)
    write_text(file, page.html_page(title, parts))
    table = format_table(head, rows, width)
    columns = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    return RunComparison(file, table, "\n\n".join(filter(None, texts)), columns)


def environment_facts(history: History) -> dict[str, Any]:
    """Return the versions, the machine, the device and the state of the code of a run."""
    environment, run = read_environment(history.run), history.run
    environment = {
        name: value for name, value in environment.items() if name not in ("command", "folder", "working_dir")
    }
    with suppress(OSError):
        environment["changes.diff"] = hashlib.sha256(run.changes.read_bytes()).hexdigest()[:8]
    return environment | {name: history.facts.get(name) for name in ("device", "world_size")}


def data_facts(history: History) -> dict[str, Any]:
    """Return the sizes and shapes of the data of a run, and a fingerprint of its files."""
    identity_facts = {name: history.facts.get(name) for name in ("num_train", "num_val")}
    with suppress(ConfigError):
        identity_facts |= read_identity(history.run).get("data", {})
    with suppress(OSError, ValueError, CheckpointError):
        newest = max(history.run.checkpoints.glob("step-*"), default=None)
        fingerprint = read_manifest(newest).fingerprint if newest else {}
        identity_facts |= {
            name: fingerprint[name] for name in fingerprint if name.endswith("data.train.path")
        }
    return identity_facts


def difference_table(facts: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return a table of the facts that differ: one row per fact, one column per run."""
    keys = differing_keys(list(facts.values()))
    few = [
        key
        for key in keys
        if not key.startswith("packages.") or all(key in run_facts for run_facts in facts.values())
    ]
    if others := set(keys) - set(few):
        facts = {
            run: {**run_facts, PACKAGES: len(others & run_facts.keys())} for run, run_facts in facts.items()
        }
        few.append(PACKAGES)
    return ["", *facts], [
        [key, *(format_setting(values[key]) if key in values else "-" for values in facts.values())]
        for key in few
    ]


def describe_loss_difference(histories: dict[str, History]) -> str:
    """Return one line that names the first step at which the training losses of the runs differ in any bit."""
    losses = []
    for history in histories.values():
        rows = history.find_rows("train")
        begins = [0, *(row["step"] for row in rows)]  # a loss is the mean since the row before
        loss_of: dict[tuple[int, int, str], Any] = {
            (row["step"], start, "train/loss"): row.get("train/loss")
            for start, row in zip(begins, rows, strict=False)
        }
        for row in history.find_rows("eval"):
            loss_of |= {(row["step"], -1, name): row[name] for name in row if name.endswith("/loss")}
        losses.append(loss_of)
    both = sorted(set.intersection(*map(set, losses)))
    if not both:
        return ""
    other = [steps for steps in both if len({run_losses[steps] for run_losses in losses}) > 1]
    if not other:
        return f"losses are equal, bit for bit, at all {len({step for step, *_ in both})} common log points"
    return f"losses differ from step {other[0][0]:,} on"


def relative_run_names(runs: Sequence[RunDir]) -> list[str]:
    """Return the run folders relative to their common parent."""
    roots = [run.root.absolute() for run in runs]
    common = Path(os.path.commonpath([root.parent for root in roots]))
    return [root.relative_to(common).as_posix() for root in roots]


def comparison_table(histories: dict[str, History]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table with best value, time, speed and the differing settings of each run."""
    configs = [flatten_dict(read_config(history.run)) for history in histories.values()]
    keys = differing_keys(configs)
    results = column_names(map(final_metrics, histories.values()))
    head = ["run", "best", *keys, "step", "time", "speed", *results]  # what differs is what one looks for
    rows = []
    best_of_all = best_history(list(histories.values()))
    for (name, history), config in zip(histories.items(), configs, strict=True):
        best, summary = history.best, history.summary
        mark = " (best)" if history is best_of_all else ""
        seconds, speed = summary.get("seconds"), find_throughput(summary)
        rows.append([
            name,
            f"{best.metric} {format_number(best.value)}{mark}" if best else "-",
            *(format_setting(config[key]) if key in config else "-" for key in keys),
            f"{best.step:,}" if best else "-",
            format_duration(seconds) if seconds is not None else "-",
            f"{format_quantity(speed[0])} {speed[1]}" if speed is not None else "-",
            *(format_number(final_metrics(history)[key]) if key in final_metrics(history) else "-" for key in results),
        ])  # fmt: skip
    return head, rows


def best_history(histories: Sequence[History]) -> History | None:
    """Return the run with the best value; None if runs have different metrics or all values are equal."""
    judged = [(history.best, history) for history in histories]
    with_best = [(best, history) for best, history in judged if best is not None]
    if len({best.metric for best, _ in with_best}) != 1 or len({best.value for best, _ in with_best}) == 1:
        return None
    sign = -1 if any(history.summary.get("mode") == "max" for _, history in with_best) else 1
    return min(with_best, key=lambda pair: sign * pair[0].value)[1]


def final_metrics(history: History) -> dict[str, float]:
    """Return the final validation and test metrics of a run."""
    metrics = dict(history.summary.get("metrics") or {}) | (history.find_rows("test") or [{}])[-1]
    return {name: value for name, value in metrics.items() if "/" in name and not name.endswith("/seconds")}


def differing_keys(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings whose values differ between the configs, in the order in which they appear."""
    configs = [config for config in configs if config]
    keys = [key for key in column_names(configs) if key not in UNEQUAL_ALWAYS]
    return [
        key for key in keys if any(config.get(key, ...) != configs[0].get(key, ...) for config in configs)
    ]


def comparison_charts(histories: dict[str, History]) -> list[Chart]:
    """Return a chart for each training and validation metric, with a curve for each run."""
    curves_of: dict[str, list[Curve]] = {}
    for run, history in histories.items():
        for name, points in collect_curves(history.in_order).items():
            curves_of.setdefault(name, []).append(build_curve(run, points))
    order = sorted(curves_of, key=lambda name: (not name.endswith("/loss"), "/" not in name))
    return [Chart(name, curves_of[name], UNITS.get(name, "")) for name in order]
