"""The door of this room: from a user's data to a stream of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from trainrun.data.augment.augmented import augmented
from trainrun.data.bad_samples import Skips
from trainrun.data.batch import Preparation
from trainrun.data.cache.cached import Cached, cached
from trainrun.data.engines.auto_stream import AutoStream, Option
from trainrun.data.engines.batch_reader import Recipe
from trainrun.data.engines.build_engine import (
    PreparedStream,
    build_engine,
    fitting_choice,
    load_of,
    trial,
    worker_options,
)
from trainrun.data.engines.choice import (
    Choice,
    EngineFacts,
    Request,
    choose,
    describe_workers,
    options_of,
    roomy_batch_size,
)
from trainrun.data.engines.device_feed import fed
from trainrun.data.engines.generators import GlobalDraw
from trainrun.data.engines.iterable import StreamReader
from trainrun.data.engines.loader import LoaderBatches
from trainrun.data.facts import length_of
from trainrun.data.map_style import thread_safe
from trainrun.data.order.sampler import Plan, StreamPlan, batch_too_large
from trainrun.data.scale import Scaled, as_bytes
from trainrun.data.sequences.choose import sequence_plan
from trainrun.data.sequences.collate import Padded
from trainrun.data.sequences.token_counter import counted
from trainrun.data.stream_options import (
    StreamOptions,
    check_options,
    limit_key,
    needs_samples,
    sequence_options,
    with_limit_in_samples,
)
from trainrun.data.tensor_dataset import Columns, columns_of, rows_in_memory
from trainrun.errors import DataError
from trainrun.interfaces import Batches
from trainrun.runtime.free_memory import too_much


def open_batches(source: Any, options: StreamOptions) -> tuple[Batches, str]:
    """The stream, and what is to be said of it: the engine that was chosen and why, the lengths."""
    check_options(options)
    if isinstance(source, IterableDataset):
        batches, line = _open_iterable(source, options)
        return _augmented(batches, options), line
    prepared = prepared_source(source, options)
    if options.tally is not None:
        options.tally.planned = prepared.positions
    choice = choose(prepared.facts, _request(options))
    if choice.engine == "threads":
        prepared.reader.copy().try_out(0, trial(prepared))
    if choice.engine == "workers" and choice.number > 0:
        choice = fitting_choice(choice, prepared, options)
    lines = "\n".join([f"{options.key}: {choice.reason}", *prepared.notes])
    undecided = "auto" in (options.engine, options.num_workers, options.num_threads)
    ways = _options(prepared, options, choice) if undecided else []
    if len(ways) > 1:
        return AutoStream(ways, options.prefetch_factor, source), lines
    return _built(prepared, options, choice.engine, choice.number), lines


def _options(prepared: PreparedStream, options: StreamOptions, choice: Choice) -> list[Option]:
    """Every engine that may read this source, the rule's choice first; all give the same batches."""
    draws = ""
    try:
        prepared.reader.copy().try_out(0, trial(prepared))
    except GlobalDraw as error:
        draws = str(error)
    except DataError:
        return []  # the engine that reads it will say so when it gets there
    load = load_of(prepared, options)

    def fitting(workers: int) -> bool:
        return load is None or not too_much(load._replace(workers=workers))

    build = partial(_built, prepared, options)
    return options_of(prepared.facts, _request(options), choice, draws, fitting, build)


def _built(prepared: PreparedStream, options: StreamOptions, engine: str, number: int) -> Batches:
    batches = build_engine(prepared, options, engine, number)
    batches = counted(batches, prepared.recipe.collate, options.tally)
    if prepared.scale is not None:
        batches = Scaled(batches, prepared.scale, options.float_dtype)
    return _augmented(batches, options)


def prepared_source(source: Any, options: StreamOptions) -> PreparedStream:
    """Behind its cache (`options.cache`), with the plan of its batches."""
    options = with_limit_in_samples(options)
    source, scale = as_bytes(source)
    gather = options.gather if options.world_size > 1 else None
    source = cached(source, options.cache, options.key, options.report, gather)
    cache = source if isinstance(source, Cached) else None
    columns = columns_of(source, options.key)
    dataset = source if columns is None else columns
    if options.may_grow and columns is not None:
        options = replace(
            options, batch_size=roomy_batch_size(columns, options.batch_size, scale is not None)
        )
    length = length_of(dataset, options.key)
    if length == 0:
        raise DataError(f"{options.key}: the data set is empty")
    preparation = Preparation(options.float_dtype, options.max_sequence_length)
    found = sequence_plan(dataset, _new_plan(length, options.batch_size, options), sequence_options(options))
    plan: StreamPlan = _plan(length, options) if found is None else found.plan
    collate = options.collate_fn
    if found is not None:
        dataset, collate = found.source, found.collate
        columns = dataset if isinstance(dataset, Columns) else None
        preparation = Preparation(options.float_dtype)
    user_sees = options.transform is not None or options.collate_fn is not None
    if columns is None and not user_sees and (collate is None or collate == Padded()):
        columns = rows_in_memory(dataset)
        dataset, collate = (dataset, collate) if columns is None else (columns, None)
    recipe = Recipe(preparation, options.seed, options.key, options.transform, collate,
                    options.on_error == "skip", options.training, scale if user_sees else None,
                    options.transform_key)  # fmt: skip
    safe = thread_safe(dataset) and not user_sees
    single = needs_samples(options, collate)
    facts = EngineFacts(
        options.key, columns, single, safe, preparation, options.device, options.local_world_size
    )
    notes = (
        "" if cache is None else f"{options.key}: {cache.note}",
        "" if found is None else found.line,
    )
    return PreparedStream(dataset, plan, recipe, facts, tuple(filter(None, notes)),
                    None if user_sees else scale, {} if found is None else found.positions)  # fmt: skip


def _augmented(batches: Batches, options: StreamOptions) -> Batches:
    return augmented(batches, options.augment, options.seed, options.training, options.float_dtype)


def _request(options: StreamOptions) -> Request:
    return Request(options.engine, options.num_workers, options.num_threads)


def _open_iterable(source: Any, options: StreamOptions) -> tuple[Batches, str]:
    options = with_limit_in_samples(options)
    number = 0 if options.num_workers == "auto" else options.num_workers
    _check_iterable(number, options)
    try:
        length: int | None = len(source)
    except TypeError:  # it has no __len__
        length = None
    plan = _plan(length, options) if length is not None else _new_plan(0, options.batch_size, options)
    most = _most(plan, length, options)
    found = sequence_plan(source, plan, sequence_options(options))
    collate = options.collate_fn if found is None else found.collate
    preparation = Preparation(options.float_dtype, options.max_sequence_length if found is None else None)
    recipe = Recipe(preparation, options.seed, options.key, options.transform, collate,
                    transform_key=options.transform_key)  # fmt: skip
    reader = StreamReader(source, plan, length, most, recipe)
    reason = "asked for" if options.num_workers != "auto" else "an IterableDataset"
    line = f"{options.key}: {describe_workers(number)} ({reason})"
    skips = Skips(options.key, options.max_skipped_fraction, options.report, plan.num_seen)
    workers = worker_options(number, options)
    on_host = LoaderBatches(reader, plan, workers, skips, options.seed, options.key, options.report)
    batches = fed(on_host, options.device, options.copying, options.sizes)
    return counted(batches, collate, options.tally), line


def _check_iterable(number: int, options: StreamOptions) -> None:
    if number > 1:
        raise DataError(
            f"data.num_workers={number}: {options.key} is an IterableDataset, "
            "which at most 1 worker can read in order; use 0 or 1"
        )
    if options.engine == "resident":
        raise DataError(f"data.engine=resident: {options.key} is an IterableDataset; use data.engine=auto")
    if options.engine == "threads":
        raise DataError(
            f"data.engine=threads: {options.key} is an IterableDataset; use data.engine=workers with "
            "data.num_workers=1 to read it beside the training"
        )
    if options.on_error == "skip":
        raise DataError(
            f"data.on_error=skip: {options.key} is an IterableDataset, whose iterator ends with its first "
            "fault; use data.on_error=raise, or catch the fault inside of it"
        )


def _most(plan: Plan, length: int | None, options: StreamOptions) -> int | None:
    """Micro-batches of an IterableDataset that are read, in evaluation samples; None reads to its end."""
    if isinstance(options.limit, float) and options.limit == 1:
        return None
    if length is not None:
        return plan.num_batches if options.training else plan.num_seen
    if isinstance(options.limit, int):
        return options.limit
    raise DataError(
        f"{limit_key(options)}={options.limit}: {options.key} has no length that a fraction could be "
        "taken of; give a number of batches"
    )


def _plan(num_samples: int, options: StreamOptions) -> Plan:
    if num_samples == 0:
        raise DataError(f"{options.key}: the data set is empty")
    plan = _new_plan(num_samples, options.batch_size, options)
    if plan.global_size <= num_samples:
        return plan
    if options.training:
        raise batch_too_large(options.key, num_samples, plan)
    return _new_plan(num_samples, -(-num_samples // options.world_size), options)


def _new_plan(num_samples: int, batch_size: int, options: StreamOptions) -> Plan:
    training = options.training
    return Plan(num_samples, batch_size, options.seed, options.shuffle and training,
                options.drop_last and training, training, options.limit, options.rank,
                options.world_size)  # fmt: skip
