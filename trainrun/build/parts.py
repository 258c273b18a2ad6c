"""From config to `Parts`, on each rank: the only place that instantiates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from trainrun.build.backends import set_backends, set_threads
from trainrun.build.data import (
    applied,
    build_sources,
    build_transform,
    check_alike,
    check_classes,
    check_numbers,
    open_split,
)
from trainrun.build.memory import build_update
from trainrun.build.model import build_model, transform_model
from trainrun.build.optimizer import (
    SCHEDULE_KEYS,
    build_optimizer_of,
    build_schedule_of,
    describe_update,
    warmup_steps,
)
from trainrun.build.plan import (
    best_watch,
    build_fingerprint,
    build_rhythm,
    build_watch,
    default_monitor,
    keep_options,
    with_accumulation,
)
from trainrun.build.step import build_counting, build_log, build_stepper, checked_step, seen_step
from trainrun.cadence import Cadence, Limits, Rhythm
from trainrun.checkpoint.keep import Checkpoints
from trainrun.checkpoint.weights import load_initial
from trainrun.config import SAME, RunConfig
from trainrun.data.facts import facts_of_all
from trainrun.data.memory import host_memory
from trainrun.data.sequences.useful import Tally
from trainrun.data.skips import report_to
from trainrun.device_times import Copying, DeviceTimes
from trainrun.errors import ConfigError, PluginError
from trainrun.instantiate import bind_faults, build
from trainrun.interfaces import (
    ChecksModel,
    CountsSamples,
    DataFacts,
    Monitor,
    Parallel,
    Precision,
    RunFacts,
    counts_before,
)
from trainrun.ledger import Ledger
from trainrun.mishaps.nan_validation import likely_cause
from trainrun.mishaps.nonfinite import BadSteps
from trainrun.mishaps.retry import Retry
from trainrun.monitor.board import Board
from trainrun.optimizer.ema import Ema
from trainrun.parts import Parts
from trainrun.precision.amp import (
    PrecisionOptions,
    build_precision,
)
from trainrun.process.collector import Tidy
from trainrun.process.signals import StopFlag
from trainrun.rundir import RunDir
from trainrun.scheduler.schedule import Schedule
from trainrun.start.budget import Spent
from trainrun.start.compile_auto import with_scope
from trainrun.start.settle import Chosen, settled
from trainrun.task_calls import Place, TaskCalls
from trainrun.words.checks import parse_seconds

LANGUAGE_MODELING = "trainrun.task.language_modeling.LanguageModeling"


@dataclass(frozen=True)
class Site:
    """Where a run is built: its folder, its ranks, who may stop it, and who listens on rank 0.

    chosen: what the run began with, and after the build what was chosen for it. measures: whether by a clock.
    is_new: nothing of the run has been trained before, so its task is checked.
    """

    run: RunDir
    run_id: str
    parallel: Parallel
    stop: StopFlag
    monitors: list[Monitor]
    on_position: Callable[[int], None] | None = None
    on_log: Callable[[int], None] | None = None
    before_commit: Callable[[], None] | None = None
    init_from: str | None = None  # weights to begin with, where nothing is taken from a checkpoint
    ledger: Ledger = field(default_factory=Ledger)
    chosen: Chosen = field(default_factory=dict)
    measures: bool = False
    is_new: bool = False
    spent: Spent = field(default_factory=Spent)
    device_times: DeviceTimes | None = None


def check_targets(config: RunConfig) -> None:
    """Bind every open node to its target's signature; raise ConfigError with all faults together."""
    faults: list[str] = []
    data = config.data
    nodes = {"data.train": data.train, "data.val": data.val, "data.test": data.test, "model": config.model}
    nodes |= {"task": config.task, "data.collate_fn": data.collate_fn, "data.transform": data.transform}
    ours = {"data.val_transform": data.val_transform, "data.test_transform": data.test_transform}
    nodes |= {key: node for key, node in ours.items() if node != SAME}
    nodes |= {f"data.augment.{name}": node for name, node in data.augment.items()}
    for key, node in nodes.items():
        faults += bind_faults(node, key) if node else []
    if config.optimizer:
        faults += bind_faults(config.optimizer, "optimizer", ["params"])
    if config.scheduler:
        own = {name: value for name, value in config.scheduler.items() if name not in SCHEDULE_KEYS}
        faults += bind_faults(own, "scheduler", ["optimizer"]) if own.get("_target_") else []
    for name, node in config.monitor.listeners.items():
        faults += bind_faults(node, f"monitor.listeners.{name}")
    if faults:
        raise ConfigError(*faults)


def build_parts(config: RunConfig, site: Site) -> tuple[Parts, RunFacts]:
    """Everything of one rank, and the facts for the first lines on the screen."""
    notes = set_backends(config, site.parallel)
    check_targets(config)
    config = with_accumulation(config, site.parallel.world_size)
    sources = build_sources(config)
    facts = facts_of_all(sources, build_transform(config, "train"))
    check_alike(config, sources)
    report = report_to([monitor.on_note for monitor in site.monitors])
    tally, copying = Tally(), Copying(site.ledger, site.device_times)
    task = build_task(config, facts)
    sizes = task.sizes if isinstance(task, CountsSamples) and counts_before(task) else None
    train, val, test = (
        open_split(config, site.parallel, name, sources[name], notes, report, tally, copying, sizes)
        for name in sources
    )
    assert train is not None
    notes += filter(None, [applied(config)])
    check_numbers(config, sources)
    check_classes(config, facts, sources)
    rhythm = build_rhythm(config, train, val is not None)
    warmup_steps(config, rhythm)
    model = build_model(config, facts, site.parallel.device)
    if site.init_from is not None:
        notes.append(load_initial(model, site.init_from, site.parallel))
    config = with_scope(
        config, sum(p.numel() for p in model.parameters()), rhythm.total_steps, site.parallel.device, notes
    )
    set_threads(config, model, site.parallel.device, notes)
    if isinstance(task, ChecksModel):
        task.check_model(model)
    transform_model(config, model, site.parallel.device, notes)
    num_batches = math.inf if rhythm.total_steps is None else rhythm.total_steps * rhythm.accumulate
    with site.spent.more():
        config = settled(
            config, model, task, train, site.parallel, site.chosen, site.measures, num_batches, notes
        )
    guarded, more = build_precision(precision_options(config), model, site.parallel.device, site.ledger)
    notes += more
    wrapped = site.parallel.wrap(model)
    optimizer, precision = build_update(
        config, model, guarded, lambda: build_optimizer_of(config, model, site.parallel.world_size, notes)
    )
    schedule = build_schedule_of(config, optimizer, rhythm)
    ema = Ema(
        model, config.trainer.ema.enabled, config.trainer.ema.decay, config.trainer.ema.update_every_n_steps
    )
    why_nan = None if val is None else partial(likely_cause, ema.module, val)
    board = build_board(config, site, schedule, rhythm, task, tally, why_nan)
    compile_log = build_log(board, site.ledger)
    default_metric = default_monitor(task, val is not None)
    checkpoints = build_checkpoints(config, site, default_metric, board.note)
    retry, bad_steps = build_rescue(config, site, model, task, precision, board.note)
    cadence = Cadence(
        Limits(config.trainer.max_steps, config.trainer.max_epochs, parse_seconds(config.trainer.max_time)),
        rhythm, build_watch(config, default_metric), best_watch(config, default_metric), schedule, site.stop,
        precision.failure, checkpoints.time_request, bad_steps,
    )  # fmt: skip
    calls = build_task_calls(config, site, task, model)
    counting = build_counting(config, model, task, site.parallel, site.ledger)
    stepper = build_stepper(config, guarded, site.parallel.device, compile_log)
    stepper = seen_step(config, stepper, site.parallel.device, site.device_times, board.note)
    parts = Parts(
        config, model, wrapped, task, calls, optimizer, schedule, precision, site.parallel, ema, retry,
        train, val, test, cadence, checkpoints, board, facts, site.ledger,
        checked_step(stepper, site.is_new and config.trainer.check_task, task), compile_log, counting, tally.planned,
    )  # fmt: skip
    return parts, run_facts(parts, site, rhythm, notes)


def build_board(
    config: RunConfig, site: Site, schedule: Schedule, rhythm: Rhythm, task: Any, tally: Tally,
    why_nan: Callable[[], str] | None,
) -> Board:  # fmt: skip
    between = config.trainer.python_gc == "between_steps"
    return Board(
        site.parallel, site.monitors, lambda: schedule.lr, rhythm.steps_per_epoch, rhythm.accumulate,
        rhythm.log_every is not None, site.on_position, site.on_log, unit_of(task), Tidy() if between else None, tally,
        site.ledger, task, why_nan,
    )  # fmt: skip


def build_checkpoints(
    config: RunConfig, site: Site, default_metric: str | None, note: Callable[[str], None]
) -> Checkpoints:
    return Checkpoints(
        site.run.checkpoints, site.run_id, keep_options(config, default_metric), site.parallel,
        build_fingerprint(config, site.parallel), note, lambda: host_memory().free,
        before_commit=site.before_commit,
    )  # fmt: skip


def build_rescue(
    config: RunConfig,
    site: Site,
    model: nn.Module,
    task: Any,
    precision: Precision,
    note: Callable[[str], None],
) -> tuple[Retry, BadSteps]:
    """What is done about a window that ran out of memory, and about one that was not finite."""
    trainer = config.trainer
    mends = trainer.nan_policy == "skip"
    retry = Retry(trainer.out_of_memory, model, task, site.parallel, note, mends)
    place = site.run.nonfinite
    return retry, BadSteps(
        trainer.nan_policy, trainer.max_rollbacks, place, site.parallel, precision, retry, note
    )


def build_task(config: RunConfig, facts: DataFacts) -> Any:
    """One that takes `bytes_per_token`, and is given none, gets it from the data, where they say it."""
    node = dict(config.task)
    takes = "bytes_per_token" in node or node.get("_target_") == LANGUAGE_MODELING
    if takes and node.get("bytes_per_token") is None:
        node["bytes_per_token"] = facts.bytes_per_token
    task = build(node, "task")
    if not callable(getattr(task, "step", None)):
        raise PluginError(
            f"task: {type(task).__name__} has no method step; a task has step(model, batch) -> StepOutput and "
            "count(batch) -> int, or gives count= with each StepOutput"
        )
    return task


def build_task_calls(config: RunConfig, site: Site, task: Any, model: nn.Module) -> TaskCalls:
    """Raises ConfigError if the steps are to be one graph, and this task's cannot."""
    place = Place(config.seed or 0, site.parallel.rank, site.parallel.device)
    calls = TaskCalls(task, model, place, None if site.parallel.rank else site.run.pictures)
    reason = calls.obstacle()
    if reason and config.trainer.compile.scope == "step":
        raise ConfigError(
            f"trainer.compile.scope=step: {type(task).__name__} {reason}, and a graph would freeze that; use "
            "trainer.compile.scope=model"
        )
    if reason and config.trainer.cuda_graphs:
        raise ConfigError(
            f"trainer.cuda_graphs=true: {type(task).__name__} {reason}, and a graph would freeze that; use "
            "trainer.cuda_graphs=false"
        )
    return calls


def unit_of(task: Any) -> str:
    """What the task counts: `tokens` where it says so, in its attribute `unit`."""
    unit = getattr(task, "unit", "samples")
    if unit not in ("samples", "tokens"):
        raise PluginError(f"task: {type(task).__name__}.unit={unit!r}: must be 'samples' or 'tokens'")
    return str(unit)


def precision_options(config: RunConfig) -> PrecisionOptions:
    trainer = config.trainer
    return PrecisionOptions(
        config.precision.mode, trainer.gradient_clip_val, trainer.gradient_clip_algorithm, trainer.nan_policy,
        trainer.cpu_offload, config.precision.master_weights,
    )  # fmt: skip


def run_facts(parts: Parts, site: Site, rhythm: Rhythm, notes: list[str]) -> RunFacts:
    config, parameters = parts.config, list(parts.model.parameters())
    return RunFacts(
        name=config.run_name or "run",
        folder=str(site.run.root),
        device=str(site.parallel.device),
        world_size=site.parallel.world_size,
        batch_size=config.data.batch_size,
        accumulate=rhythm.accumulate,
        num_train=parts.train.num_samples,
        num_val=parts.val.num_samples if parts.val is not None else None,
        steps_per_epoch=rhythm.steps_per_epoch,
        total_steps=rhythm.total_steps,
        total_epochs=config.trainer.max_epochs,
        model_summary=f"{type(parts.model).__name__} ({', '.join(name for name, _ in parts.model.named_children())})",
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        choices=tuple(notes),
        update=describe_update(config, parts.schedule),
    )
