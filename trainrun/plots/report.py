"""`report.html`: a run on one page that needs no other file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainrun.folder.run_folder import RunDir, read_overrides, write_text
from trainrun.monitor.run_lines import (
    devices_line,
    find_python_objects,
    format_call,
    settings_without_objects,
)
from trainrun.output import SPEEDS, format_duration, format_number, format_quantity
from trainrun.plots import page
from trainrun.plots.chart import charts_html
from trainrun.plots.history import History, flatten_dict, read_environment, read_history
from trainrun.plots.prediction_pictures import (
    confusion_html,
    regression_html,
    sample_predictions_html,
    task_pictures_html,
)
from trainrun.plots.run_curves import metric_charts, run_charts
from trainrun.plots.series import collect_curves, column_names
from trainrun.plots.time_stack import phase_shares_html

MOST_NOTES = 200
MOST_EVALUATIONS = 50
NO_METRICS = ("kind", "step", "epoch", "time")
SHOWN_PACKAGES = ("trainrun", "torch", "numpy")
MOST_SAMPLES = 40  # of text


def draw_report(run: RunDir) -> Path:
    """Write the facts, the curves and the predictions of the run to `report.html`. Return its path.

    Raise DataError if the metrics file is damaged, and OSError if there is no metrics file.
    """
    history = read_history(run)
    name = str(history.facts.get("name") or run.root.name)
    notes = [f"step {row.get('step', 0):,}: {row.get('text', '')}" for row in history.find_rows("note")]
    dropped = (
        [f"{len(notes) - MOST_NOTES:,} earlier notes are in {run.metrics.name}"]
        if len(notes) > MOST_NOTES
        else []
    )
    environment = read_environment(run)
    installed = environment.pop("packages", {})
    if isinstance(environment.get("command"), list):
        environment["command"] = shlex.join(map(str, environment["command"]))
    environment |= {
        f"packages.{package}": installed[package] for package in SHOWN_PACKAGES if package in installed
    }
    packages = "\n".join(f"{package}=={version}" for package, version in installed.items())
    changed = typed_settings(run)
    charts = run_charts(history)
    parts = [
        page.heading(name, level=1),
        page.paragraph(str(run.root)),
        state_banner(history),
        page.columns_html(
            [
                page.names_and_values_table("Result", result_rows(history)),
                page.names_and_values_table("Set-up", setup_rows(history.facts)),
            ]
        ),
        page.preformatted_text("Settings that differ from the defaults", "\n".join(changed)),
        page.preformatted_text("Command", format_repeat_command(run, changed)),
        page.text_samples_table(history.find_rows("sample")[-MOST_SAMPLES:]),
        page.section_html(
            "Curves", charts_html(charts["loss"] + charts["metrics"] + charts["lr"] + charts["throughput"])
        ),
        evaluation_table(history),
        *class_tables(history),
        confusion_html(history),
        sample_predictions_html(run),
        regression_html(history),
        task_pictures_html(run),
        page.section_html("Latent code", charts_html(charts["latents"])),
        phase_shares_html(history),
        page.section_html("Memory and load", charts_html(charts["memory"])),
        *layer_table(history),
        page.bullet_list(
            "Chosen by the runner",
            [str(choice) for name in ("advice", "choices") for choice in history.facts.get(name, [])],
        ),
        page.bullet_list("Notes", dropped + notes[-MOST_NOTES:]),
        page.names_and_values_table(
            "Environment",
            [(key, format_setting(value)) for key, value in flatten_dict(environment).items() if key],
        ),
        page.collapsible_text("all packages", packages),
        page.heading("Config"),
        page.collapsible_text("config.yaml", _read_text(run.config)),
    ]
    write_text(run.report, page.html_page(name, parts))
    return run.report


def curves_page(run: RunDir) -> str:
    """Return a page with the curves of a run."""
    history = read_history(run)
    return page.html_page(run.root.name, [charts_html(metric_charts(collect_curves(history.in_order)))])


def overview_page(run: RunDir) -> str:
    """Return a page with state, best result, curves and evaluations of a run."""
    history = read_history(run)
    parts = [
        state_banner(history),
        page.names_and_values_table("Result", result_rows(history)[:1]),
        charts_html(metric_charts(collect_curves(history.in_order))),
        evaluation_table(history),
    ]
    return page.html_page(run.root.name, parts)


def layer_table(history: History) -> list[str]:
    """Return the table of layers if the run wrote one (`monitor.summary`)."""
    if not (layer_rows := history.find_rows("layers")):
        return []
    rows = (
        [str(layer["layer"]), layer["class"], layer["output"], format_number(layer["parameters"])]
        for layer in layer_rows[-1]["layers"]
    )
    return [page.heading("Layers") + page.html_table(["layer", "class", "output", "parameters"], rows)]


def state_banner(history: History) -> str:
    """Return a banner with the state of the run and its final message."""
    state, message = history.state
    return page.banner(state, message, bad=state == "failed")


def typed_settings(run: RunDir) -> list[str]:
    """Return the typed settings, without the folder and without Python objects."""
    words = settings_without_objects(read_overrides(run))
    return [word for word in words if word and not word.startswith(("output_dir=", "#"))]


def format_repeat_command(run: RunDir, changed: Sequence[str]) -> str:
    """Return the command that repeats the training in a new folder; "" if no command started the run.

    A pruned or quantized run was made from another run. Its file of settings says so after a `#`.
    """
    words = read_overrides(run)
    is_made = not run.overrides.is_file() or any(word.startswith("#") for word in words)
    return "" if is_made else format_call(changed, find_python_objects(words))


def result_rows(history: History) -> list[tuple[str, str]]:
    """Return names and values of the best metric, the newest metrics, the time and the speed, as far as they are
    known.
    """
    summary, best = history.summary, history.best
    rows: list[tuple[str, str]] = []
    if best is not None:
        rows.append((f"best {best.metric}", f"{format_number(best.value)} at step {best.step:,}"))
    newest = sorted(
        [*history.find_rows("train")[-1:], *history.find_rows("eval")[-1:]], key=lambda row: row["step"]
    )
    training = {name: value for row in newest for name, value in row.items() if name.startswith("train/")}
    rows += [
        (name + history.describe_sampling(name), format_number(value)) for name, value in training.items()
    ]
    metrics = newest_metrics(history)
    rows += [
        (name, format_number(value)) for name, value in metrics.items() if _split_class_metric(name) is None
    ]
    shown = {"step": format_number, "epoch": format_number, "seconds": format_duration} | dict.fromkeys(
        SPEEDS, format_quantity
    )
    for name, show in shown.items():
        if isinstance(summary.get(name), (int, float)):
            rows.append((({"seconds": "time"} | SPEEDS).get(name, name), show(summary[name])))
    if summary.get("idle"):
        rows.append(("idle", str(summary["idle"])))
    if devices := devices_line(summary.get("hardware") or {}):
        rows.append(("devices", devices.removeprefix("devices: ")))
    if summary.get("skipped_steps"):
        rows.append(("skipped steps", format_number(summary["skipped_steps"])))
    return list(dict(rows).items())


def evaluation_table(history: History) -> str:
    """Return a table of the newest validations, with a mark at the best; "" without any."""
    rows = history.find_rows("eval")[-MOST_EVALUATIONS:]
    names = [
        name for name in column_names(rows) if name not in NO_METRICS and _split_class_metric(name) is None
    ]
    names = [name for name in names if not name.endswith("/seconds")]
    best_step = None if history.best is None else history.best.step
    body = [
        [
            f"{row.get('epoch', 0.0):.4g}",
            f"{row['step']:,}" + (" (best)" if row["step"] == best_step else ""),
            *(format_number(row[name]) if name in row else "" for name in names),
        ]
        for row in rows
    ]
    return page.heading("Evaluations") + page.html_table(["epoch", "step", *names], body) if body else ""


def newest_metrics(history: History) -> dict[str, Any]:
    """Return the newest metrics of every split."""
    tests = history.find_rows("test")
    test_metrics = {name: tests[-1][name] for name in (tests[-1] if tests else {}) if _is_split_metric(name)}
    return {**(history.summary.get("metrics") or {}), **test_metrics}


def class_tables(history: History) -> list[str]:
    """Return a table of the metrics of single classes (`val/f1/3`) per split: a row per class, a column per metric."""
    columns_of: dict[str, dict[str, dict[int, Any]]] = {}
    for name, value in newest_metrics(history).items():
        if (place := _split_class_metric(name)) is not None:
            split, _, metric = place[0].rpartition("/")
            columns_of.setdefault(split, {}).setdefault(metric, {})[place[1]] = value
    confusion = history.find_rows("confusion")
    names = dict(enumerate(confusion[-1].get("class_names", []) if confusion else []))
    return [
        page.heading(f"Classes: {split}")
        + page.html_table(
            ["class", *columns],
            (
                [
                    str(names.get(i, i)),
                    *(format_number(column[i]) if i in column else "" for column in columns.values()),
                ]
                for i in sorted({i for column in columns.values() for i in column})
            ),
        )
        for split, columns in columns_of.items()
    ]


def _split_class_metric(name: str) -> tuple[str, int] | None:
    """Split `val/f1/3` into `val/f1` and 3; None if the name is not of a single class."""
    metric, _, number = name.rpartition("/")
    return (metric, int(number)) if number.isdecimal() and "/" in metric else None


def setup_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return model, data, optimizer, device and lengths, as printed at the start."""
    names = {
        "model_summary": "model", "num_parameters": "parameters", "num_trainable": "trained parameters",
        "update": "optimizer", "num_train": "training samples", "num_val": "validation samples",
        "classes": "classes",
        "batch_size": "batch size", "accumulate": "accumulated batches", "world_size": "ranks", "device": "device",
        "steps_per_epoch": "steps an epoch", "total_steps": "steps in all", "total_epochs": "epochs",
    }  # fmt: skip
    usual = {
        "num_trainable": facts.get("num_parameters"),
        "accumulate": 1,
        "world_size": 1,
    }  # says nothing new
    present = {name: facts[name] for name in names if facts.get(name) not in (None, "")}
    return [
        (names[name], format_number(value)) for name, value in present.items() if value != usual.get(name)
    ]


def format_setting(value: Any) -> str:
    """Format a config value as it is typed."""
    if isinstance(value, bool) or value is None or isinstance(value, (list, dict)):
        return json.dumps(value)
    return str(value)


def _is_split_metric(name: str) -> bool:
    return name.startswith("test/") and not name.endswith("/seconds")


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
