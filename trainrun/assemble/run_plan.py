"""What follows from a config before anything is built: rhythm, metrics to watch, what to keep."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import platform
from collections.abc import Callable, Sequence
from glob import iglob
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch

from trainrun.checkpoint.policy import KeepOptions
from trainrun.config.schema import RunConfig
from trainrun.config.units import Interval, parse_interval, parse_seconds
from trainrun.errors import ConfigError
from trainrun.formatting import counted
from trainrun.interfaces import Batches, Parallel
from trainrun.training.triggers import Intervals, MetricTracker

DATA = "data.train.path"  # in a fingerprint
MOST_FILES = 1000


def with_accumulation(config: RunConfig, world_size: int) -> RunConfig:
    """`data.global_batch_size` divided among ranks and micro-batches; it must come out even."""
    wanted, one = config.data.global_batch_size, config.data.batch_size * world_size
    if wanted is None:
        return config
    if wanted % one:
        near = max(one, round(wanted / one) * one)
        raise ConfigError(
            f"data.global_batch_size={wanted}: must be a multiple of batch_size x ranks = {one}; the nearest is {near}"
        )
    return dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, accumulate_grad_batches=wanted // one)
    )


def build_rhythm(config: RunConfig, train: Batches, has_val: bool) -> Intervals:
    trainer, monitor = config.trainer, config.monitor
    accumulate = trainer.accumulate_grad_batches
    per_epoch = None if train.num_batches is None else math.ceil(train.num_batches / accumulate)
    totals = [trainer.max_steps]
    if trainer.max_epochs is not None and per_epoch is not None:
        totals.append(trainer.max_epochs * per_epoch)
    known = [total for total in totals if total is not None]
    interval = parse_interval(trainer.val_check_interval) if has_val else Interval()
    if per_epoch is None and interval.epochs is not None and interval.epochs < 1:
        raise ConfigError(
            f"trainer.val_check_interval={trainer.val_check_interval}: the length of this data is not known; give steps"
        )
    listening = monitor.metrics_file or monitor.progress_bar or monitor.verbose or bool(monitor.listeners)
    return Intervals(
        per_epoch, accumulate, interval.steps, interval.epochs, trainer.check_val_every_n_epoch,
        monitor.log_every_n_steps if listening else None, min(known) if known else None,
    )  # fmt: skip


def default_monitor(task: Any, splits: Sequence[str]) -> str | None:
    """What `best` means if nobody says: the metric that the task names, else the loss, of the first validation set."""
    if not splits:
        return None
    return f"{splits[0]}/{getattr(task, 'monitor', 'loss')}"  # a task may name one; most do not


def direction(metric: str, mode: str) -> str:
    """Losses and errors are better when smaller, everything else when larger."""
    if mode != "auto":
        return mode
    small = ("loss", "error", "mae", "mse", "rmse", "perplexity", "bits", "kl", "seconds")
    return "min" if any(word in metric.rpartition("/")[2].lower() for word in small) else "max"


def keep_options(config: RunConfig, default: str | None) -> KeepOptions:
    keep = config.checkpoint
    metric = keep.monitor or default
    if keep.monitor is not None and default is None:
        raise ConfigError(f"checkpoint.monitor={keep.monitor}: there is no validation data (data.val)")
    return KeepOptions(
        keep.enabled, metric, direction(metric or "val/loss", keep.mode), keep.save_top_k if metric else 0,
        keep.save_last, keep.keep_last, keep.every_n_train_steps, parse_seconds(keep.train_time_interval),
        keep.async_save,
    )  # fmt: skip


def build_watch(config: RunConfig, default: str | None) -> MetricTracker:
    wanted = config.trainer.early_stopping
    if not wanted.enabled:
        return MetricTracker(None, "min")
    metric = wanted.monitor or default
    if metric is None or default is None:
        raise ConfigError(
            "trainer.early_stopping.enabled=true: there is no validation data (data.val) to watch"
        )
    return MetricTracker(
        metric, direction(metric, wanted.mode), wanted.patience, wanted.min_delta,
        wanted.stopping_threshold, wanted.divergence_threshold,
    )  # fmt: skip


def build_fingerprint(config: RunConfig, parallel: Parallel) -> Callable[[], dict[str, Any]]:
    """What the bits of a run depend on besides its config. The data is looked at here, the rest whenever asked."""
    data = {DATA: found} if (found := data_at((config.data.train or {}).get("path"))) else {}
    return lambda: {
        **machine(parallel.device),
        "world_size": parallel.world_size,
        "num_threads": torch.get_num_threads(),
        "precision": config.precision.mode,
        "deterministic": config.trainer.deterministic,
        **data,
    }


def data_at(path: Any) -> str:
    """Number, bytes, and a hash of names and sizes, of a file or of the files of a folder or pattern.

    Empty if they are too many to be looked at each time, or none. Where they lie does not count, nor when they
    were written: a job may copy its data to a new place first.
    """
    if not isinstance(path, str):
        return ""
    place = Path(path).expanduser()
    found = (
        place.iterdir() if place.is_dir() else [place] if place.is_file() else map(Path, iglob(str(place)))
    )
    files = list(islice((file for file in found if not file.name.startswith(".")), MOST_FILES + 1))
    sizes = sorted((file.name, file.stat().st_size) for file in files if file.is_file())
    if not sizes or len(files) > MOST_FILES:
        return ""
    mark = hashlib.sha256(repr(sizes).encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{counted(len(sizes), 'file')}, {sum(size for _, size in sizes):,} bytes, {mark}"


@functools.cache
def machine(device: torch.device) -> dict[str, str]:
    """Versions and chips. cpu: the widest instructions that torch uses."""
    facts = {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,  # which of several alike does not matter, and each rank has another
    }
    return facts | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def best_watch(config: RunConfig, default: str | None) -> MetricTracker:
    """The metric that the summary calls best, the same that `best` checkpoints go by."""
    metric = config.checkpoint.monitor or default
    return MetricTracker(metric if default else None, direction(metric or "val/loss", config.checkpoint.mode))
