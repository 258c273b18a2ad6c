"""Metrics that settings name, looked for in one batch of a validation before the first step."""

from __future__ import annotations

import contextlib

from trainrun.config.mistakes.value_words import nearest
from trainrun.errors import ConfigError
from trainrun.instantiate import named_nodes
from trainrun.sums import metrics_of
from trainrun.training.components import Components
from trainrun.training.evaluate import sums_of


def check_monitors(run: Components) -> None:
    """Raises ConfigError for a metric that no validation will have; nothing of the run is moved.

    A compiled model is not asked: compiling it for one batch could take longer than the mistake.
    """
    config = run.config
    stopping = config.trainer.early_stopping
    named = {
        "checkpoint.monitor": config.checkpoint.monitor,
        "trainer.early_stopping.monitor": stopping.monitor if stopping.enabled else None,
        "scheduler.metric": (config.scheduler or {}).get("metric"),
        **{
            f"scheduler.{name}.metric": one.get("metric")
            for name, one in named_nodes(config.scheduler).items()
        },
    }
    if run.val is None or not any(named.values()) or config.trainer.compile.scope in ("model", "regional"):
        return
    known = _metrics(run)
    for key, metric in named.items():
        if metric is not None and known and metric not in known:
            lacks_size = metric.endswith("/bpb") and "bytes_per_token" in config.task
            hint = " It needs task.bytes_per_token=..., that of your text." * lacks_size
            raise ConfigError(
                f"{key}={metric}: no such metric; there are {', '.join(known)}.{hint or nearest(metric, known)}"
            )


def _metrics(run: Components) -> list[str]:
    """Their names, sorted; empty on a rank that has no share of the first batch."""
    assert run.val is not None
    batches = run.val.epoch(0)
    try:
        with run.evaluating() as model:
            batch = next(batches, None)
            if batch is None:
                return []
            sums, rows, _ = sums_of(run, model, batch)
    finally:
        with contextlib.suppress(AttributeError):  # a stream that is no generator has nothing to close
            batches.close()  # type: ignore[attr-defined]
    known = metrics_of({name: total.cpu() for name, total in sums.items()}, 1.0, run.task, rows)
    return sorted(f"{split}/{name}" for split in run.validation for name in known)
