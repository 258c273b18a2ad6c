"""Build the stream of a prepared source: choose an engine, and check what it needs before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainrun.data.bad_samples import SkipCounter
from trainrun.data.batch import Preparation
from trainrun.data.engines.batch_reader import AT_ONCE, COLLATE_KEY, BatchReader, SampleSteps
from trainrun.data.engines.choice import choose_engine, describe_workers
from trainrun.data.engines.device_feed import DeviceFeed
from trainrun.data.engines.in_memory import ResidentBatches
from trainrun.data.engines.iterable import (
    CheckSameSamples,
    EvenBatches,
    StreamReader,
    continues_previous_pass,
    has_parts,
)
from trainrun.data.engines.loader import LoaderBatches
from trainrun.data.engines.stream import StreamEngine
from trainrun.data.engines.threads import ThreadBatches
from trainrun.data.look import build_recipe
from trainrun.data.map_style import name_kind
from trainrun.data.order.sampler import Plan, StreamPlan
from trainrun.data.same_samples import refuse_divided_source
from trainrun.data.stream_options import (
    Collate,
    PreparedStream,
    StreamOptions,
    build_plan,
    build_unchecked_plan,
    limit_key,
)
from trainrun.data.tensor_dataset import is_reader
from trainrun.errors import DataError
from trainrun.interfaces import Batches
from trainrun.output import format_count
from trainrun.runtime.child_process import can_fork_safely

SequencePlanner = Callable[[Plan], Any]  # a `SequencePlan`, or None
Finish = Callable[[Batches], Batches]
CHANGES = (
    "gives another sample when it is read again (by a generator of its own, or the clock), so a resume and other "
    "loader workers give other samples; draw from a parameter `generator`, or from the global generators, which are "
    "seeded for each sample"
)

GOES_ON = (
    "continues from one epoch to the next in the main process, and its samples depend on it. A loader worker, or a "
    "resume, begins with the initial value: use data.num_workers=1, set it in __iter__, or give the class state_dict() "
    "and load_state_dict(state)"
)

SAME_SAMPLES = (
    "continues from one epoch to the next, but a loader worker begins each epoch with the initial value: every epoch "
    "has "
    "the same samples. For others in each epoch (from an endless source or a random generator of its own), give the "
    "class set_epoch(epoch)"
)

NOT_COMPARED = (
    "was not checked for beginning anew in each epoch: no child process read its first samples within 10 s (a fork "
    "needs Linux, no threads of your own and no started CUDA). If it goes on, a resume differs: use "
    "data.num_workers=1, or give the class set_epoch(epoch), or state_dict() and load_state_dict(state)"
)


def open_engine(prepared: PreparedStream, finish: Finish) -> tuple[Batches, StreamEngine, str]:
    """Return the stream of the chosen engine, who reads it, and the reason.

    finish: applied to its batches on the device.
    """
    options, plan = prepared.options, prepared.plan
    choice = choose_engine(prepared)
    (engine, number), reason = choice
    if engine == "resident":
        return finish(ResidentBatches(prepared)), choice.read_by, reason
    reader = _build_reader(prepared)
    reader, note = check_randomness(reader, options)
    kind = ThreadBatches if engine == "threads" else LoaderBatches
    on_host = kind(reader, plan, number, options, _build_skips(options, plan))
    return finish(_feed_device(on_host, options)), choice.read_by, reason + note


def check_randomness(reader: BatchReader, options: StreamOptions) -> tuple[BatchReader, str]:
    """Return the reader, and a line on how it reads. Report samples that depend on more than (seed, epoch, index).

    A data set whose `__getitems__` uses random numbers is called with one sample at a time.
    """
    look, note = options.look, ""
    if look is None or not reader.runs_user_code:
        return reader, note
    recipe = replace(reader.recipe, drawn_from=look.drawn_from)
    if AT_ONCE in look.draws:
        recipe = replace(recipe, one_by_one=True)
        note = (
            f"\n{options.key}: its __getitems__ draws random numbers, so samples are asked of it one by one; with a "
            "parameter `generators`, one for each sample, it reads them at once"
        )
    if COLLATE_KEY in look.draws and (options.accumulates or options.world_size > 1):
        options.report(
            f"{COLLATE_KEY}: draws random numbers, other ones if accumulation or ranks cut the batches in another "
            "way; draw them in data.transform, and mix samples with data.augment.mixup"
        )
    for name in look.changes:
        options.report(f"{name}: {CHANGES}")
    return BatchReader(reader.dataset, recipe), note


def _build_skips(options: StreamOptions, plan: StreamPlan) -> SkipCounter:
    samples = plan.num_seen / options.world_size
    return SkipCounter(options.key, options.max_skipped_fraction, options.report, samples, plan.num_batches)


def _feed_device(batches: Batches, options: StreamOptions) -> Batches:
    if options.device.type == "cpu":
        return batches
    return DeviceFeed(batches, options.device, options.copying, options.sizes)


def _build_reader(prepared: PreparedStream) -> BatchReader:
    options, columns = prepared.options, prepared.columns
    scale = prepared.scale if prepared.runs_user_code else None
    recipe = build_recipe(options, scale)
    recipe = replace(recipe, preparation=prepared.preparation, collate=prepared.collate)
    return BatchReader(prepared.dataset if columns is None else columns.move_to_host(), recipe)


def open_iterable(
    source: Any, options: StreamOptions, sequences: SequencePlanner
) -> tuple[Batches, Collate | None, StreamEngine, str]:
    """Open an IterableDataset. Return its stream, its collate function, who reads it, and a line about that."""
    number, reason = _choose_iterable_workers(source, options)
    parts = options.world_size * max(1, number)
    divided = options.training and parts > 1 and has_parts(source, parts)
    _check_iterable(source, 1 if divided else number, options)
    shards = getattr(source, "num_shards", parts)
    if options.training and shards < parts and has_parts(source, shards):
        options.report(
            f"{options.key}: {format_count(shards, 'shard')} are fewer than {parts} readers, so every rank reads all "
            f"of them and skips the samples of the others; use at least {parts} shards"
        )
    try:
        length: int | None = len(source)
    except TypeError:  # it has no __len__
        length = None
    plan = (
        build_plan(length, options)
        if length is not None
        else build_unchecked_plan(0, options.batch_size, options)
    )
    most = _count_batches(plan, length, options)
    sequence_plan = sequences(plan)
    collate = options.collate_fn if sequence_plan is None else sequence_plan.collate
    preparation = Preparation(
        options.float_dtype, options.max_sequence_length if sequence_plan is None else None
    )
    recipe = SampleSteps(preparation, options.seed, options.key, options.transform, collate,
                    transform_key=options.transform_key)  # fmt: skip
    reader = StreamReader(
        source, plan, length, most, recipe, options.shuffle_buffer or 0, max(1, number) * divided
    )
    options.places.parts = reader.parts
    on_host: Batches = LoaderBatches(reader, plan, number, options, _build_skips(options, plan))
    if options.training and options.world_size > 1 and options.gather is not None:
        on_host = (EvenBatches if divided else CheckSameSamples)(on_host, options.gather, options.key)
    if divided:
        reason += f"; each of {parts} readers has a part of its own"
    if length is most is None and not options.training:
        reason += f" of unknown length; {limit_key(options)} ends one that is endless"
    return (
        _feed_device(on_host, options),
        collate,
        StreamEngine("workers", number),
        f"{describe_workers(number)} ({reason})",
    )


def _choose_iterable_workers(source: Any, options: StreamOptions) -> tuple[int, str]:
    """Return how many loader workers read the source, and why.

    With `auto`, one worker reads if the training data is read by workers, if a pass continues where the previous pass
    stopped (each worker begins with a new copy of the source), or if the first samples are slow.
    """
    number, reason, beside = options.num_workers, "asked for", options.beside
    if number == "auto" and beside is not None and beside.engine == "workers" and beside.number > 0:
        return 1, name_kind(source)
    if number != "auto" and number > 0 and not options.training:
        return 1, reason
    continues = continues_previous_pass(source)
    if number == "auto":
        number, reason = 0, name_kind(source)
        if continues:
            number, reason = 1, f"{name_kind(source)} that continues from epoch to epoch"
        elif continues is None and can_fork_safely():
            number, reason = 1, f"{name_kind(source)} that is slow to read"
    if number == 0 and continues is not False:
        options.report(f"{options.key}: {type(source).__name__} {GOES_ON if continues else NOT_COMPARED}")
    elif continues and options.training:
        options.report(f"{options.key}: {type(source).__name__} {SAME_SAMPLES}")
    return number, reason


def _check_iterable(source: Any, number: int, options: StreamOptions) -> None:
    key, shards = options.key, getattr(source, "num_shards", None)
    if options.world_size > 1:
        refuse_divided_source(source, key)
    readers = f"{options.world_size} x {number} readers"
    if is_reader(source):
        too_few = f", and {format_count(shards, 'shard')} are too few for {readers}; use fewer workers or more shards"
    else:
        has = "" if shards is None else f"; it has num_shards={shards} for {readers}"
        too_few = f", which at most 1 worker can read in order; use 0 or 1, or give it shard(num_shards, index){has}"
    wrong = {
        f"data.num_workers={number}": number > 1 and too_few,
        f"data.cache={options.cache}": options.training
        and options.cache != "none"
        and ", which is read anew in every epoch; leave it out",
        "data.engine=resident": options.engine == "resident" and "; use data.engine=auto",
        "data.engine=threads": options.engine == "threads"
        and "; use data.engine=workers with data.num_workers=1 to read it beside the training",
        "data.on_error=skip": options.on_error == "skip"
        and ", whose iterator ends with its first fault; use data.on_error=raise"
        + (", or catch the fault inside of it" if not is_reader(source) else ""),
    }
    for setting, why in wrong.items():
        if why:
            raise DataError(f"{setting}: {key} is {name_kind(source)}{why}")


def _count_batches(plan: Plan, length: int | None, options: StreamOptions) -> int | None:
    """Return how many micro-batches (in evaluation: samples) of an IterableDataset are read. None: until its end."""
    if isinstance(options.limit, float) and options.limit == 1:
        return None
    if length is not None:
        return plan.num_batches if options.training else plan.num_seen
    if isinstance(options.limit, int):
        return options.limit
    raise DataError(
        f"{limit_key(options)}={options.limit}: {options.key} has no length, so a fraction is not possible; use a "
        "number of batches"
    )
