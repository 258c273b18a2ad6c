"""The content of a run folder, read once for all plots and the report."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from trainrun.config.saved_values import LOADER, read_yaml_text, resolve_references
from trainrun.errors import ConfigError, DataError
from trainrun.folder.run_folder import RunDir, read_json
from trainrun.monitor.metric_rows import Row, read_metric_rows
from trainrun.output import format_ordinal

UNKNOWN = "running, or it did not come to an end"


@dataclass(frozen=True)
class BestValue:
    """The best monitored value of a run. metric: as users type it."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class History:
    """The rows of a run by kind, and all rows in the order of writing.

    facts: of the last session, as in RunFacts. summary: empty while the run trains.
    """

    run: RunDir
    in_order: list[Row]
    rows: dict[str, list[Row]]
    facts: dict[str, Any]
    summary: dict[str, Any]

    def find_rows(self, kind: str) -> list[Row]:
        return self.rows.get(kind, [])

    @property
    def state(self) -> tuple[str, str]:
        """The state of the run in `status.json`, and its final message, which is "" while the run trains."""
        status = read_state(self.run)
        if not status:
            return ("ended", str(self.summary.get("reason") or "")) if self.summary else (UNKNOWN, "")
        if status["state"] == "running":
            return UNKNOWN, ""
        return str(status["state"]), str(status.get("message") or self.summary.get("reason") or "")

    @property
    def steps_per_epoch(self) -> int | None:
        steps: int | None = self.facts.get("steps_per_epoch")
        return steps

    def describe_sampling(self, metric: str) -> str:
        """Return ` (measured in every 9th step)` for a training metric that is not measured in all steps; else ""."""
        every = self.facts.get("sample_every") or 1
        if every == 1 or not metric.startswith("train/") or metric == "train/loss":
            return ""
        return f" (measured in every {format_ordinal(every)} step)"

    @property
    def best(self) -> BestValue | None:
        """Return the best value of the monitored metric. While the run trains, return the lowest validation loss so
        far. None if there is none.
        """
        metric, value, step = (self.summary.get(name) for name in ("monitor", "value", "best_step"))
        if metric is not None and value is not None and step is not None:
            return BestValue(metric, value, step)
        losses = [row for row in self.find_rows("eval") if row.get("val/loss", float("nan")) < float("inf")]
        if self.summary or not losses:
            return None
        lowest = min(losses, key=lambda row: row["val/loss"])
        return BestValue("val/loss", lowest["val/loss"], lowest["step"])


def read_history(run: RunDir) -> History:
    """Read the rows of a run.

    Raise DataError if `metrics.jsonl` is damaged, and OSError if it is missing although the run did not fail.
    """
    rows: dict[str, list[Row]] = {}
    ended_early = not run.metrics.exists() and read_state(run).get("state") in ("failed", "stopped")
    in_order = [] if ended_early else read_metric_rows(run.metrics)
    for row in in_order:
        rows.setdefault(row.get("kind", ""), []).append(row)
    starts, ends = rows.get("start"), rows.get("end")
    return History(
        run,
        in_order,
        rows,
        starts[-1].get("facts", {}) if starts else {},
        ends[-1].get("summary", {}) if ends else {},
    )


def read_state(run: RunDir) -> dict[str, Any]:
    """Return the content of `status.json`; {} if it cannot be read or has no state."""
    with contextlib.suppress(OSError, ValueError):
        status = read_json(run.status)
        if isinstance(status, dict) and isinstance(status.get("state"), str):
            return status
    return {}


def read_config(run: RunDir) -> dict[str, Any]:
    """Return the config of a run as plain values; {} without one."""
    if not run.config.is_file():
        return {}
    import yaml

    try:
        config = yaml.load(read_yaml_text(run.config), Loader=LOADER)
        config = resolve_references(config) if isinstance(config, dict) else {}
    except (yaml.YAMLError, ValueError, TypeError, ConfigError) as error:
        raise DataError(
            f"{run.config}: not a config of a run ({str(error).partition(chr(10))[0]})"
        ) from error
    return {str(name): value for name, value in config.items()}


def read_environment(run: RunDir) -> dict[str, Any]:
    """Return the content of `environment.json`; {} if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        environment = read_json(run.environment)
        return environment if isinstance(environment, dict) else {}
    return {}


def flatten_dict(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts: `{"a": {"b": 1}}` becomes `{"a.b": 1}`. Lists stay as they are."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= flatten_dict(value, f"{prefix}.{name}" if prefix else str(name))
    return out
