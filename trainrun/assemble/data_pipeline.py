"""Build the data sets and streams of a run from the config section `data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from trainrun.config.schema import SAME, DataConfig, RunConfig, validation_nodes
from trainrun.data.engines.stream import OpenedStream
from trainrun.data.facts import (
    PLAUSIBLE_CLASSES,
    Labels,
    check_labels,
    check_number_of_classes,
    check_targets_are_classes,
    describe_many_labels,
    find_class_names,
    find_labels,
)
from trainrun.data.overlap.shared_rows import describe_shared_rows
from trainrun.data.pipeline import add_look, open_batches
from trainrun.data.stream_options import Report, StreamOptions, check_options
from trainrun.data.tensor_dataset import SplitBuilder, find_reader_attribute
from trainrun.errors import ConfigError, DataError
from trainrun.instantiate import build_node, named_nodes
from trainrun.interfaces import IGNORED, DataFacts, Parallel
from trainrun.precision.autocast import choose_data_dtype

if TYPE_CHECKING:
    from trainrun.data.augment.augmented import NamedAugmentation
    from trainrun.data.order.drawn import WeightedSamples

OUR_TASKS, ASK_FOR_CLASSES = "trainrun.task.", ("num_classes", "vocab_size")
AS_IN_CONFIG = ("engine", "num_workers", "num_threads", "pin_memory", "persistent_workers", "prefetch_factor", "cache",
                "max_sequence_length", "on_error", "truncate", "padding", "max_tokens",
                "pad_multiple")  # fmt: skip
REGRESSION = "trainrun.task.regression.Regression"
CLASSIFIERS = ("trainrun.task.classification.Classification", "trainrun.task.distillation.Distillation")


@dataclass(frozen=True)
class TrainingNames:
    """The class names, in order, and the input columns with which a run was trained."""

    classes: Sequence[str] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)


def build_sources(
    config: RunConfig, notes: list[str], trained: TrainingNames | None = None
) -> tuple[dict[str, Any], WeightedSamples | None]:
    """Return the data sets by split, and how often each training sample is drawn.

    If the targets of a table may be classes or real numbers, the task decides. trained: the names from a checkpoint,
    which the data sets must have.
    """
    data, task = config.data, config.task or {}
    named = {f"train.{name}": node for name, node in named_nodes(data.train).items()} or {"train": data.train}
    validation = (validation_nodes(data) or {"val": None}) if data.folds is None else {}
    builder, sources = SplitBuilder(), dict[str, Any]()
    for name, node in {**named, **validation, "test": data.test}.items():
        arguments: dict[str, Any] = {}
        if node and node.get("target_dtype") == "auto" and task.get("_target_") == REGRESSION:
            arguments["target_dtype"] = "float32"
        has_names = trained is not None and bool(trained.inputs)
        if has_names and node and (node.get("inputs", ()) is None or node.get("categories")):
            assert trained is not None
            arguments["inputs"] = list(trained.inputs)
        sources[name] = (
            builder.build(node, format_split_key(name), parse_split_kind(name), **arguments) if node else None
        )
    sources = apply_training_names(sources, trained)
    notices = {
        format_split_key(name): find_reader_attribute(source, "notice") for name, source in sources.items()
    }
    notes += [f"{key}: {notice}" for key, notice in notices.items() if notice]
    if "train" in named and data.folds is None and data.sampling == "none":
        return sources, None
    from trainrun.data.order.training_set import TrainingSetOptions, build_training_set

    request = TrainingSetOptions(
        data.sampling,
        data.weights,
        data.mix,
        data.folds,
        data.fold,
        data.stratified,
        choose_fold_groups(data),
    )
    parts, drawn = build_training_set({name[6:]: sources.pop(name) for name in named}, request, notes)
    return {**parts, **sources}, drawn


def choose_fold_groups(data: DataConfig) -> str | None:
    """Return the attribute whose samples stay in one fold: `data.fold_groups`, else `groups` of a built-in reader."""
    node = data.train or {}
    is_ours = str(node.get("_target_")).startswith("trainrun.data.")
    return "groups" if data.fold_groups is None and is_ours and node.get("groups") else data.fold_groups


def describe_sources(
    config: RunConfig, sources: Mapping[str, Any], splits: Mapping[str, StreamOptions], is_new: bool
) -> list[str]:
    """Return advice about the samples before a new training; [] for a resumed one. splits: how each split is read."""
    if not is_new:
        return []
    lines = describe_shared_rows(sources, splits)
    if is_classification(config):
        lines.insert(0, describe_many_labels(sources["train"], "data.train", has_table_data(config)))
    return [line for line in lines if line]


def apply_training_names(sources: dict[str, Any], trained: TrainingNames | None) -> dict[str, Any]:
    """Return the sources with the class numbers of the training data.

    Raise DataError if their classes or their input columns differ from the classes and columns of the training.
    """
    class_names = {name: find_class_names(source) for name, source in sources.items() if source is not None}
    trains = next(
        (names for name, names in class_names.items() if parse_split_kind(name) == "train" and names), ()
    )
    classes = tuple(trained.classes) if trained is not None and trained.classes else trains
    inputs = {} if trained is None else trained.inputs
    if not inputs and not any(names and names != classes for names in class_names.values()):
        return sources
    from trainrun.data.readers.class_numbers import check_input_columns, use_training_classes

    changed = dict(sources)
    for name in class_names:
        check_input_columns(sources[name], inputs, format_split_key(name))
        changed[name] = use_training_classes(sources[name], classes, format_split_key(name))
    return changed


def format_split_key(split: str) -> str:
    """Return the setting of a split's samples: `data.val.day` for `val/day`."""
    return f"data.{split.replace('/', '.')}"


def parse_split_kind(split: str) -> str:
    """Return `train`, `val` or `test`, which is the first part of a name such as `val/day`."""
    return split.partition("/")[0].partition(".")[0]


def read_split_limit(config: RunConfig, name: str) -> int | float:
    """Return how much of a split an epoch reads: a fraction (float), or a number of batches (int); 0 for nothing."""
    trainer = config.trainer
    limits = {"train": trainer.limit_train_batches, "val": trainer.limit_val_batches}
    limit: int | float = limits.get(parse_split_kind(name), 1.0)
    return limit


def open_split(
    config: RunConfig, parallel: Parallel, name: str, source: Any, notes: list[str], report: Report,
    drawn: WeightedSamples | None = None,
) -> OpenedStream | None:  # fmt: skip
    """Return the batches of a split; None without data. Lines about them are added to `notes`.

    drawn: how often each training sample is drawn.
    """
    if source is None or read_split_limit(config, name) == 0:
        return None
    options = build_stream_options(config, parallel, name, report, drawn)
    batches, note = open_batches(source, options)
    notes += note.splitlines()
    return batches


def build_split_options(
    config: RunConfig,
    parallel: Parallel,
    sources: dict[str, Any],
    report: Report,
    drawn: WeightedSamples | None,
) -> dict[str, StreamOptions]:
    """Return how each split with data is read. One sample of each split is read for facts about it."""
    options_by_split = {}
    for name, source in sources.items():
        if source is not None and read_split_limit(config, name) != 0:
            options = build_stream_options(config, parallel, name, report, drawn)
            check_options(options)
            options_by_split[name] = (
                options if isinstance(source, IterableDataset) else add_look(source, options)
            )
    return options_by_split


def build_stream_options(
    config: RunConfig, parallel: Parallel, name: str, report: Report, drawn: WeightedSamples | None = None
) -> StreamOptions:
    """Return the options of a split's stream. drawn: how often each training sample is drawn."""
    data, training = config.data, name == "train"
    assert config.seed is not None
    return StreamOptions(
        **{setting: getattr(data, setting) for setting in AS_IN_CONFIG},
        max_skipped_fraction=data.max_skipped_fraction if data.on_error == "skip" else 0.0,
        key=format_split_key(name),
        training=training,
        batch_size=data.batch_size if training else data.val_batch_size or data.batch_size,
        seed=config.seed,
        shuffle=data.shuffle and training,
        drop_last=data.drop_last and training,
        timeout_seconds=data.worker_timeout_seconds,
        collate_fn=build_node(data.collate_fn, "data.collate_fn") if data.collate_fn else None,
        transform=build_split_transform(config, parse_split_kind(name)),
        transform_key=find_transform_key(config, parse_split_kind(name)) or "data.transform",
        augment=build_config_augmentations(config),
        report=report,
        may_grow=not training and data.val_batch_size is None,
        limit=read_split_limit(config, name),
        accumulates=config.trainer.accumulate_grad_batches > 1,
        rank=parallel.rank,
        world_size=parallel.world_size,
        local_world_size=parallel.local_world_size,
        gather=parallel.gather,
        device=parallel.device,
        drawn=drawn if training else None,
        shuffle_buffer=data.shuffle_buffer if training else None,
        float_dtype=choose_data_dtype(config.precision.mode),
    )


def build_config_augmentations(config: RunConfig) -> tuple[NamedAugmentation, ...]:
    if not config.data.augment:
        return ()
    from trainrun.data.augment.nodes import build_augmentations

    return build_augmentations(config.data.augment)


def find_transform_key(config: RunConfig, split: str) -> str | None:
    """Return the setting that holds a split's transform; None without one. `data.transform` is for training only."""
    data, name = config.data, "transform"
    if split != "train":
        name = "test_transform" if split == "test" and data.test_transform is not None else "val_transform"
    name = "transform" if getattr(data, name) == SAME else name
    return f"data.{name}" if getattr(data, name) else None


def build_split_transform(config: RunConfig, split: str) -> Any:
    key = find_transform_key(config, split)
    return build_node(getattr(config.data, key.removeprefix("data.")), key) if key else None


def describe_transforms(config: RunConfig, sources: Mapping[str, Any]) -> str:
    """Return a line about the transforms of each split, in the order in which they are applied; "" without any."""
    splits = {"training": "train", "validation": "val", "test": "test"}
    changes = {}
    for name, split in splits.items():
        if any(source is not None and parse_split_kind(key) == split for key, source in sources.items()):
            transform = find_transform_key(config, split)
            augmentations = [
                a.key for a in build_config_augmentations(config) if split == "train" or not a.random
            ]
            changes[name] = ", ".join([*([transform] if transform else []), *augmentations])
    if not any(changes.values()):
        return ""
    way = "validation" in changes and config.data.transform and config.data.val_transform is None
    return "; ".join(f"{name} samples: {does or 'as they are'}" for name, does in changes.items()) + (
        " (data.val_transform=same: data.transform there too)" if way else ""
    )


def check_same_inputs(config: RunConfig, sources: dict[str, Any], splits: dict[str, StreamOptions]) -> None:
    """Raise ConfigError if a transform changes the dtype of training inputs only. Validation needs the same
    conversion.
    """
    for split, options in splits.items():
        kind = parse_split_kind(split)
        if not config.data.transform or kind == "train" or find_transform_key(config, kind):
            continue
        from trainrun.data.look import find_kind_of_input

        kinds = [
            find_kind_of_input(sources["train"], splits["train"]),
            find_kind_of_input(sources[split], options),
        ]
        if all(kinds) and kinds[0] != kinds[1]:
            raise ConfigError(
                f"data.transform: converts training samples to {kinds[0]}, but samples of {format_split_key(split)} "
                f"stay {kinds[1]}; set data.val_transform=same, or another transform: data.val_transform._target_=..."
            )


def is_classification(config: RunConfig) -> bool:
    """Return whether the task is a built-in one that needs classes as targets."""
    return (config.task or {}).get("_target_") in CLASSIFIERS


def has_table_data(config: RunConfig) -> bool:
    """Return whether the training data is a table, whose settings choose the target column and its type."""
    return "target_dtype" in (config.data.train or {})


def check_labels_fit(config: RunConfig, facts: DataFacts, sources: dict[str, Any]) -> None:
    """Raise ConfigError or DataError if a label is outside the number of classes.

    That number is set by the user or comes from the training data.
    """
    if is_classification(config):
        check_targets_are_classes(sources["train"], "data.train", has_table_data(config))
    model, task = config.model or {}, config.task or {}
    wanted_classes = model.get("num_classes") or config.data.num_classes
    key = "data.num_classes" if wanted_classes == config.data.num_classes else "model.num_classes"
    real = task.get("_target_") in (REGRESSION, "trainrun.task.multilabel.MultiLabel")
    is_ours = str(task.get("_target_")).startswith(OUR_TASKS) and not real
    ignored = (IGNORED, *([task["ignore_index"]] if isinstance(task.get("ignore_index"), int) else []))
    if isinstance(wanted_classes, int) and real:
        return
    if isinstance(wanted_classes, int):
        labels = Labels(wanted_classes, key, ignored)
    elif facts.num_classes and any(name in model and model[name] is None for name in ASK_FOR_CLASSES):
        if facts.num_classes > PLAUSIBLE_CLASSES:
            labels_there = find_labels(sources["train"], "data.train")
            check_number_of_classes(sources["train"], "data.train", labels_there, facts.num_classes)
        if not is_ours:
            return
        if facts.num_classes == 1:
            raise DataError(
                f"data.train: has a single class, {(facts.class_names or (0,))[0]!r}, which leaves nothing to learn; "
                "look at data.path, or set model.num_classes=1"
            )
        labels = Labels(facts.num_classes, "", ignored)
    else:
        return
    for name, source in sources.items():
        if source is not None:
            check_labels(source, format_split_key(name), labels)
