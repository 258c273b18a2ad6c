"""From config to `Components`, on each rank: the only place that instantiates."""

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
    applied,
    build_sources,
    check_alike,
    check_labels_fit,
    describe_sources,
    options_of_splits,
    split_key,
)
from trainrun.assemble.model_and_transforms import (
    apply_built_in,
    build_changed,
    faults_of_words,
    split_words,
    with_scope,
)
from trainrun.assemble.optimizer_and_schedule import (
    CONSTANT,
    SCHEDULE_KEYS,
    build_named,
    build_optimizer_of,
    build_schedule_of,
    describe_update,
    optimizer_faults,
    planned_beyond,
    warmup_steps,
)
from trainrun.assemble.run_plan import (
    best_watch,
    build_fingerprint,
    build_limits,
    build_rhythm,
    build_watch,
    default_monitor,
    keep_options,
    lengths_of,
    order_facts,
    with_accumulation,
    with_warmup_in_steps,
)
from trainrun.assemble.start_choices import Chosen, decide_numbers, limit_outputs
from trainrun.assemble.step_function import (
    add_layer_table,
    build_accumulate,
    build_counting,
    build_log,
    build_step,
    checked_step,
)
from trainrun.assemble.unread_settings import check_nodes_are_read
from trainrun.checkpoint.manager import CheckpointManager, KeepOptions
from trainrun.config.saved_values import public
from trainrun.config.schema import DISTILLATION, SAME, RunConfig, plain_values, validation_nodes
from trainrun.data.facts import describe_classes, facts_of_all
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import SourceStates, StreamOptions, TokenCounter, report_to
from trainrun.errors import ConfigError, PluginError
from trainrun.folder.run_folder import RunDir
from trainrun.instantiate import bind_faults, build, named_nodes
from trainrun.interfaces import (
    Batches,
    ChecksModel,
    CountsSamples,
    DataFacts,
    Monitor,
    Parallel,
    Precision,
    RunFacts,
    counts_before,
)
from trainrun.model.choices import WORDS
from trainrun.monitor.metric_logger import MetricLogger
from trainrun.optimizer.ema import Ema
from trainrun.optimizer.plain_step import switching_optimizers
from trainrun.precision.autocast import PrecisionOptions, build_precision
from trainrun.precision.update import Update
from trainrun.runtime.collector import Tidy
from trainrun.runtime.machine import host_memory
from trainrun.runtime.signals import StopFlag
from trainrun.scheduler.build_schedule import LENGTHS
from trainrun.scheduler.schedule import Schedule
from trainrun.task.losses import balanced_weights
from trainrun.task.metrics.directions import taken_as_larger
from trainrun.timing.phases import COPY, PhaseTimer
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.named_optimizers import JoinedOptimizers, JoinedPrecision, JoinedSchedules
from trainrun.training.recovery.oom import OomRetry
from trainrun.training.task_calls import Hooks, Place, TaskCalls
from trainrun.training.trained_parameters import TrainedParameters
from trainrun.training.triggers import Intervals, Triggers

if TYPE_CHECKING:
    from trainrun.data.order.drawn import Drawn
    from trainrun.hook.unfreeze import Unfreeze
    from trainrun.optimizer.own_average import OwnAverage
    from trainrun.training.named_optimizers import JoinedSchedules, NamedOptimizer
    from trainrun.training.recovery.nonfinite import BadSteps

LANGUAGE_MODELING = "trainrun.task.language_modeling.LanguageModeling"


@dataclass(frozen=True)
class RunContext:
    """Where a run is built: its folder, its ranks, who may stop it, and who listens on rank 0.

    chosen: what the run began with, and after the build what was chosen for it. measures: whether by a clock.
    is_new: nothing of the run has been trained before, so its task is checked. trains: false to evaluate alone.
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
    typed: Sequence[str] = ()  # settings of the command line, which some code must read
    trained: TrainingNames | None = None  # names that a checkpoint holds, where a saved run is evaluated


def check_targets(config: RunConfig) -> None:
    """Bind every open node to its target's signature; raise ConfigError with all faults together."""
    data = config.data
    transforms = {name: getattr(data, name) for name in ("transform", "val_transform", "test_transform")}
    nodes: dict[str, Any] = {
        **dict(_one_or_named("data.train", data.train)),
        "data.test": data.test,
    }
    nodes |= {split_key(split): node for split, node in validation_nodes(data).items()}
    nodes |= {"task": config.task, "data.collate_fn": data.collate_fn}
    nodes |= {f"data.{name}": node for name, node in transforms.items() if node != SAME}
    nodes |= {f"data.augment.{name}": node for name, node in data.augment.items()}
    nodes |= {f"monitor.{name}": node for name, node in config.monitor.listeners.items()}
    nodes |= {f"hook.{name}": node for name, node in config.hook.items()}
    faults = [fault for key, node in nodes.items() if node for fault in bind_faults(node, key)]
    faults += bind_faults(split_words(config.model)[0], "model", also=WORDS)
    faults = faults or faults_of_words(config)
    for key, node in _one_or_named("optimizer", config.optimizer):
        faults += optimizer_faults(key, node)
    for key, node in _one_or_named("scheduler", config.scheduler):
        own = {name: value for name, value in node.items() if name not in SCHEDULE_KEYS}
        if own.get("_target_") and own != CONSTANT:
            filled = tuple(f"{key}.{name}: {own['_target_']} needs it" for name in LENGTHS)  # in, by the run
            found = bind_faults(own, key, ["optimizer"], SCHEDULE_KEYS)
            if any(".optimizer: torch." in fault for fault in found):
                found = [
                    f"{key}: a schedule of schedules is built by a function (optimizer) of your own; name it, as "
                    f"{key}._target_=my_file.my_schedule"
                ]
            faults += [fault for fault in found if not fault.startswith(filled)]
    for name, node in config.transform.items():
        faults += bind_faults(node, f"transform.{name}", ["model"])
    if faults:
        raise ConfigError(*faults)


def _one_or_named(key: str, node: Any) -> list[tuple[str, dict[str, Any]]]:
    """The node with its key, or each of several by name with its own."""
    return [(f"{key}.{name}", one) for name, one in named_nodes(node).items()] or [(key, node or {})]


def build_components(config: RunConfig, site: RunContext) -> tuple[Components, RunFacts]:
    """Everything of one rank, and the facts for the first lines on the screen."""
    parallel, device = site.parallel, site.parallel.device
    notes, advice = set_backends(config, parallel), list[str]()
    check_targets(config)
    config = with_text(with_accumulation(config, parallel.world_size), site, notes)
    sources, drawn = build_sources(config, advice, site.trained)
    splits = look_at_splits(config, site, sources, drawn)
    facts = with_trained_classes(facts_of_all(sources, splits["train"]), site.trained)
    notes += filter(None, [describe_classes(facts)])
    advice += describe_sources(config, facts, sources, splits, site.is_new)
    task, tally, places = build_task(config, facts), TokenCounter(), SourceStates()
    streams: dict[str, Any] = open_streams(config, site, sources, splits, task, tally, notes, places)
    train, test = streams.pop("train"), streams.pop("test", None)
    validation = streams
    check_labels_fit(config, facts, sources)
    lengths = lengths_of(config, train, sources["train"], task, parallel.world_size)
    rhythm = build_rhythm(config, lengths, task, bool(validation), parallel.rank)
    config = with_warmup_in_steps(config, lengths, task)
    warmup_steps(config, rhythm)
    model, frozen, base = build_changed(config, facts, parallel, site.init_from, notes, advice)
    if config.trainer.compile.scope == "auto":
        config = with_scope(
            config, sum(p.numel() for p in model.parameters()), rhythm.total_steps, device, notes
        )
    set_threads(config, model, device, notes)
    prepare_task(config, site, task, model, sources["train"], rhythm, notes)
    apply_built_in(config, model, device, notes)
    num_batches = math.inf if rhythm.total_steps is None else rhythm.total_steps * rhythm.accumulate
    config = decide_numbers(
        config, model, task, train, parallel, site.chosen, site.measures, num_batches, notes
    )
    limit_outputs(task, model, parallel, site.chosen)
    guarded, more = build_precision(precision_options(config), model, device, site.phases, parallel)
    notes += more
    wrapped = parallel.wrap(model)
    optimizer, schedule, precision, optimizers = build_updates(config, site, model, guarded, rhythm, notes)
    ema = build_average(config, model, optimizer)
    monitors = build_monitors(config, site, schedule, rhythm, task, tally, model, ema, validation)
    default_metric = default_monitor(task, list(validation))
    advice += told_of_validation(config, site.trains, default_metric, list(validation))
    trainer, keep = config.trainer, keep_options(config, default_metric, lengths, task)
    watched = {keep.monitor, trainer.early_stopping.monitor} - {None}
    if not all(str(name).endswith(("/loss", "/acc")) for name in watched):
        advice += filter(None, [taken_as_larger(config, default_metric)])
    checkpoints = build_checkpoints(config, site, keep, monitors.note, sources["train"], drawn)
    retry = OomRetry(
        trainer.out_of_memory, model, task, parallel, monitors.note, mends=trainer.nan_policy == "skip"
    )
    triggers = Triggers(
        build_limits(config, lengths, task), rhythm,
        build_watch(config, default_metric), best_watch(config, default_metric), schedule.on_validation,
        site.stop, precision.failure, checkpoints.time_request,
        build_on_bad(config, site, precision, retry, monitors.note),
    )  # fmt: skip
    place = Place(config.seed or 0, parallel.rank, device)
    calls = TaskCalls(task, model, place, None if parallel.rank else site.run.pictures)
    counting = build_counting(config, model, task, parallel, site.phases)
    compile_log = build_log(config, monitors, site.phases)
    step, own_step = build_step(config, task, calls, device, compile_log)
    step = add_layer_table(config, step)
    step = checked_step(step, trainer.check_task and site.is_new, task, model)
    hooks = build_hooks(config, site, frozen)
    check_nodes_are_read(site.typed, config, sources)
    run = Components(
        config=config, model=model, wrapped=wrapped, task=task, task_calls=calls,
        optimizer=optimizer, schedule=schedule, precision=precision, parallel=parallel, ema=ema, retry=retry,
        train=train, validation=validation, test=test, triggers=triggers, checkpoints=checkpoints, monitors=monitors,
        data_facts=facts, phases=site.phases, step=step, accumulate=build_accumulate(retry, counting),
        compile_log=compile_log, counting=counting, hooks=hooks, positions=tally.planned, optimizers=optimizers,
        own_step=own_step, trained=TrainedParameters(model, optimizer), places=places,
        order=order_facts(config, parallel.world_size, drawn), base=base,
    )  # fmt: skip
    calls.after_user_code = run.after_user_code
    for one in optimizers.values():
        one.show = run.show_gradients
    return run, run_facts(run, site, rhythm, notes, advice)


def told_of_validation(config: RunConfig, trains: bool, default: str | None, names: list[str]) -> list[str]:
    if trains and not names and config.trainer.limit_val_batches == 0:
        return ["trainer.limit_val_batches=0: nothing is validated, so there is no best"]
    if trains and not names:
        return ["no validation data, so no best; use data.val._target_=... or data.folds=5 data.fold=0"]
    best = config.checkpoint.monitor or f"{default} (the default, as of early stopping)"
    return [f"validation: {', '.join(names)}; best is by {best}"] if len(names) > 1 else []


def prepare_task(
    config: RunConfig, site: RunContext, task: Any, model: nn.Module, source: Any, rhythm: Intervals, notes: list[str]
) -> None:  # fmt: skip
    """What a task does once its model is there: look at it, and find its teacher."""
    if isinstance(task, ChecksModel):
        task.check_model(model)
    if site.trains and config.task.get("_target_") == DISTILLATION:
        from trainrun.assemble.resumption import teach

        notes.append(teach(config, site.parallel, task, model, source, rhythm))


def with_trained_classes(facts: DataFacts, trained: TrainingNames | None) -> DataFacts:
    """Return facts with the classes that a checkpoint names, where the data names none: it may have no targets."""
    if trained is None or not trained.classes or facts.class_names:
        return facts
    number = facts.num_classes or len(trained.classes)
    return replace(facts, class_names=tuple(trained.classes), num_classes=number)


def look_at_splits(
    config: RunConfig, site: RunContext, sources: dict[str, Any], drawn: Drawn | None
) -> dict[str, StreamOptions]:
    """Return how each split is read, with a look at its samples; refuse inputs of unlike kinds."""
    report = report_to([monitor.on_note for monitor in site.monitors])
    splits = options_of_splits(config, site.parallel, sources, report, drawn)
    if not site.trains:  # new samples to predict may be fewer than a batch of the training had
        splits["train"] = replace(splits["train"], may_shrink=True)
    check_alike(config, sources, splits)
    return splits


def open_streams(
    config: RunConfig, site: RunContext, sources: dict[str, Any], splits: dict[str, StreamOptions], task: Any,
    tally: TokenCounter, notes: list[str], places: SourceStates,
) -> dict[str, Batches]:  # fmt: skip
    """The batches of every split that has data."""
    copying = None if site.parallel.device.type == "cpu" else partial(site.phases.on, COPY)
    sizes = task.sizes if isinstance(task, CountsSamples) and counts_before(task) else None
    train = replace(splits["train"], tally=tally, copying=copying, sizes=sizes, places=places)
    opened, note = open_batches(sources["train"], train)
    streams: dict[str, Batches] = {"train": opened}
    notes += note.splitlines()
    for name, options in splits.items():
        if name != "train":
            options = replace(options, sizes=sizes, beside=opened.read_by)
            streams[name], note = open_batches(sources[name], options)
            notes += note.splitlines()
    notes += filter(None, [applied(config, sources)])
    return streams


def build_updates(
    config: RunConfig, site: RunContext, model: nn.Module, guarded: Update, rhythm: Intervals, notes: list[str]
) -> tuple[Optimizer, Schedule | JoinedSchedules, Precision, dict[str, NamedOptimizer]]:  # fmt: skip
    """The optimizer with its schedule and guarded update; of several by name all together, and each."""
    if named_nodes(config.optimizer):
        named = build_named(
            config, model, rhythm, notes,
            lambda params: build_precision(precision_options(config), params, site.parallel.device, site.phases)[0],
        )  # fmt: skip
        together = not (config.step or config.loop)
        joined = JoinedOptimizers(named), JoinedSchedules(named, together)
        return *joined, guarded if together else JoinedPrecision(named, guarded), named
    optimizer = build_optimizer_of(config, model, site.parallel.world_size, notes)
    return optimizer, build_schedule_of(config, optimizer, rhythm), guarded, {}


def with_text(config: RunConfig, site: RunContext, notes: list[str]) -> RunConfig:
    """The config with the tokenizer of this run, where one is trained for it."""
    if "bpe:" not in str(config.data.train):
        return config
    from trainrun.sampling.run_tokenizer import with_tokenizer

    return with_tokenizer(config, site.run, site.parallel, notes)


def build_average(config: RunConfig, model: nn.Module, optimizer: Optimizer) -> Ema | OwnAverage | None:
    """The averaged weights that are evaluated: those of `trainer.ema`, else those of an optimizer that keeps some."""
    switching, wanted = switching_optimizers(optimizer), config.trainer.ema
    for one in switching:
        one.train()
    if wanted.enabled:
        return Ema(model, wanted.decay, wanted.update_every_n_steps)
    if not switching:
        return None
    from trainrun.optimizer.own_average import OwnAverage

    return OwnAverage(model, switching)


def build_hooks(config: RunConfig, site: RunContext, frozen: Unfreeze | None) -> Hooks:
    hooks = {f"hook.{name}": build(node, f"hook.{name}") for name, node in config.hook.items()}
    if frozen is not None:
        hooks["model.freeze"] = frozen
    if config.monitor.samples_every is not None:
        from trainrun.sampling.epoch_samples import EpochSamples

        hooks["monitor.samples_every"] = EpochSamples(config, site.run)
    if every := config.monitor.histograms_every_n_steps:
        from trainrun.hook.histograms import Histograms

        hooks["monitor.histograms_every_n_steps"] = Histograms(every)
    return Hooks(hooks)


def build_monitors(
    config: RunConfig, site: RunContext, schedule: Schedule | JoinedSchedules, rhythm: Intervals, task: Any,
    tally: TokenCounter, model: nn.Module, ema: Ema | OwnAverage | None, validation: dict[str, Batches],
) -> MetricLogger:  # fmt: skip
    def why_nan() -> str:
        from trainrun.training.recovery.nonfinite import likely_cause

        with nullcontext() if ema is None else ema.in_model():
            return likely_cause(model, next(iter(validation.values())))

    between = config.trainer.python_gc == "between_steps"
    return MetricLogger(
        site.parallel, site.monitors, lambda: schedule.rates, rhythm.steps_per_epoch, rhythm.accumulate,
        rhythm.log_every is not None, site.on_position, site.on_log, unit_of(task), Tidy() if between else None, tally,
        site.phases, task, why_nan if validation else None, site.write,
        config.monitor.plot_every_n_steps, rhythm.log_due,
    )  # fmt: skip


def build_checkpoints(
    config: RunConfig, site: RunContext, keep: KeepOptions, note: Callable[[str], None], source: Any,
    drawn: Drawn | None,
) -> CheckpointManager:  # fmt: skip
    return CheckpointManager(
        site.run.checkpoints, site.run_id, keep, site.parallel,
        build_fingerprint(config, site.parallel, source, drawn), note, lambda: host_memory().free,
        before_commit=site.before_commit,
    )  # fmt: skip


def build_on_bad(
    config: RunConfig, site: RunContext, precision: Precision, retry: OomRetry, note: Callable[[str], None]
) -> Callable[[TrainState, str], None]:
    """What is done about a step that was not finite."""
    trainer = config.trainer
    most_rollbacks = trainer.max_rollbacks if trainer.nan_policy == "rollback" else 0

    @cache
    def bad_steps() -> BadSteps:
        from trainrun.training.recovery.nonfinite import BadSteps

        folder = site.run.nonfinite
        return BadSteps(trainer.nan_policy, most_rollbacks, folder, site.parallel, precision, retry, note)

    return lambda state, failure: bad_steps()(state, failure)


def build_task(config: RunConfig, facts: DataFacts) -> Any:
    """One that takes `bytes_per_token`, and is given none, gets it from the data, where they say it; and the weights of
    `task.class_weights=balanced`.
    """
    node = dict(config.task)
    takes = "bytes_per_token" in node or node.get("_target_") == LANGUAGE_MODELING
    if takes and node.get("bytes_per_token") is None:
        node["bytes_per_token"] = facts.bytes_per_token
    if node.get("class_weights") == "balanced":
        node["class_weights"] = balanced_weights(facts.class_counts)
    task = build(node, "task")
    if not callable(getattr(task, "step", None)):
        raise PluginError(
            f"task: {type(task).__name__} has no method step; a task has step(model, batch) -> StepOutput and "
            "count(batch) -> int, or gives count= with each StepOutput"
        )
    return task


def unit_of(task: Any) -> str:
    """What the task counts: `tokens` or `pixels` where it says so, in its attribute `unit`."""
    unit = getattr(task, "unit", "samples")
    if unit not in ("samples", "tokens", "pixels"):
        raise PluginError(
            f"task: {type(task).__name__}.unit={unit!r}: must be 'samples', 'tokens' or 'pixels'"
        )
    return str(unit)


def precision_options(config: RunConfig) -> PrecisionOptions:
    trainer = config.trainer
    clip_algorithm = "norm" if trainer.gradient_clip_val is None else trainer.gradient_clip_algorithm
    return PrecisionOptions(
        config.precision.mode, trainer.gradient_clip_val, clip_algorithm, trainer.nan_policy,
        trainer.cpu_offload,
    )  # fmt: skip


def sum_of_known(numbers: Sequence[int | None]) -> int | None:
    """Their sum; None without any, or if one is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if numbers and len(known) == len(numbers) else None


def run_facts(
    run: Components, site: RunContext, rhythm: Intervals, notes: list[str], advice: list[str]
) -> RunFacts:
    config, parameters = run.config, list(run.model.parameters())
    cut = planned_beyond(config, run.triggers.max_seconds, rhythm)
    return RunFacts(
        name=config.run_name or "run",
        folder=str(site.run.root),
        device=str(site.parallel.device),
        world_size=site.parallel.world_size,
        batch_size=config.data.batch_size,
        accumulate=rhythm.accumulate,
        num_train=run.train.num_samples,
        num_val=sum_of_known([stream.num_samples for stream in run.validation.values()]),
        steps_per_epoch=rhythm.steps_per_epoch,
        total_steps=rhythm.total_steps,
        total_epochs=config.trainer.max_epochs,
        model_summary=type(run.model).__name__,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sample_every=rhythm.sample_every,
        max_seconds=run.triggers.max_seconds,
        choices=tuple(notes),
        advice=(*advice, *filter(None, [cut])),
        update=describe_update(config, run.schedule),
        run_id=site.run_id,
        config=plain_values(public(config)[0]),
    )
