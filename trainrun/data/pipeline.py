"""Build a stream of micro-batches from a user's data. This is the entry of the package `data`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from trainrun.data.batch import Preparation
from trainrun.data.engines.in_memory import ResidentBatches, choose_evaluation_batch_size, explain_resident
from trainrun.data.engines.stream import OpenedStream, RenumberedBatches, StreamEngine
from trainrun.data.scale import Scale, ScaledBatches
from trainrun.data.stream_options import (
    Collate,
    PreparedStream,
    StreamOptions,
    build_plan,
    build_unchecked_plan,
    check_options,
    convert_limit_to_samples,
)
from trainrun.data.tensor_dataset import (
    Columns,
    find_byte_pictures,
    find_columns,
    find_rows_in_memory,
    measure_length,
)
from trainrun.errors import DataError
from trainrun.interfaces import Batches

if TYPE_CHECKING:
    from trainrun.data.order.sampler import Plan, StreamPlan
    from trainrun.data.sequences.choose import SequencePlan


def open_batches(source: Any, options: StreamOptions) -> tuple[OpenedStream, str]:
    """Return the stream, and a line about the chosen engine, the reason, and the lengths."""
    check_options(options)
    if isinstance(source, IterableDataset):
        from trainrun.data.engines.build_engine import open_iterable

        options = convert_limit_to_samples(options)
        sequences = partial(_plan_sequences, source, options=options)
        batches, collate, read_by, line = open_iterable(source, options, sequences)
        finished = _finish_batches(options, collate, None, None, batches)
        return OpenedStream(finished, read_by, source), f"{options.key}: {line}"
    if options.shuffle_buffer is not None:
        raise DataError(
            f"data.shuffle_buffer={options.shuffle_buffer}: {options.key} can be read in any order and is shuffled "
            "as a whole; leave it out"
        )
    prepared = prepare_source(source, add_look(source, options))
    finish = partial(_finish_batches, options, prepared.collate, prepared.scale, prepared.samples)
    reason, read_by = explain_resident(prepared), StreamEngine("resident", 0)
    if reason:
        batches = finish(ResidentBatches(prepared))
    else:
        from trainrun.data.engines.build_engine import open_engine

        batches, read_by, reason = open_engine(prepared, finish)
    return OpenedStream(batches, read_by, source), "\n".join([f"{options.key}: {reason}", *prepared.notes])


def add_look(source: Any, options: StreamOptions) -> StreamOptions:
    """Return options with the facts of a few samples, if reading samples runs code."""
    quiet = options.transform is None and options.collate_fn is None
    if options.look is not None or (quiet and find_columns(source, options.key) is not None):
        return options
    from trainrun.data.look import inspect_source

    return replace(options, look=inspect_source(source, options))


def prepare_source(source: Any, options: StreamOptions) -> PreparedStream:
    """Return the source behind its cache (`options.cache`), with the plan of its batches."""
    original, options, notes = source, convert_limit_to_samples(options), []
    source, scale = find_byte_pictures(source)
    columns = None
    if options.cache != "none":
        from trainrun.data.cache.cached import CachedDataset, open_cache

        gather = options.gather if options.world_size > 1 else None
        source = open_cache(source, options.cache, options.key, options.report, gather, options)
        if isinstance(source, CachedDataset):
            columns = source.build_cached_columns()
            notes += [f"{options.key}: {source.note}"]
    columns = find_columns(source, options.key) if columns is None else columns
    dataset = source if columns is None else columns
    if options.may_grow and columns is not None:
        size = choose_evaluation_batch_size(columns, options.batch_size, scale is not None)
        options = replace(options, batch_size=size)
    length = measure_length(dataset, options.key)
    if length == 0:
        raise DataError(f"{options.key}: the data set is empty")
    sequence_plan = _plan_sequences(
        dataset, build_unchecked_plan(length, options.batch_size, options), options
    )
    plan: StreamPlan = build_plan(length, options) if sequence_plan is None else sequence_plan.plan
    collate = options.collate_fn
    preparation = Preparation(options.float_dtype, options.max_sequence_length)
    if sequence_plan is not None:
        dataset, collate, preparation = (
            sequence_plan.source,
            sequence_plan.collate,
            Preparation(options.float_dtype),
        )
        columns = dataset if isinstance(dataset, Columns) else None
        notes += [sequence_plan.line] if sequence_plan.line else []
    if (
        options.transform is None
        and options.collate_fn is None
        and columns is None
        and is_plain_collate(collate)
    ):
        columns = find_rows_in_memory(dataset)
        dataset, collate = (dataset, collate) if columns is None else (columns, None)
    single = _find_sample_setting(options, collate)
    return PreparedStream(original, options, dataset, columns, plan, preparation, collate, scale, single,
                          tuple(notes), None if sequence_plan is None else sequence_plan.samples)  # fmt: skip


def is_plain_collate(collate: Collate | None) -> bool:
    """Return whether samples of one shape are only joined, without padding."""
    if collate is None:
        return True
    from trainrun.data.sequences.collate import PadCollate

    return collate == PadCollate()


def _find_sample_setting(options: StreamOptions, collate: Collate | None) -> str:
    """Return the setting that prevents whole columns from being gathered; empty if there is none."""
    if options.transform is not None:
        return options.transform_key
    if options.collate_fn is not None:
        return "data.collate_fn"
    return f"data.padding={options.padding}" if collate is not None else ""


def _finish_batches(
    options: StreamOptions, collate: Collate | None, scale: Scale | None, samples: Any, batches: Batches
) -> Batches:
    """Return the function that is applied to batches on the device, the same for every engine."""
    if options.tally is not None and collate is not None:
        from trainrun.data.sequences.collate import count_tokens

        batches = count_tokens(batches, collate, options.tally)
    if scale is not None and options.transform is None and options.collate_fn is None:
        batches = ScaledBatches(batches, scale, options.float_dtype)
    number = None if options.drawn is None else options.drawn.number
    if options.augment:
        from trainrun.data.augment.augmented import augment_batches

        batches = augment_batches(
            batches, options.augment, options.seed, options.training, options.float_dtype, number
        )
    number = number if samples is None else len(samples)
    if number is not None:
        batches = RenumberedBatches(batches, number, samples)
    return batches


def _plan_sequences(dataset: Any, base: Plan, options: StreamOptions) -> SequencePlan | None:
    """Return the result of `plan_sequences`; None if rows in memory stay as they are."""
    words = (options.padding, options.truncate, options.max_sequence_length, options.max_tokens,
             options.pad_multiple)  # fmt: skip
    if isinstance(dataset, Columns) and words == ("longest", "right", None, None, None):
        return None
    from trainrun.data.sequences.choose import plan_sequences

    return plan_sequences(dataset, base, options)
