"""`trainrun autotune --table`: measure well-known techniques on one training, each alone and the helpful ones
together.

A technique that is already in use is measured by removing it. In the end, the techniques that help and do not change
the training run together against the user's own settings, in new processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from trainrun.benchmark.remedies import (
    CHANNELS_LAST,
    COMPILED,
    EXACT,
    FUSED,
    GRAPHS,
    NUMERIC,
    OTHER_BATCH,
    TRAINING,
    Remedy,
)
from trainrun.benchmark.run_overrides import compose_config, loader_overrides, override_key, replace_overrides
from trainrun.benchmark.tune.tuner import NO_TIME, Trial, Tuner
from trainrun.benchmark.worker_messages import RunInfo
from trainrun.comparison.paired import Ratio
from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError
from trainrun.runtime.machine import count_usable_cores

ALONE_UNTIL: Final = 0.6  # of the budget
AT_ONCE: Final = 4  # runs besides the base: as many share its turns, and lie in memory
TIMES: Final = 4  # as large: a batch
ON_ALREADY: Final = "on already"
Overrides = tuple[str, ...]


class Technique(NamedTuple):
    """A well-known technique.

    on: returns the overrides that switch it on, for a config. off: the overrides that switch it off, if it may
        already be on.
    skip: returns why it cannot matter for a run, or "".
    """

    title: str
    on: Callable[[RunConfig], Sequence[str]]
    off: Overrides = ()
    effect: str = EXACT
    changes: str = ""
    skip: Callable[[RunConfig, RunInfo], str] = lambda config, info: ""


def skip_without_gpu(config: RunConfig, info: RunInfo) -> str:
    return "needs a GPU" if info.device == "cpu" else ""


def skip_without_cpu(config: RunConfig, info: RunInfo) -> str:
    return "" if info.device == "cpu" else "not a CPU"


def skip_threads(config: RunConfig, info: RunInfo) -> str:
    return "" if count_usable_cores() > 1 and info.device == "cpu" else "one core, or not a CPU"


def skip_without_convolutions(config: RunConfig, info: RunInfo) -> str:
    has_one = any("Conv2d" in layer for layer in info.layers)
    return "" if has_one else "the model has no convolutions"


def skip_without_kernels(config: RunConfig, info: RunInfo) -> str:
    return "" if "fused" in (config.optimizer or {}) else "the optimizer has one kernel only"


def skip_without_length(config: RunConfig, info: RunInfo) -> str:
    return "" if config.data.max_sequence_length else "no data.max_sequence_length"


def skip_halves(config: RunConfig, info: RunInfo) -> str:
    """Return why the samples of a step cannot be split into two micro-batches; "" if they can."""
    if any("BatchNorm" in layer for layer in info.layers):
        return "batch norm: other micro-batches are another training"
    return "data.batch_size is odd" if config.data.batch_size % 2 else ""


def half_micro_batches(config: RunConfig) -> Sequence[str]:
    size = f"data.batch_size={config.data.batch_size // 2}"
    if config.data.global_batch_size is not None:
        return (size,)  # which sets the accumulation itself
    return size, f"trainer.accumulate_grad_batches={2 * config.trainer.accumulate_grad_batches}"


def larger_batch(config: RunConfig) -> Sequence[str]:
    data = config.data
    sizes = {"batch_size": data.batch_size, "global_batch_size": data.global_batch_size}
    return [f"data.{name}={TIMES * size}" for name, size in sizes.items() if size is not None]


def half_length(config: RunConfig) -> Sequence[str]:
    return (f"data.max_sequence_length={max(1, (config.data.max_sequence_length or 2) // 2)}",)


def reader_overrides(engine: str, number: int) -> Callable[[RunConfig], Sequence[str]]:
    return lambda config: loader_overrides(config, engine, number)


def fixed_overrides(*overrides: str) -> Callable[[RunConfig], Sequence[str]]:
    return lambda config: overrides


COMPILED_STEP, COMPILED_MODEL = (remedy.overrides for remedy in COMPILED)
NOT_COMPILED: Final = ("trainer.compile.scope=off",)
FLOAT32: Final = ("precision.mode=32-true",)
TECHNIQUES: Final = (
    Technique("no workers (0)", reader_overrides("workers", 0)),
    Technique("2 workers", reader_overrides("workers", 2)),
    Technique("8 workers", reader_overrides("workers", 8)),
    Technique("samples cached in memory", fixed_overrides("data.cache=memory"), ("data.cache=none",)),
    Technique("resident data", reader_overrides("resident", 0)),
    Technique("prefetch thread", reader_overrides("threads", 1)),
    Technique("pinned memory", fixed_overrides("data.pin_memory=true"), ("data.pin_memory=false",),
              skip=skip_without_gpu),
    Technique("mixed precision (bf16)", fixed_overrides("precision.mode=bf16-mixed"), FLOAT32, NUMERIC),
    Technique("mixed precision (fp16)", fixed_overrides("precision.mode=16-mixed"), FLOAT32, NUMERIC,
              skip=skip_without_gpu),
    Technique("TF32", fixed_overrides("precision.matmul=high"), ("precision.matmul=highest",), NUMERIC,
              skip=skip_without_gpu),
    Technique("channels-last layout", fixed_overrides(*CHANNELS_LAST.overrides), ("trainer.channels_last=false",),
              skip=skip_without_convolutions),
    Technique("accumulation (2 halves)", half_micro_batches, skip=skip_halves),
    Technique("fused optimizer", fixed_overrides(*FUSED.overrides), ("optimizer.fused=false",
              "optimizer.foreach=false"),
              skip=skip_without_kernels),
    Technique("freed memory kept", fixed_overrides("trainer.cpu_allocator=auto"), ("trainer.cpu_allocator=libc",),
              skip=skip_without_cpu),
    Technique("one thread", fixed_overrides("trainer.num_threads=1"), skip=skip_threads),
    Technique("a thread for each core", lambda config: (f"trainer.num_threads={count_usable_cores()}",),
              skip=skip_threads),
    Technique("compiled (whole step)", fixed_overrides(*COMPILED_STEP), NOT_COMPILED, NUMERIC),
    Technique("compiled (model)", fixed_overrides(*COMPILED_MODEL), NOT_COMPILED, NUMERIC),
    Technique("CUDA graphs", fixed_overrides(*GRAPHS.overrides), ("trainer.cuda_graphs=false",), skip=skip_without_gpu),
    Technique("less monitoring", fixed_overrides("monitor.log_every_n_steps=500", "monitor.hardware=false"),
              (), TRAINING,
              "what is logged"),
    Technique(f"batch {TIMES}x as large", larger_batch, (), TRAINING, OTHER_BATCH),
    Technique("half the length", half_length, (), TRAINING, "the samples", skip_without_length),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A technique and its trial alone.

    is_on: the user's settings include it, and it was removed for the trial. together: it was among the techniques
        that were measured together.
    """

    trial: Trial
    is_on: bool = False
    together: bool = False

    @property
    def speedup_alone(self) -> Ratio | None:
        """Return how many times as fast the run is with the technique as without it."""
        ratio = self.trial.ratio
        return ratio.inverse() if ratio is not None and self.is_on else ratio


@dataclass(frozen=True)
class TechniqueTable:
    """All techniques with their results, and the gain of the helpful techniques together.

    speed: items per second with the user's own settings. found: the overrides that were measured together. claim: the
        speed with these overrides, relative to the user's own settings, in new processes. problem: why there is no
        claim.
    """

    unit: str
    speed: float
    rows: tuple[Row, ...]
    found: tuple[str, ...]
    claim: Ratio | None
    problem: str
    seconds: float


def measure_table(tuner: Tuner, techniques: Sequence[Technique] = TECHNIQUES) -> TechniqueTable:
    """Measure each technique alone, and the helpful ones together. Raise the errors that a run with these settings
    would raise.
    """
    tuner.start_base()
    rows = [plan_row(technique, tuner) for technique in techniques]
    waiting = [number for number, row in enumerate(rows) if not row.trial.reason]
    while waiting:
        group, rest = waiting[:AT_ONCE], waiting[AT_ONCE:]
        seconds = max(0.0, tuner.budget.remaining_seconds(ALONE_UNTIL)) * len(group) / len(waiting)
        remedies = [rows[number].trial.remedy for number in group]
        trials, runs = tuner.try_in_turns("", None, remedies, tuner.budget.clock() + seconds)
        for run in runs.values():
            run.close()
        for number, trial in zip(group, trials, strict=True):
            rows[number] = replace(rows[number], trial=replace(trial, cause=rows[number].trial.cause))
        waiting = rest
    tuner.base.close()
    together = compatible_techniques(rows, tuner.overrides)
    settings = [override for number in together for override in rows[number].trial.remedy.overrides]
    claim = tuner.confirm(settings) if settings else None
    rows = [replace(row, together=number in together) for number, row in enumerate(rows)]
    return TechniqueTable(tuner.base.info.unit, tuner.speed, tuple(rows), tuple(settings), claim, tuner.problem,
                          tuner.budget.elapsed_seconds)  # fmt: skip


def plan_row(technique: Technique, tuner: Tuner) -> Row:
    """Return the planned trial of a technique, or the reason why there is none."""
    config, info = compose_config(tuner.add_start_choices(())), tuner.base.info
    remedy = Remedy(tuple(technique.on(config)), technique.effect, technique.changes)
    trial = Trial(technique.title, None, remedy, reason=technique.skip(config, info))
    if trial.reason:
        return Row(trial)
    try:
        if compose_config(tuner.add_start_choices(remedy.overrides)) != config:
            return Row(trial)
    except ConfigError as error:
        return Row(replace(trial, reason=error.faults[0]))
    without = remedy._replace(overrides=technique.off)
    return Row(replace(trial, remedy=without, reason="" if technique.off else ON_ALREADY), is_on=True)


def compatible_techniques(rows: Sequence[Row], overrides: Sequence[str]) -> list[int]:
    """Return the techniques to measure together, the fastest first. If two set the same key, only the faster one is
    included.
    """
    helpful = [number for number, row in enumerate(rows) if row.trial.is_faster and not row.is_on]
    helpful = [number for number in helpful if rows[number].trial.remedy.effect != TRAINING]
    chosen: list[int] = []
    chosen_settings: list[str] = []
    for number in sorted(helpful, key=lambda number: -ratio_value(rows[number])):
        settings = rows[number].trial.remedy.overrides
        if {override_key(setting) for setting in settings} & {
            override_key(setting) for setting in chosen_settings
        }:
            continue
        try:
            compose_config(replace_overrides(overrides, [*chosen_settings, *settings]))
        except ConfigError:
            continue
        chosen.append(number)
        chosen_settings += settings
    return chosen


def ratio_value(row: Row) -> float:
    return row.speedup_alone.value if row.speedup_alone is not None else 0.0


def is_skipped_for_time(row: Row) -> bool:
    return row.trial.reason == NO_TIME
