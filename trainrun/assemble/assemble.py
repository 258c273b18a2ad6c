"""Build the `Components` of one rank from its config. `build_components` lists the stages in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainrun.assemble.backends import set_backends, set_threads
from trainrun.assemble.data_pipeline import (
    TrainingNames,
    build_sources,
    build_split_options,
    check_labels_fit,
    check_same_inputs,
    describe_sources,
    describe_transforms,
    format_split_key,
    is_classification,
)
from trainrun.assemble.model_and_transforms import (
    apply_built_in_techniques,
    build_transformed_model,
    check_model_settings,
    resolve_compile_scope,
    split_model_settings,
)
from trainrun.assemble.optimizer_and_schedule import (
    build_config_optimizer,
    build_config_schedule,
    build_named_optimizers,
    check_update_nodes,
    count_warmup_steps,
    describe_unfinished_schedule,
    describe_update,
)
from trainrun.assemble.resumption import attach_task_teacher
from trainrun.assemble.run_plan import (
    build_best_tracker,
    build_early_stopping_tracker,
    build_fingerprint,
    build_intervals,
    build_keep_options,
    build_limits,
    choose_default_metric,
    collect_order_settings,
    convert_warmup_to_steps,
    measure_lengths,
    set_accumulation,
)
from trainrun.assemble.start_choices import Chosen, resolve_precision_and_threads, set_output_memory_limit
from trainrun.assemble.step_function import (
    add_first_step_check,
    add_layer_table,
    build_compile_log,
    build_step,
    check_task_before_sharding,
    choose_accumulation_function,
    choose_item_counting,
)
from trainrun.assemble.unread_settings import check_nodes_are_read
from trainrun.checkpoint.manager import CheckpointManager
from trainrun.config.saved_values import separate_secrets
from trainrun.config.schema import DISTILLATION, SAME, RunConfig, convert_to_plain_values, validation_nodes
from trainrun.data.facts import collect_facts, describe_classes
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import SourceStates, StreamOptions, TokenCounter, build_report
from trainrun.errors import ConfigError, PluginError
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.hook.histograms import Histograms
from trainrun.instantiate import build_node, check_node_arguments, named_nodes
from trainrun.interfaces import (
    Batches,
    ChecksModel,
    CountsSamples,
    DataFacts,
    Monitor,
    Parallel,
    Precision,
    RunFacts,
    has_count_method,
    runs_rank_zero_forwards,
)
from trainrun.model.choices import WORDS
from trainrun.monitor.metric_logger import MetricLogger
from trainrun.optimizer.ema import Ema, OptimizerAverage
from trainrun.optimizer.plain_step import list_switching_optimizers
from trainrun.precision.autocast import PrecisionOptions, build_precision
from trainrun.precision.update import Update
from trainrun.runtime.collector import LogPointCollector
from trainrun.runtime.machine import read_host_memory
from trainrun.runtime.signals import StopFlag
from trainrun.scheduler.schedule import Schedule
from trainrun.task.losses import compute_balanced_weights
from trainrun.task.metrics.directions import describe_assumed_direction
from trainrun.timing.phases import COPY, PhaseTimer
from trainrun.train_state import StartPosition, TrainState
from trainrun.training.components import Components
from trainrun.training.named_optimizers import JoinedOptimizers, JoinedPrecision, JoinedSchedules
from trainrun.training.recovery.nonfinite import NonfiniteStepHandler, find_likely_cause
from trainrun.training.recovery.oom import OomRetry
from trainrun.training.task_calls import Hooks, RunPosition, TaskCalls
from trainrun.training.trained_parameters import TrainedParameters
from trainrun.training.triggers import Intervals, Triggers

if TYPE_CHECKING:
    from trainrun.data.order.drawn import WeightedSamples
    from trainrun.hook.unfreeze import Unfreeze
    from trainrun.training.named_optimizers import JoinedSchedules, NamedOptimizer
LANGUAGE_MODELING = "trainrun.task.language_modeling.LanguageModeling"


@dataclass(frozen=True)
class RunContext:
    """The environment of a run: its folder, its ranks, its stop flag, and the monitors of rank 0.

    chosen: the automatic choices; a resumed run starts with those of the earlier session. measures: whether choices may
        be measured. is_new: whether nothing was trained before, so that the task is checked. trains: False for an
        evaluation.
    """

    run: RunDir
    run_id: str
    parallel: Parallel
    stop: StopFlag
    monitors: list[Monitor]
    on_position: Callable[[int], None] | None = None
    on_log: Callable[[int], None] | None = None
    before_commit: Callable[[], None] = lambda: None
    write: Callable[[Mapping[str, Any]], None] | None = None
    init_from: str | None = None  # weights to begin with, where nothing is taken from a checkpoint
    phases: PhaseTimer = field(default_factory=PhaseTimer)
    chosen: Chosen = field(default_factory=dict)
    measures: bool = False
    is_new: bool = False
    trains: bool = True
    trained: TrainingNames | None = None  # names that a checkpoint holds, where a saved run is evaluated
    start: StartPosition | None = None  # where a resumed run continues


def check_targets(config: RunConfig) -> None:
    """Bind the arguments of every `_target_` node to the signature of its target. Raise ConfigError with all
    faults.
    """
    faults: list[str] = []
    for key, node in list_complete_nodes(config).items():
        if node:
            faults += check_node_arguments(node, key)
    model_arguments, _ = split_model_settings(config.model)
    faults += check_node_arguments(model_arguments, "model", also=WORDS)
    if not faults:
        faults += check_model_settings(config)
    faults += check_update_nodes(config)
    for name, node in config.transform.items():
        faults += check_node_arguments(node, f"transform.{name}", ["model"])
    if faults:
        raise ConfigError(*faults)


def list_complete_nodes(config: RunConfig) -> dict[str, Any]:
    """Return the nodes whose targets get no argument but those of the node, by key."""
    data = config.data
    named_sets = {f"data.train.{name}": node for name, node in named_nodes(data.train).items()}
    nodes: dict[str, Any] = named_sets or {"data.train": data.train}
    for split, node in validation_nodes(data).items():
        nodes[format_split_key(split)] = node
    nodes |= {"data.test": data.test, "data.collate_fn": data.collate_fn, "task": config.task}
    for name in ("transform", "val_transform", "test_transform"):
        transform = getattr(data, name)
        if transform != SAME:
            nodes[f"data.{name}"] = transform
    named = {"data.augment": data.augment, "monitor": config.monitor.listeners, "hook": config.hook}
    for section, inner_nodes in named.items():
        nodes |= {f"{section}.{name}": node for name, node in inner_nodes.items()}
    return nodes


@dataclass(frozen=True)
class StartNotes:
    """Lines that are shown when a run starts. choices: automatic decisions. advice: what a user should know or
    change.
    """

    choices: list[str]
    advice: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DataSets:
    """The data sets by split. drawn: how often each training sample is drawn. splits: how each split is read."""

    sources: dict[str, Any]
    drawn: WeightedSamples | None
    splits: dict[str, StreamOptions]
    facts: DataFacts


@dataclass(frozen=True)
class DataParts:
    """The batches of each split. tokens: the counter of training tokens. places: the positions in the training
    sources.
    """

    train: Batches
    validation: dict[str, Batches]
    test: Batches | None
    tokens: TokenCounter
    places: SourceStates


@dataclass(frozen=True)
class UpdateParts:
    """The parts that change the weights.

    wrapped: the model as wrapped by the parallel backend. optimizers: the named optimizers; {} if there is a single
        one.
    """

    wrapped: nn.Module
    held: nn.Module
    optimizer: Optimizer
    schedule: Schedule | JoinedSchedules
    precision: Precision
    optimizers: dict[str, NamedOptimizer]
    average: Ema | OptimizerAverage | None


def build_components(config: RunConfig, context: RunContext) -> tuple[Components, RunFacts]:
    """Build all parts of one rank, stage by stage. Return them with the facts that a run shows when it starts."""
    notes = StartNotes(choices=set_backends(config, context.parallel))
    check_targets(config)
    config = resolve_data_settings(config, context, notes)
    data_sets = load_data_sets(config, context, notes)
    task = build_task(config, data_sets.facts)
    data = open_data(config, context, data_sets, task, notes)
    config, rhythm = plan_intervals(config, context, data_sets, data, task)
    model, unfreeze, base = build_transformed_model(
        config, data_sets.facts, context.parallel, context.init_from, notes.choices, notes.advice
    )
    config = prepare_model_and_precision(config, context, data_sets, data, task, model, rhythm, notes)
    update = build_update(config, context, data, task, model, rhythm, notes)
    monitors = build_monitors(config, context, data, task, model, update, rhythm)
    checkpoints = build_checkpoints(config, context, data_sets, data, task, rhythm, monitors, notes)
    retry = build_retry(config, context, task, model, monitors)
    triggers = build_triggers(config, context, data, task, update, rhythm, checkpoints, monitors, retry)
    calls = build_task_calls(config, context, task, model)
    counting = choose_item_counting(config, update.held, task, context.parallel, context.phases)
    compile_log = build_compile_log(config, monitors, context.phases)
    step, own_step = build_step(config, task, calls, context.parallel.device, compile_log)
    step = add_layer_table(config, step)
    is_checked = config.trainer.check_task and context.is_new and not context.parallel.forward_is_collective
    step = add_first_step_check(step, is_checked, task, model)
    hooks = build_hooks(config, context, unfreeze)
    check_nodes_are_read(config, data_sets.sources)
    run = Components(
        config=config, model=model, wrapped=update.wrapped, held=update.held, task=task, task_calls=calls,
        optimizer=update.optimizer, schedule=update.schedule, precision=update.precision,
        parallel=context.parallel, ema=update.average,
        retry=retry, train=data.train, validation=data.validation, test=data.test, triggers=triggers,
        checkpoints=checkpoints, monitors=monitors, data_facts=data_sets.facts, phases=context.phases, step=step,
        accumulate=choose_accumulation_function(retry, counting), compile_log=compile_log, counting=counting,
        hooks=hooks, optimizers=update.optimizers, own_step=own_step,
        trained=TrainedParameters(model, update.held, update.optimizer), places=data.places,
        order=collect_order_settings(config, context.parallel.world_size, data_sets.drawn), base=base,
    )  # fmt: skip
    calls.after_user_code = run.after_user_code
    for optimizer in update.optimizers.values():
        optimizer.show = run.call_gradient_hooks
    return run, build_run_facts(run, context, rhythm, notes)


def resolve_data_settings(config: RunConfig, context: RunContext, notes: StartNotes) -> RunConfig:
    """Return the config with the number of micro-batches, and with a tokenizer trained for the run if it needs one."""
    config = set_accumulation(config, context.parallel.world_size)
    if "bpe:" not in str(config.data.train):
        return config
    from trainrun.sampling.run_tokenizer import apply_run_tokenizer

    return apply_run_tokenizer(config, context.run, context.parallel, notes.choices)


def load_data_sets(config: RunConfig, context: RunContext, notes: StartNotes) -> DataSets:
    """Load the data sets, and read one sample of each. Raise ConfigError if splits have inputs of different types."""
    sources, drawn = build_sources(config, notes.advice, context.trained)
    report = build_report([monitor.on_note for monitor in context.monitors])
    splits = build_split_options(config, context.parallel, sources, report, drawn)
    if not context.trains:  # new samples to predict may be fewer than a batch of the training had
        splits["train"] = replace(splits["train"], may_shrink=True)
    check_same_inputs(config, sources, splits)
    facts = add_trained_classes(collect_facts(sources, splits["train"]), context)
    notes.advice.extend(describe_sources(config, sources, splits, context.is_new))
    return DataSets(sources, drawn, splits, facts)


def add_trained_classes(facts: DataFacts, context: RunContext) -> DataFacts:
    """Return the facts with the classes, or the number of outputs, of the training if the data has no targets."""
    trained = context.trained
    if trained is None or facts.class_names:
        return facts
    number = (
        facts.num_classes
        or len(trained.classes)
        or read_identity(context.run).get("data", {}).get("num_classes")
    )
    return replace(facts, class_names=tuple(trained.classes), num_classes=number)


def open_data(
    config: RunConfig, context: RunContext, data_sets: DataSets, task: Any, notes: StartNotes
) -> DataParts:
    """Open the batches of every split that has data."""
    tokens, places = TokenCounter(), SourceStates()
    copying = None if context.parallel.device.type == "cpu" else partial(context.phases.measure, COPY)
    sizes = task.sizes if isinstance(task, CountsSamples) and has_count_method(task) else None
    options = replace(data_sets.splits["train"], tally=tokens, copying=copying, sizes=sizes, places=places)
    train, note = open_batches(data_sets.sources["train"], options)
    notes.choices.extend(note.splitlines())
    others: dict[str, Batches] = {}
    for name, split_options in data_sets.splits.items():
        if name != "train":
            options = replace(split_options, sizes=sizes, beside=train.read_by)
            others[name], note = open_batches(data_sets.sources[name], options)
            notes.choices.extend(note.splitlines())
    notes.choices.extend(filter(None, [describe_transforms(config, data_sets.sources)]))
    test = others.pop("test", None)
    check_labels_fit(config, data_sets.facts, data_sets.sources)
    return DataParts(train, others, test, tokens, places)


def plan_intervals(
    config: RunConfig, context: RunContext, data_sets: DataSets, data: DataParts, task: Any
) -> tuple[RunConfig, Intervals]:
    """Return the config with its warm-up in steps, and the intervals of the run."""
    parallel = context.parallel
    lengths = measure_lengths(config, data.train, data_sets.sources["train"], task, parallel.world_size)
    rhythm = build_intervals(config, lengths, task, bool(data.validation), parallel.rank, context.start)
    config = convert_warmup_to_steps(config, lengths, task)
    count_warmup_steps(config, rhythm)
    return config, rhythm


def prepare_model_and_precision(
    config: RunConfig, context: RunContext, data_sets: DataSets, data: DataParts, task: Any, model: nn.Module,
    rhythm: Intervals, notes: StartNotes,
) -> RunConfig:  # fmt: skip
    """Apply the built-in techniques to the model in place. Return the config with every `auto` resolved."""
    parallel, device, total_steps = context.parallel, context.parallel.device, rhythm.total_steps
    if config.trainer.compile.scope == "auto":
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        config = resolve_compile_scope(config, num_weights, total_steps, device, notes.choices)
    set_threads(config, model, device, notes.choices)
    if isinstance(task, ChecksModel):
        task.check_model(model)
    if context.trains and config.task.get("_target_") == DISTILLATION:
        notes.choices.append(
            attach_task_teacher(config, parallel, task, model, data_sets.sources["train"], rhythm)
        )
    with parallel.model_init_context():
        apply_built_in_techniques(config, model, device, notes.choices)
    num_batches = math.inf if total_steps is None else total_steps * rhythm.accumulate
    config = resolve_precision_and_threads(
        config,
        model,
        task,
        data.train,
        parallel,
        context.chosen,
        context.measures and not config.parallel.meta_device,
        num_batches,
        notes.choices,
    )
    set_output_memory_limit(task, model, parallel, context.chosen)
    return config


def build_update(
    config: RunConfig, context: RunContext, data: DataParts, task: Any, model: nn.Module, rhythm: Intervals,
    notes: StartNotes,
) -> UpdateParts:  # fmt: skip
    """Build the update with its optimizers and schedules, and the averaged weights."""
    parallel, options = context.parallel, build_precision_options(config)
    guarded, lines = build_precision(options, model, parallel.device, context.phases, parallel)
    notes.choices.extend(lines)
    is_checked = context.is_new and config.trainer.check_task and not config.step
    if is_checked and parallel.forward_is_collective and not config.parallel.meta_device:
        alone = build_precision(options, model, parallel.device, context.phases)[0]
        counting = choose_item_counting(config, model, task, parallel, context.phases)
        check_task_before_sharding(task, model, data.train, parallel, alone, counting, notes.advice.append)
    wrapped = parallel.wrap(model)
    held = parallel.local_model(model)
    if not named_nodes(config.optimizer):
        optimizer = build_config_optimizer(config, held, parallel.world_size, notes.choices)
        schedule = build_config_schedule(config, optimizer, rhythm)
        average = build_average(config, held, optimizer)
        return UpdateParts(wrapped, held, optimizer, schedule, guarded, {}, average)

    def build_guard(params: nn.Module) -> Update:
        return build_precision(options, params, parallel.device, context.phases)[0]

    named = build_named_optimizers(config, model, rhythm, notes.choices, build_guard)
    step_together = not (config.step or config.loop)
    joined = JoinedOptimizers(named)
    precision = guarded if step_together else JoinedPrecision(named, guarded)
    average = build_average(config, model, joined)
    return UpdateParts(
        wrapped, held, joined, JoinedSchedules(named, step_together), precision, named, average
    )


def build_average(config: RunConfig, model: nn.Module, optimizer: Optimizer) -> Ema | OptimizerAverage | None:
    """Return the averaged weights that evaluations use; None without any.

    They come from `trainer.ema`, or from an optimizer that averages the weights itself.
    """
    switching, wanted = list_switching_optimizers(optimizer), config.trainer.ema
    for switching_optimizer in switching:
        switching_optimizer.train()
    if wanted.enabled:
        return Ema(model, wanted.decay, wanted.update_every_n_steps)
    if not switching:
        return None
    return OptimizerAverage(model, switching)


def build_monitors(
    config: RunConfig, context: RunContext, data: DataParts, task: Any, model: nn.Module, update: UpdateParts,
    rhythm: Intervals,
) -> MetricLogger:  # fmt: skip
    """Build the metric logger, which sends its rows to the monitors of rank 0."""

    def find_nan_cause() -> str:
        average = update.average
        with nullcontext() if average is None else average.swap_weights_in():
            return find_likely_cause(model, next(iter(data.validation.values())))

    return MetricLogger(
        context.parallel, context.monitors, lambda: update.schedule.rates, rhythm.steps_per_epoch, rhythm.accumulate,
        rhythm.log_every is not None, context.on_position, context.on_log, read_task_unit(task),
        rhythm.lengths.samples_per_step, LogPointCollector(), data.tokens, context.phases, task,
        find_nan_cause if data.validation else None, context.write,
    )  # fmt: skip


def build_checkpoints(
    config: RunConfig, context: RunContext, data_sets: DataSets, data: DataParts, task: Any, rhythm: Intervals,
    monitors: MetricLogger, notes: StartNotes,
) -> CheckpointManager:  # fmt: skip
    """Build the checkpoint manager. Add advice about the metric that chooses the best checkpoint."""
    default_metric = choose_default_metric(task, list(data.validation))
    notes.advice.extend(describe_validation(config, context.trains, default_metric, list(data.validation)))
    keep = build_keep_options(config, default_metric, rhythm.lengths, task)
    metrics = {keep.monitor, config.trainer.early_stopping.monitor} - {None}
    if not all(str(name).endswith(("/loss", "/acc")) for name in metrics):
        notes.advice.extend(filter(None, [describe_assumed_direction(config, default_metric)]))
    fingerprint = build_fingerprint(config, context.parallel, data_sets.sources["train"], data_sets.drawn)
    mirror = None
    url = config.checkpoint.mirror
    if url is not None and context.trains and context.parallel.rank == 0:
        from trainrun.mirror.object_store_mirror import ObjectStoreMirror  # needs an optional package

        mirror = ObjectStoreMirror(url, config.checkpoint.mirror_keep, context.run_id)
    return CheckpointManager(
        context.run.checkpoints, context.run_id, keep, context.parallel, fingerprint, monitors.note,
        lambda: read_host_memory().free, before_commit=context.before_commit, mirror=mirror,
    )  # fmt: skip


def describe_validation(
    config: RunConfig, trains: bool, default_metric: str | None, names: list[str]
) -> list[str]:
    """Return advice about the validation: that there is none, or which metric chooses the best checkpoint."""
    if trains and not names and config.trainer.limit_val_batches == 0:
        return ["trainer.limit_val_batches=0: nothing is validated, so there is no best"]
    if trains and not names:
        return ["no validation data, so no best; use data.val._target_=... or data.folds=5 data.fold=0"]
    best = config.checkpoint.monitor or f"{default_metric} (the default, as of early stopping)"
    return [f"validation: {', '.join(names)}; best is by {best}"] if len(names) > 1 else []


def build_retry(
    config: RunConfig, context: RunContext, task: Any, model: nn.Module, monitors: MetricLogger
) -> OomRetry:
    """Build the runner that repeats a step in smaller micro-batches if memory runs out."""
    trainer = config.trainer
    mends = trainer.nan_policy == "skip"
    return OomRetry(trainer.out_of_memory, model, task, context.parallel, monitors.note, mends=mends)


def build_triggers(
    config: RunConfig, context: RunContext, data: DataParts, task: Any, update: UpdateParts, rhythm: Intervals,
    checkpoints: CheckpointManager, monitors: MetricLogger, retry: OomRetry,
) -> Triggers:  # fmt: skip
    """Build the triggers, which decide after each step whether to log, validate, save or stop."""
    default_metric = choose_default_metric(task, list(data.validation))
    return Triggers(
        build_limits(config, rhythm.lengths, task), rhythm, build_early_stopping_tracker(config, default_metric),
        build_best_tracker(config, default_metric), update.schedule.on_validation, context.stop,
        update.precision.failure, checkpoints.save_status,
        build_nonfinite_handler(config, context, update.precision, retry, monitors.note),
    )  # fmt: skip


def build_nonfinite_handler(
    config: RunConfig, context: RunContext, precision: Precision, retry: OomRetry, note: Callable[[str], None]
) -> Callable[[TrainState, str], None]:
    """Return the function that handles a step whose gradients are not finite."""
    trainer = config.trainer

    @cache
    def build_bad_steps() -> NonfiniteStepHandler:
        folder = context.run.nonfinite
        return NonfiniteStepHandler(trainer.nan_policy, folder, context.parallel, precision, retry, note)

    return lambda state, failure: build_bad_steps()(state, failure)


def build_task_calls(config: RunConfig, context: RunContext, task: Any, model: nn.Module) -> TaskCalls:
    """Build the object that calls the task's optional methods. On rank 0 it writes the task's images."""
    parallel = context.parallel
    place = RunPosition(config.seed or 0, parallel.rank, parallel.device)
    file = None if parallel.rank else context.run.pictures
    return TaskCalls(task, model, place, file, runs_rank_zero_forwards(parallel))


def build_hooks(config: RunConfig, context: RunContext, unfreeze: Unfreeze | None) -> Hooks:
    """Build the hooks of the config, and those that other settings require."""
    hooks = {f"hook.{name}": build_node(node, f"hook.{name}") for name, node in config.hook.items()}
    if unfreeze is not None:
        hooks["model.freeze"] = unfreeze
    if config.monitor.samples_every is not None:
        from trainrun.sampling.epoch_samples import EpochSamples

        hooks["monitor.samples_every"] = EpochSamples(config, context.run)
    if every := config.monitor.histograms_every_n_steps:
        hooks["monitor.histograms_every_n_steps"] = Histograms(every)
    return Hooks(hooks)


def build_task(config: RunConfig, facts: DataFacts) -> Any:
    """Build the task. Raise PluginError if it has no method `step`.

    The data provides `bytes_per_token`, and `class_weights` if they are `balanced`.
    """
    node = dict(config.task)
    takes = "bytes_per_token" in node or node.get("_target_") == LANGUAGE_MODELING
    if takes and node.get("bytes_per_token") is None:
        node["bytes_per_token"] = facts.bytes_per_token
    if node.get("class_weights") == "balanced":
        node["class_weights"] = compute_balanced_weights(facts.class_counts)
    task = build_node(node, "task")
    if not callable(getattr(task, "step", None)):
        raise PluginError(
            f"task: {type(task).__name__} has no method step; a task has step(model, batch) -> StepOutput and "
            "count(batch) -> int, or gives count= with each StepOutput"
        )
    return task


def read_task_unit(task: Any) -> str:
    """Return the unit of the task's items: its attribute `unit` (samples, tokens or pixels), or samples without one."""
    unit = getattr(task, "unit", "samples")
    if unit not in ("samples", "tokens", "pixels"):
        raise PluginError(
            f"task: {type(task).__name__}.unit={unit!r}: must be 'samples', 'tokens' or 'pixels'"
        )
    return str(unit)


def build_precision_options(config: RunConfig) -> PrecisionOptions:
    """Return the settings that precision and the update need."""
    trainer = config.trainer
    clip_algorithm = "norm" if trainer.gradient_clip_val is None else trainer.gradient_clip_algorithm
    return PrecisionOptions(
        config.precision.mode, trainer.gradient_clip_val, clip_algorithm, trainer.nan_policy
    )  # fmt: skip


def sum_if_known(numbers: Sequence[int | None]) -> int | None:
    """Return the sum of the numbers; None if there are none, or if one of them is None."""
    known_numbers = [number for number in numbers if number is not None]
    return sum(known_numbers) if numbers and len(known_numbers) == len(numbers) else None


def build_run_facts(run: Components, context: RunContext, rhythm: Intervals, notes: StartNotes) -> RunFacts:
    """Return the facts of a run that its monitors receive at the start."""
    config, parameters = run.config, list(run.model.parameters())
    cut = describe_unfinished_schedule(config, run.triggers.max_seconds, rhythm)
    return RunFacts(
        name=config.run_name or "run",
        folder=str(context.run.root),
        device=str(context.parallel.device),
        world_size=context.parallel.world_size,
        batch_size=config.data.batch_size,
        accumulate=rhythm.accumulate,
        num_train=run.train.num_samples,
        num_val=sum_if_known([stream.num_samples for stream in run.validation.values()]),
        steps_per_epoch=rhythm.steps_per_epoch,
        total_steps=rhythm.total_steps,
        total_epochs=config.trainer.max_epochs,
        model_summary=type(run.model).__name__,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sample_every=rhythm.sample_every,
        max_seconds=run.triggers.max_seconds,
        choices=tuple(notes.choices),
        advice=(*notes.advice, *filter(None, [cut])),
        update=describe_update(config, run.schedule),
        classes=describe_classes(run.data_facts) if is_classification(config) else "",
        run_id=context.run_id,
        config=convert_to_plain_values(separate_secrets(config)[0]),
        monitor=run.triggers.best.metric,
        mode=run.triggers.best.mode,
    )
