"""From the section `data` to the streams of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainrun.config import RunConfig
from trainrun.data.augment.nodes import build_augmentations
from trainrun.data.device_feed import Copying, Sizes, unnoticed
from trainrun.data.facts import check_labels
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions
from trainrun.data.sequences.useful import Tally
from trainrun.data.skips import Report, to_stderr
from trainrun.data.stages import Stages, stages_of
from trainrun.data.undecided import Undecided
from trainrun.instantiate import build
from trainrun.interfaces import Batches, DataFacts, Parallel
from trainrun.precision.amp import data_float_dtype

REGRESSION = "trainrun.task.regression.Regression"


def build_sources(config: RunConfig) -> dict[str, Any]:
    """The data sets. Where the targets of a table may be class numbers or real ones, the task says which."""
    data, task = config.data, config.task or {}
    nodes = {"train": data.train, "val": data.val, "test": data.test}
    real = {"target_dtype": "float32"} if task.get("_target_") == REGRESSION else {}
    return {
        name: build(node, f"data.{name}", **(real if node.get("target_dtype") == "auto" else {}))
        if node
        else None
        for name, node in nodes.items()
    }


def open_split(
    config: RunConfig, parallel: Parallel, name: str, source: Any, notes: list[str], report: Report,
    tally: Tally | None = None, copying: Copying = unnoticed, sizes: Sizes | None = None,
) -> Batches | None:  # fmt: skip
    """tally: counts the useful tokens of training batches. copying: surrounds their copies to a GPU. sizes: counts
    items before a batch is copied there."""
    if source is None:
        return None
    options = stream_options(config, parallel, name, report, tally, copying, sizes)
    batches, note = open_batches(source, options)
    notes += note.splitlines()
    return batches


def stream_options(
    config: RunConfig, parallel: Parallel, name: str, report: Report,
    tally: Tally | None = None, copying: Copying = unnoticed, sizes: Sizes | None = None,
) -> StreamOptions:  # fmt: skip
    data, training = config.data, name == "train"
    assert config.seed is not None
    return StreamOptions(
        key=f"data.{name}",
        training=training,
        batch_size=data.batch_size if training else data.val_batch_size or data.batch_size,
        seed=config.seed,
        shuffle=data.shuffle and training,
        drop_last=data.drop_last and training,
        engine=data.engine,
        num_workers=data.num_workers,
        pin_memory=data.pin_memory,
        persistent_workers=data.persistent_workers,
        prefetch_factor=data.prefetch_factor,
        timeout_seconds=data.worker_timeout_seconds,
        collate_fn=build(data.collate_fn, "data.collate_fn") if data.collate_fn else None,
        max_sequence_length=data.max_sequence_length,
        num_threads=data.num_threads,
        cache=data.cache,
        transform=build_transform(config),
        augment=build_augmentations(data.augment),
        on_error=data.on_error,
        max_skipped_share=data.max_skipped_share,
        report=report,
        truncate=data.truncate,
        padding=data.padding,
        max_tokens=data.max_tokens,
        pad_multiple=data.pad_multiple,
        may_grow=not training and data.val_batch_size is None,
        limit=config.trainer.limit_train_batches if training else config.trainer.limit_val_batches,
        rank=parallel.rank,
        world_size=parallel.world_size,
        local_world_size=parallel.local_world_size,
        gather=parallel.gather,
        device=parallel.device,
        tally=tally if training else None,
        copying=copying if training else unnoticed,
        sizes=sizes,
        float_dtype=data_float_dtype(config.precision.mode),
    )


def loading_stages(
    config: RunConfig, parallel: Parallel, train: Batches, epoch: int, start: int, seconds: float
) -> Stages | None:
    """Of the training's batches from `start` on; see `trainrun.data.stages`. train: its stream, which is closed."""
    train.close()
    source = train.source if isinstance(train, Undecided) else None
    if source is None:
        alone = replace(config, data=replace(config.data, val=None, test=None))
        source = build_sources(alone)["train"]
    return stages_of(source, stream_options(config, parallel, "train", to_stderr), epoch, start, seconds)


def build_transform(config: RunConfig) -> Any:
    return build(config.data.transform, "data.transform") if config.data.transform else None


def check_classes(config: RunConfig, facts: DataFacts, sources: dict[str, Any]) -> None:
    """Labels must lie inside the classes that the model is told of."""
    num_classes = (config.model or {}).get("num_classes") or config.data.num_classes
    for name, source in sources.items():
        if source is not None and isinstance(num_classes, int):
            check_labels(source, f"data.{name}", num_classes)
