"""From a prepared source to a stream: the engines behind one door, and what they need before they start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import isgeneratorfunction
from typing import Any

from torch import Tensor

from trainrun.data.bad_samples import Skips
from trainrun.data.batch import Preparation, map_leaves
from trainrun.data.engines.auto_stream import AutoStream, Option
from trainrun.data.engines.batch_reader import AT_ONCE, COLLATE_KEY, BatchReader, Key, Recipe
from trainrun.data.engines.choice import (
    choose,
    describe_workers,
    fitted,
    most_workers,
    shared_free_bytes,
    ways_to_read,
)
from trainrun.data.engines.generators import GlobalDraw, drawn_from, kept_generators
from trainrun.data.engines.in_memory import ResidentBatches
from trainrun.data.engines.iterable import Alike, InStep, StreamReader, has_parts, keeps_place
from trainrun.data.engines.loader import LoaderBatches
from trainrun.data.engines.threads import ThreadBatches
from trainrun.data.map_style import shallow
from trainrun.data.order.sampler import Plan, StreamPlan
from trainrun.data.same_samples import refuse_divided
from trainrun.data.stream_options import Collate, PreparedStream, StreamOptions, limit_key, new_plan, plan_of
from trainrun.errors import DataError
from trainrun.interfaces import Batches
from trainrun.seeding import kept_random_state

SequencePlanner = Callable[[Plan], Any]  # a `SequencePlan`, or None
Finish = Callable[[Batches], Batches]
ANEW = ": a generator of its own, whose numbers begin anew with a resume and in each loader worker; draw"


def open_engine(prepared: PreparedStream, finish: Finish) -> tuple[Batches, str]:
    """The stream of the engine that the rule takes, and why; of several engines where a measurement may decide.

    finish: what is done to the batches of each.
    """
    options, choice = prepared.options, choose(prepared)
    reader, told = told_of_draws(_reader_of(prepared), options)
    batch_bytes = _batch_bytes(prepared) if choice.engine == "workers" or options.engine == "auto" else 0
    if choice.engine == "threads":
        _try_out(reader)
    if choice.engine == "workers":
        choice = fitted(choice, batch_bytes, options)
    if "auto" in (options.engine, options.num_workers, options.num_threads):
        try:
            _try_out(reader)
            draws = False
        except GlobalDraw:
            draws = True
        most = most_workers(batch_bytes, options.prefetch_factor)
        ways = ways_to_read(prepared, choice, draws, most)
        if len(ways) > 1:
            each = [Option(*way, partial(_opened, prepared, reader, finish, *way[1:])) for way in ways]
            return AutoStream(each, options.prefetch_factor, prepared.source), choice.reason + told
    return _opened(prepared, reader, finish, choice.engine, choice.number), choice.reason + told


def told_of_draws(reader: BatchReader, options: StreamOptions) -> tuple[BatchReader, str]:
    """The reader, which asks one by one for samples that are random at once; and lines on numbers that depend on more
    than (seed, epoch, index), each after a line break."""
    lines, recipe = [], reader.recipe
    if not reader.users_code:
        return reader, ""
    found = reader.draws() if reader.draws_for_batches else set()
    if any(what.startswith(AT_ONCE) for what in found):
        reader = BatchReader(reader.dataset, replace(recipe, one_by_one=True))
        lines.append(
            f"{options.key}: its __getitems__ draws random numbers, so samples are asked of it one by one; with a "
            "parameter `generators`, one for each sample, it reads them at once"
        )
    if COLLATE_KEY in found and (options.accumulates or options.world_size > 1):
        lines.append(
            f"{COLLATE_KEY}: draws random numbers, other ones if accumulation or ranks cut the batches in another "
            "way; draw them in data.transform, and mix samples with data.augment.mixup"
        )
    lines += [
        f"{name}{ANEW} from a parameter `generator`, seeded for each sample"
        for name in reader.draws_of_its_own()
    ]
    return reader, "".join(f"\n{line}" for line in lines)


def _opened(
    prepared: PreparedStream, reader: BatchReader, finish: Finish, engine: str, number: int
) -> Batches:
    """A stream of one engine, its batches on the device."""
    options, plan = prepared.options, prepared.plan
    if engine == "resident":
        return finish(ResidentBatches(prepared))
    kind = ThreadBatches if engine == "threads" else LoaderBatches
    on_host = kind(reader, plan, number, options, _skips(options, plan))
    return finish(_fed(on_host, options))


def _skips(options: StreamOptions, plan: StreamPlan) -> Skips:
    samples = plan.num_seen / options.world_size
    return Skips(options.key, options.max_skipped_fraction, options.report, samples, plan.num_batches)


def _fed(batches: Batches, options: StreamOptions) -> Batches:
    if options.device.type == "cpu":
        return batches
    from trainrun.data.engines.device_feed import DeviceFeed

    return DeviceFeed(batches, options.device, options.copying, options.sizes)


def _reader_of(prepared: PreparedStream) -> BatchReader:
    options, columns = prepared.options, prepared.columns
    recipe = Recipe(prepared.preparation, options.seed, options.key, options.transform, prepared.collate,
                    options.on_error == "skip", options.training, prepared.scale if prepared.users_code else None,
                    options.transform_key)  # fmt: skip
    return BatchReader(prepared.dataset if columns is None else columns.on_host(), recipe)


def _try_out(reader: BatchReader) -> None:
    """Read three samples. Raises GlobalDraw if that draws from the global generators."""
    reader.copy().try_out(0, sorted({0, reader.number // 2, reader.number - 1}))


def _batch_bytes(prepared: PreparedStream) -> int:
    """What a batch of a worker takes, told from one sample; 0 if there is room for any, or it is not read."""
    if shared_free_bytes() is None:
        return 0
    reader, options = _reader_of(prepared), prepared.options
    reader = BatchReader(reader.dataset, replace(reader.recipe, skips=False)).copy()
    try:
        with kept_random_state():
            data = reader.read(Key(0, [0], True, False)).data
    except DataError:  # it is raised, or the sample left out, when its turn comes
        return 0
    sizes: list[int] = []
    map_leaves(data, lambda leaf: sizes.append(leaf.nbytes) if isinstance(leaf, Tensor) else None)
    return sum(sizes) * options.batch_size


def open_iterable(
    source: Any, options: StreamOptions, sequences: SequencePlanner
) -> tuple[Batches, Collate | None, str]:
    """The stream of an IterableDataset, how it is collated, and how it is read."""
    number = 0 if options.num_workers == "auto" else options.num_workers
    number = number if options.training else min(number, 1)  # that many are asked of the training data
    parts = options.world_size * max(1, number)
    divided = options.training and parts > 1 and has_parts(source, parts)
    _check_iterable(source, 1 if divided else number, options)
    try:
        length: int | None = len(source)
    except TypeError:  # it has no __len__
        length = None
    plan = plan_of(length, options) if length is not None else new_plan(0, options.batch_size, options)
    most = _most(plan, length, options)
    found = sequences(plan)
    collate = options.collate_fn if found is None else found.collate
    preparation = Preparation(options.float_dtype, options.max_sequence_length if found is None else None)
    recipe = Recipe(preparation, options.seed, options.key, options.transform, collate,
                    transform_key=options.transform_key)  # fmt: skip
    reader = StreamReader(
        source, plan, length, most, recipe, options.shuffle_buffer or 0, max(1, number) * divided
    )
    options.places.parts = reader.parts
    on_host: Batches = LoaderBatches(reader, plan, number, options, _skips(options, plan))
    if options.training and options.world_size > 1 and options.gather is not None:
        on_host = (InStep if divided else Alike)(on_host, options.gather, options.key)
    reason = "asked for" if options.num_workers != "auto" else "an IterableDataset"
    if divided:
        reason += f"; each of {parts} readers has a part of its own"
    told = "".join(
        f"\n{options.key}{name}{ANEW} from the global generators, which are seeded for each sample"
        for name in _drawn_on(source)
    )
    if length is most is None and not options.training:
        reason += f" of unknown length; {limit_key(options)} ends one that is endless"
    return _fed(on_host, options), collate, f"{describe_workers(number)} ({reason}){told}"


def _drawn_on(source: Any) -> list[str]:
    """Places of the generators that a pass draws from where the one before left off: the first sample is tried."""
    trial, found = shallow(source), list[str]()
    if keeps_place(source) or hasattr(source, "set_epoch") or not isgeneratorfunction(type(source).__iter__):
        return found  # what gives an iterator that it keeps would lose a sample
    with kept_random_state(), suppress(Exception):  # which is raised when its turn comes
        kept = kept_generators(source)
        found = drawn_from(kept, lambda: next(iter(trial), None)) if kept else []
    return found


def _check_iterable(source: Any, number: int, options: StreamOptions) -> None:
    key, shards = options.key, getattr(source, "num_shards", None)
    if options.world_size > 1:
        refuse_divided(source, key)
    has = (
        "" if shards is None else f"; it has num_shards={shards} for {options.world_size} x {number} readers"
    )
    wrong = {
        f"data.num_workers={number}": number > 1
        and f", which at most 1 worker can read in order; use 0 or 1, or give it shard(num_shards, index){has}",
        f"data.cache={options.cache}": options.training
        and options.cache != "none"
        and ", which is read anew in every epoch; leave it out",
        "data.engine=resident": options.engine == "resident" and "; use data.engine=auto",
        "data.engine=threads": options.engine == "threads"
        and "; use data.engine=workers with data.num_workers=1 to read it beside the training",
        "data.on_error=skip": options.on_error == "skip"
        and ", whose iterator ends with its first fault; use data.on_error=raise, or catch the fault inside of it",
    }
    for setting, why in wrong.items():
        if why:
            raise DataError(f"{setting}: {key} is an IterableDataset{why}")


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
