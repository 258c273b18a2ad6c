"""`report.html`: a run on one page that needs no other file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainrun.folder.run_folder import RunDir, write_text
from trainrun.output import SPEEDS, duration, figure, quantity
from trainrun.plots import page
from trainrun.plots.history import History, flat, read_environment, read_history

ORDER = (
    "loss",
    "metrics",
    "latents",
    "active_units",
    "confusion",
    "predictions",
    "lr",
    "throughput",
    "time",
    "memory",
)
MOST_NOTES = 200
SHOWN_PACKAGES = ("trainrun", "torch", "numpy")
MOST_SAMPLES = 40  # of text


def draw_report(run: RunDir) -> Path:
    """Put the pictures in `plots/` and the facts of the run on one page.

    Raises DataError if the metrics file is damaged, OSError if there is none.
    """
    history = read_history(run)
    name = str(history.facts.get("name") or run.root.name)
    notes = [f"step {row.get('step', 0):,}: {row.get('text', '')}" for row in history.of("note")]
    dropped = (
        [f"{len(notes) - MOST_NOTES:,} earlier notes are in {run.metrics.name}"]
        if len(notes) > MOST_NOTES
        else []
    )
    environment = read_environment(run)
    installed = environment.pop("packages", {})
    environment |= {f"packages.{one}": installed[one] for one in SHOWN_PACKAGES if one in installed}
    packages = "\n".join(f"{one}=={version}" for one, version in installed.items())
    parts = [
        page.heading(name, level=1),
        page.paragraph(str(run.root)),
        state_banner(history),
        page.beside(
            [page.pairs("Result", result_rows(history)), page.pairs("Set-up", setup_rows(history.facts))]
        ),
        *layer_table(history),
        page.listing(
            "Choices",
            [str(choice) for name in ("advice", "choices") for choice in history.facts.get(name, [])],
        ),
        *class_tables(history),
        page.pictures(pictures_in_order(run)),
        page.written(history.of("sample")[-MOST_SAMPLES:]),
        page.listing("Notes", dropped + notes[-MOST_NOTES:]),
        page.pairs("Environment", [(key, plain(value)) for key, value in flat(environment).items() if key]),
        page.folded("all packages", packages),
        page.heading("Config"),
        page.folded("overrides.txt", _text(run.overrides)),
        page.folded("config.yaml", _text(run.config)),
        page.folded("changes.diff", _text(run.changes)),
    ]
    write_text(run.report, page.page(name, parts))
    return run.report


def layer_table(history: History) -> list[str]:
    """Return the table of the layers, if the run wrote one (`monitor.summary`)."""
    if not (found := history.of("layers")):
        return []
    rows = (
        [str(one["layer"]), one["class"], one["output"], figure(one["parameters"])]
        for one in found[-1]["layers"]
    )
    return [page.heading("Layers") + page.table(["layer", "class", "output", "parameters"], rows)]


def state_banner(history: History) -> str:
    """The state of the run, and the message of what ended it."""
    state, message = history.state
    return page.banner(state, message, bad=state == "failed")


def result_rows(history: History) -> list[tuple[str, str]]:
    """How it ended; while the run goes on, what is known."""
    summary, best = history.summary, history.best
    state, message = history.state
    rows = [("state", state)]
    if message:
        rows.append(("why it ended", message))
    if best is not None:
        rows.append((f"best {best.metric}", f"{figure(best.value)} at step {best.step:,}"))
    newest = sorted([*history.of("train")[-1:], *history.of("eval")[-1:]], key=lambda row: row["step"])
    training = {name: value for row in newest for name, value in row.items() if name.startswith("train/")}
    rows += [(name + history.sampling_of(name), figure(value)) for name, value in training.items()]
    found = results(history)
    rows += [(name, figure(value)) for name, value in found.items() if _of_class(name) is None]
    shown = {"step": figure, "epoch": figure, "seconds": duration} | dict.fromkeys(SPEEDS, quantity)
    for name, show in shown.items():
        if isinstance(summary.get(name), (int, float)):
            rows.append((({"seconds": "time"} | SPEEDS).get(name, name), show(summary[name])))
    if summary.get("idle"):
        rows.append(("idle", str(summary["idle"])))
    rows += [(f"hardware/{name}", figure(value)) for name, value in (summary.get("hardware") or {}).items()]
    if summary.get("skipped_steps"):
        rows.append(("skipped steps", figure(summary["skipped_steps"])))
    return list(dict(rows).items())


def results(history: History) -> dict[str, Any]:
    """The newest metrics of every split."""
    tests = history.of("test")
    found = {name: tests[-1][name] for name in (tests[-1] if tests else {}) if _is_result(name)}
    return {**(history.summary.get("metrics") or {}), **found}


def class_tables(history: History) -> list[str]:
    """Metrics of single classes (`val/f1/3`): a table for each split, with a row a class and a column a metric."""
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for name, value in results(history).items():
        if (place := _of_class(name)) is not None:
            split, _, metric = place[0].rpartition("/")
            found.setdefault(split, {}).setdefault(metric, {})[place[1]] = value
    confusion = history.of("confusion")
    names = dict(enumerate(confusion[-1].get("class_names", []) if confusion else []))
    return [
        page.heading(f"Classes: {split}")
        + page.table(
            ["class", *columns],
            (
                [
                    str(names.get(i, i)),
                    *(figure(column[i]) if i in column else "" for column in columns.values()),
                ]
                for i in sorted({i for column in columns.values() for i in column})
            ),
        )
        for split, columns in found.items()
    ]


def _of_class(name: str) -> tuple[str, int] | None:
    """`val/f1/3` -> `val/f1`, 3."""
    metric, _, number = name.rpartition("/")
    return (metric, int(number)) if number.isdecimal() and "/" in metric else None


def setup_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Device, model, data and lengths, as at the start."""
    names = {
        "device": "device", "world_size": "ranks", "batch_size": "batch size", "accumulate": "accumulate",
        "num_train": "training samples", "num_val": "validation samples", "steps_per_epoch": "steps an epoch",
        "total_steps": "steps in all", "total_epochs": "epochs", "model_summary": "model",
        "num_parameters": "parameters", "num_trainable": "trained parameters",
    }  # fmt: skip
    return [(label, figure(facts[name])) for name, label in names.items() if facts.get(name) is not None]


def pictures_in_order(run: RunDir) -> list[Path]:
    """The known ones first, then others in `plots/`."""
    found = sorted(path for path in run.plots.glob("*.png") if not path.name.startswith("."))
    rank = {name: i for i, name in enumerate(ORDER)}
    return sorted(found, key=lambda path: rank.get(path.stem, len(rank)))


def plain(value: Any) -> str:
    """A config value as one types it."""
    if isinstance(value, bool) or value is None or isinstance(value, (list, dict)):
        return json.dumps(value)
    return str(value)


def _is_result(name: str) -> bool:
    return name.startswith("test/") and not name.endswith("/seconds")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
