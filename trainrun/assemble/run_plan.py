"""Derive intervals, limits, metrics to watch and checkpoints to keep from a config, before anything is built."""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from glob import iglob
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from trainrun.checkpoint.manager import KeepOptions
from trainrun.config.schema import CheckpointConfig, EarlyStoppingConfig, RunConfig, replace_values
from trainrun.data.tensor_dataset import find_reader_attribute, list_parts
from trainrun.errors import ConfigError
from trainrun.instantiate import named_nodes
from trainrun.interfaces import Batches, Parallel
from trainrun.limits import (
    EPOCH,
    Duration,
    parse_any_duration,
    parse_duration,
    parse_interval,
    parse_saving_interval,
    parse_seconds,
    parse_untimed_interval,
)
from trainrun.output import format_count
from trainrun.task.metrics.directions import resolve_direction
from trainrun.train_state import StartPosition
from trainrun.training.triggers import (
    Intervals,
    Lengths,
    MetricTracker,
    RepeatInterval,
    RunLimits,
    is_any_interval_end,
)

if TYPE_CHECKING:
    from trainrun.data.order.drawn import WeightedSamples

# In a fingerprint: files that the training samples name, what else lies at data.train.path, shares of named sets.
DATA, PLACE, DRAWN = "data.train.path", "files of data.train.path", "shares of data.train"
ACCUMULATION = "trainer.accumulate_grad_batches"
LENGTHS_DECIDE = ("bucket", "pack", "token_budget")  # of data.padding
MOST_FILES = 1000
SAMPLED_STEPS = 5  # of those between two rows


def set_accumulation(config: RunConfig, world_size: int) -> RunConfig:
    """Return the config with the number of micro-batches that `data.global_batch_size` requires.

    Raise ConfigError if the batch cannot be divided evenly.
    """
    wanted, batch_of_ranks = config.data.global_batch_size, config.data.batch_size * world_size
    if wanted is None:
        return config
    if wanted % batch_of_ranks:
        near = max(batch_of_ranks, round(wanted / batch_of_ranks) * batch_of_ranks)
        raise ConfigError(
            f"data.global_batch_size={wanted}: must be a multiple of batch_size x ranks = {batch_of_ranks}; "
            f"the nearest is {near}"
        )
    return replace_values(config, {ACCUMULATION: wanted // batch_of_ranks})


def keep_global_batch(
    config: RunConfig,
    earlier: Mapping[str, int] | None,
    world_size: int,
    typed: Sequence[str],
    notes: list[str],
) -> RunConfig:
    """Return a config in which a run resumed on another number of ranks keeps its global batch.

    earlier: what `collect_batch_sizes` returned in the earlier session. typed: the settings typed for this resume,
        where a typed batch size wins. Raise ConfigError if the batch cannot be divided among the ranks.
    """
    explicit = {"data.global_batch_size", ACCUMULATION} & set(typed)
    if earlier is None or explicit or config.data.global_batch_size:
        return config
    is_same = earlier["ranks"] == world_size
    if is_same and earlier["batch_size"] != config.data.batch_size:
        return config
    batch, batch_of_ranks = earlier["global_batch"], config.data.batch_size * world_size
    if batch % batch_of_ranks:
        near = max(1, round(batch / batch_of_ranks))
        way = "" if batch % world_size else f"data.batch_size={batch // world_size} keeps it; "
        raise ConfigError(
            f"data.batch_size={config.data.batch_size}: {format_count(world_size, 'rank')} with this batch cannot keep "
            f"the global batch of {batch} samples that {format_count(earlier['ranks'], 'rank')} had; "
            f"{way}the nearest is {near * batch_of_ranks}, by {ACCUMULATION}={near}"
        )
    accumulate = batch // batch_of_ranks
    if not is_same:
        before = f"{format_count(earlier['ranks'], 'rank')} x {batch // earlier['ranks']} before"
        now = f"now {format_count(world_size, 'rank')} x {config.data.batch_size} x {accumulate} ({ACCUMULATION})"
        notes.append(f"the global batch stays {batch}: {before}, {now}")
    return replace_values(config, {ACCUMULATION: accumulate})


def collect_batch_sizes(config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the batch sizes that a resume on another number of ranks needs. config: with the accumulation of the
    run.
    """
    batch = config.data.batch_size * config.trainer.accumulate_grad_batches * world_size
    return {"global_batch": batch, "batch_size": config.data.batch_size, "ranks": world_size}


def measure_lengths(config: RunConfig, train: Batches, source: Any, task: Any, world_size: int) -> Lengths:
    """Return the lengths of steps and epochs, with which durations are converted. source: the training data."""
    data, accumulate = config.data, config.trainer.accumulate_grad_batches
    uneven = data.padding in ("pack", "token_budget") or train.num_samples is None
    each = None  # tokens of a sample
    if getattr(task, "unit", "") == "tokens" and not uneven and data.max_sequence_length is None:
        total = find_reader_attribute(source, "num_tokens")  # of `data=text`
        sizes = find_reader_attribute(source, "lengths")
        if total and sizes is not None and sizes.min() == sizes.max():
            each = total // len(sizes)
    return Lengths(
        None if train.num_batches is None else math.ceil(train.num_batches / accumulate),
        accumulate,
        None if uneven else data.batch_size * accumulate * world_size,
        None if uneven else train.num_samples,
        each,
        world_size,
    )


def resolve_interval(key: str, found: Duration, lengths: Lengths, task: Any) -> RepeatInterval:
    """Return the interval of a setting. Raise ConfigError if this data or task cannot be counted in its unit."""
    wrong = ""
    if found.unit == "token" and getattr(task, "unit", "") != "tokens":
        wrong = f"{type(task).__name__} counts samples, not tokens; use samples, as 1e6sample"
    elif found.unit == "sample" and lengths.samples_per_epoch is None:
        wrong = "the number of samples in a batch of this data is not known in advance; give steps"
    elif found.unit == "epoch" and lengths.steps_per_epoch is None and not float(found.amount).is_integer():
        wrong = "the length of this data is not known; give steps"
    if wrong:
        raise ConfigError(f"{key}: {wrong}")
    return RepeatInterval(found.amount, found.unit, lengths)


def convert_to_steps(key: str, found: Duration, lengths: Lengths, task: Any) -> int:
    """Return a duration from the beginning of the run in steps, rounded up. Raise ConfigError if it has no length in
    steps.
    """
    each, amount = resolve_interval(key, found, lengths, task), found.amount
    if each.unit == "step":
        return int(amount)
    if each.unit == "token":
        if lengths.tokens_per_sample is None:
            raise ConfigError(f"{key}: the number of tokens per step varies; use steps")
        amount = math.ceil(amount / lengths.tokens_per_sample)
    if lengths.steps_per_epoch is None:
        raise ConfigError(f"{key}: the length of an epoch of this data is not known; give steps")
    if each.unit == "epoch":
        return math.ceil(amount * lengths.steps_per_epoch - 1e-9)
    epochs, rest = divmod(amount, lengths.samples_per_epoch or 1)
    return int(epochs) * lengths.steps_per_epoch + math.ceil(rest / (lengths.samples_per_step or 1))


def count_extra_steps(config: RunConfig, lengths: Lengths, start: StartPosition | None) -> int:
    """Return how many more steps a run has made than its position in the data takes now.

    This is not 0 after a resume with another batch size or other data, and after a rollback, which leaves out data.
    start: where the run continues; None for its beginning.
    """
    if start is None or lengths.steps_per_epoch is None or lengths.samples_per_step is None or config.loop:
        return 0
    steps_in_epoch = math.ceil(start.samples / lengths.samples_per_step)
    return start.step - start.epoch * lengths.steps_per_epoch - steps_in_epoch


def build_intervals(
    config: RunConfig, lengths: Lengths, task: Any, has_val: bool, rank: int = 0, start: StartPosition | None = None
) -> Intervals:  # fmt: skip
    trainer, monitor = config.trainer, config.monitor
    per_epoch, extra = lengths.steps_per_epoch, count_extra_steps(config, lengths, start)
    totals = [trainer.max_steps]
    if trainer.max_epochs is not None and per_epoch is not None:
        totals.append(trainer.max_epochs * per_epoch + extra)
    max_duration = parse_any_duration(trainer.max_duration)
    uneven = max_duration is not None and max_duration.unit == "token" and lengths.tokens_per_sample is None
    if max_duration is not None and max_duration.unit != "second" and not uneven and per_epoch is not None:
        steps = convert_to_steps(f"trainer.max_duration={trainer.max_duration}", max_duration, lengths, task)
        totals.append(steps if max_duration.unit == "step" else steps + extra)
    known_totals = [total for total in totals if total is not None]
    key, interval = f"trainer.val_check_interval={trainer.val_check_interval}", None
    if has_val:
        interval = parse_interval(trainer.val_check_interval)
    by_time = interval is not None and interval.unit == "second"
    log = parse_untimed_interval(monitor.log_every_n_steps)
    log_key = f"monitor.log_every_n_steps={monitor.log_every_n_steps}"
    listening = monitor.metrics_file or monitor.progress_bar or monitor.verbose or bool(monitor.listeners)
    log_every = convert_to_steps(log_key, log, lengths, task) if listening else None
    return Intervals(
        lengths, resolve_interval(key, interval, lengths, task) if interval and not by_time else None,
        trainer.check_val_every_n_epoch, log_every,
        min(known_totals) if known_totals and not uneven else None,
        interval.amount if interval and by_time and rank == 0 else None, has_val,
        choose_metric_distance(log_every, per_epoch),
    )  # fmt: skip


def choose_metric_distance(log_every: int | None, steps_per_epoch: int | None) -> int:
    """Return k: training metrics are computed at every k-th step, which gives SAMPLED_STEPS values between two rows.

    Computed at every step, the accuracy of a small network would take 8 % of the time (a digits MLP on a CPU). The
    accuracy of a language model with a chunked loss would take as much. At every k-th step it takes less than 1 %.
    """
    shortest = min(log_every or 1, steps_per_epoch or math.inf)
    return math.ceil(shortest / SAMPLED_STEPS)


def convert_warmup_to_steps(config: RunConfig, lengths: Lengths, task: Any) -> RunConfig:
    """Return the config with a warm-up duration converted to steps."""

    def convert_node(key: str, node: dict[str, Any]) -> dict[str, Any]:
        node = node | {
            name: convert_node(f"{key}.{name}", inner_node) for name, inner_node in named_nodes(node).items()
        }
        warmup = node.get("warmup_steps")
        if not isinstance(warmup, str):
            return node
        key = f"{key}.warmup_steps={warmup}"
        try:
            steps = convert_to_steps(
                key, parse_duration(warmup, "step", "epoch", "sample", "token"), lengths, task
            )
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        return node | {"warmup_steps": steps}

    return replace_values(config, {"scheduler": convert_node("scheduler", config.scheduler or {}) or None})


def build_limits(config: RunConfig, lengths: Lengths, task: Any) -> RunLimits:
    trainer = config.trainer
    max_duration, typed = (
        parse_any_duration(trainer.max_duration),
        f"trainer.max_duration={trainer.max_duration}",
    )
    seconds = parse_seconds(trainer.max_time)
    if max_duration is None or (
        max_duration.unit == "second" and (seconds or math.inf) < max_duration.amount
    ):
        return RunLimits(trainer.max_steps, trainer.max_epochs, seconds)
    if max_duration.unit == "second":
        return RunLimits(trainer.max_steps, trainer.max_epochs, max_duration.amount, None, typed)
    whole_run = resolve_interval(typed, max_duration, lengths, task)
    return RunLimits(trainer.max_steps, trainer.max_epochs, seconds, whole_run, typed)


def choose_default_metric(task: Any, splits: Sequence[str]) -> str | None:
    """Return the metric that chooses the best checkpoint by default, of the first validation set; None without one.

    It is the task's `monitor`, else the loss.
    """
    if not splits:
        return None
    return f"{splits[0]}/{getattr(task, 'monitor', 'loss')}"  # a task may name one; most do not


def choose_metric_direction(
    key: str, metric: str | None, wanted: CheckpointConfig | EarlyStoppingConfig
) -> str:
    """Return `min` if a smaller value of the metric is better, such as a loss or an error; else `max`.

    Raise ConfigError if the typed mode contradicts the name of the metric.
    """
    if metric is None or (wanted.mode == "auto" and metric.endswith(("/loss", "/acc"))):
        return "max" if metric and metric.endswith("acc") else "min"
    return resolve_direction(key, metric, wanted.mode, wanted.monitor is not None) or "max"


def build_keep_options(config: RunConfig, default: str | None, lengths: Lengths, task: Any) -> KeepOptions:
    keep = config.checkpoint
    key = f"checkpoint.every_n_train_steps={keep.every_n_train_steps}"
    durations = [parse_saving_interval(keep.every_n_train_steps)]
    if keep.every_n_epochs is not None:
        durations.append(Duration(keep.every_n_epochs, EPOCH))
    distances = [resolve_interval(key, duration, lengths, task) for duration in durations if duration]
    metric = keep.monitor or default
    if keep.monitor is not None and default is None:
        raise ConfigError(
            f"checkpoint.monitor={keep.monitor}: there is no validation data (data.val, trainer.limit_val_batches)"
        )

    return KeepOptions(
        keep.enabled, metric, choose_metric_direction("checkpoint", metric, keep), keep.save_top_k,
        keep.save_last, keep.keep_last, partial(is_any_interval_end, distances),
        parse_seconds(keep.train_time_interval), keep.async_save, keep.monitor is not None,
    )  # fmt: skip


def build_early_stopping_tracker(config: RunConfig, default: str | None) -> MetricTracker:
    wanted = config.trainer.early_stopping
    if not wanted.enabled:
        return MetricTracker(None, "min")
    metric = wanted.monitor or default
    if metric is None or default is None:
        raise ConfigError(
            "trainer.early_stopping.enabled=true: there is no validation data (data.val, trainer.limit_val_batches); "
            "set data.val, or leave it out"
        )
    return MetricTracker(
        metric, choose_metric_direction("trainer.early_stopping", metric, wanted), wanted.patience, wanted.min_delta,
        wanted.stopping_threshold, wanted.divergence_threshold, wanted.monitor is not None,
        wanted.worse_than_best_by, wanted.min_epochs,
    )  # fmt: skip


def collect_order_settings(config: RunConfig, ranks: int, drawn: WeightedSamples | None) -> dict[str, Any]:
    """Return the settings that determine the order of training samples, by their keys."""
    data, train = config.data, config.data.train or {}
    names = ["shuffle", "shuffle_buffer", "sampling", "mix", "folds", "fold", "stratified", "fold_groups"]
    if data.padding in LENGTHS_DECIDE or data.truncate in ("drop", "split"):
        names += ["padding", "max_tokens", "truncate", "max_sequence_length", "pad_multiple"]
    facts = {"seed": config.seed, **{f"data.{name}": getattr(data, name) for name in names}}
    of_training = ("seed", "stream", "val_fraction", "split", "groups", "val_by")
    facts |= {f"data.train.{name}": train[name] for name in of_training if name in train}
    if data.padding == "bucket":
        facts["batch_size x ranks"] = data.batch_size * ranks
    if data.padding == "token_budget":
        facts["ranks"] = ranks
    return facts | ({} if drawn is None else {DRAWN: drawn.mark})


def build_fingerprint(
    config: RunConfig, parallel: Parallel, source: Any, drawn: WeightedSamples | None = None
) -> dict[str, Any]:
    """Return the facts besides the config on which the results of a run depend.

    The data files are read here. source: the training samples. Without an attribute `files` or `file_sizes`, the
    files at `data.train.path` are used.
    """
    parts = list_parts(source)
    named = [files for part in parts if (files := find_reader_attribute(part, "files"))]
    streams = [sizes for part in parts if (sizes := find_reader_attribute(part, "file_sizes"))]
    description = describe_files(chain.from_iterable(named)) if named else ""
    description += "".join(describe_sizes(sizes) for sizes in streams)
    beside = "" if named or streams else describe_data_files((config.data.train or {}).get("path"))
    data = ({DATA: description} if description else {}) | ({PLACE: beside} if beside else {})
    data |= {} if drawn is None else {DRAWN: drawn.mark}
    return {
        **describe_platform(parallel.device),
        "world_size": parallel.world_size,
        "num_threads": torch.get_num_threads(),
        "precision": config.precision.mode,
        "deterministic": config.trainer.deterministic,
        **data,
    }


def describe_data_files(path: Any) -> str:
    """Describe a file, or the files of a folder or of a pattern; "" for another value."""
    if not isinstance(path, str):
        return ""
    place = Path(path).expanduser()
    paths = (
        place.iterdir() if place.is_dir() else [place] if place.is_file() else map(Path, iglob(str(place)))
    )
    return describe_files(file for file in paths if not file.name.startswith("."))


def describe_files(paths: Iterable[Path]) -> str:
    """Return the number of files, their bytes, and a hash of names and sizes; "" for none or too many files."""
    files = [file for file in islice(paths, MOST_FILES + 1) if file.is_file()]
    if len(files) > MOST_FILES:
        return ""
    return describe_sizes({str(file.absolute()): file.stat().st_size for file in files})


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Return the number of files, their bytes, and a hash of names and sizes; "" for none. sizes: by path or URL.

    The common folder, modification times and the name of a single file do not count, because a job may copy its
    data.
    """
    if not sizes:
        return ""
    together = os.path.commonpath([os.path.dirname(path) for path in sizes])
    names = [""] if len(sizes) == 1 else [os.path.relpath(path, together) for path in sizes]
    rows = sorted(zip(names, sizes.values(), strict=True))
    mark = hashlib.sha256(repr(rows).encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{format_count(len(rows), 'file')}, {sum(sizes.values()):,} bytes, {mark}"


@cache
def describe_platform(device: torch.device) -> dict[str, str]:
    """Return the versions of libraries and the types of CPU and GPUs.

    Its entry `cpu` is the widest vector instruction set that torch uses.
    """
    facts = {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,  # which of several alike does not matter, and each rank has another
    }
    return facts | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def build_best_tracker(config: RunConfig, default: str | None) -> MetricTracker:
    """Return the tracker of the metric that chooses the `best` checkpoint."""
    keep = config.checkpoint
    metric = keep.monitor or default
    mode = choose_metric_direction("checkpoint", metric, keep)
    return MetricTracker(metric if default else None, mode, named=keep.monitor is not None)
