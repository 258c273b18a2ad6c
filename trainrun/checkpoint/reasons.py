"""Why a state is saved, told from the state alone, so that all ranks and a resumed run tell the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainrun.checkpoint.manifest import Metric
from trainrun.checkpoint.ranking import Entry, Ranking
from trainrun.errors import ConfigError
from trainrun.state import SAVE_NOW, TrainState


@dataclass(frozen=True)
class KeepOptions:
    """monitor: the full name of the metric (`val/acc`), None if there is none; mode: `min` or `max`.

    async_save: while a checkpoint is written, the training goes on.
    """

    enabled: bool
    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool
    keep_last: int
    every_n_train_steps: int | None
    interval_seconds: float | None
    async_save: bool


def kind_of(options: KeepOptions, ranking: Ranking, state: TrainState) -> str | None:
    """What the state of this step would be saved as; None if it is not saved."""
    if not options.enabled:
        return None
    if state.saved_step == state.step:  # a run that goes on from here may have had no time to validate
        return "measured" if _is_best(options, ranking, state) else None
    if state.stop_reason and state.stop_request > 0:
        return "stopped"
    if state.stop_reason and options.save_last:
        return "final"
    if options.every_n_train_steps and state.step > 0 and state.step % options.every_n_train_steps == 0:
        return "periodic"
    if state.save_request == SAVE_NOW and options.save_last:
        return "last"
    return "best" if _is_best(options, ranking, state) else None


def _is_best(options: KeepOptions, ranking: Ranking, state: TrainState) -> bool:
    metric = metric_of(options, state)
    return metric is not None and ranking.admits(Entry(state.step, metric.value))


def metric_of(options: KeepOptions, state: TrainState) -> Metric | None:
    """The monitored metric of this very step; None if it was not measured, or is not finite."""
    name = options.monitor
    if name is None or options.save_top_k == 0 or state.validated_step != state.step:
        return None
    if name not in state.last_metrics:
        known = ", ".join(sorted(state.last_metrics)) or "nothing"
        raise ConfigError(f"checkpoint.monitor={name}: validation does not measure it; it measures {known}")
    value = float(state.last_metrics[name])
    return Metric(name, options.mode, value) if math.isfinite(value) else None
