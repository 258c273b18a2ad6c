"""`data.cache`: a map-style source whose samples are decoded once, before the training, into memory or onto a disk.

What: the column store has the bytes of all samples, or of the first ones that fit. Loader workers fill it in order
when the stream is opened. From then on it is only read. The processes of one machine share it. When: decoding costs
more than reading bytes. When not: samples are random, or are read once. Samples of one shape are gathered as columns,
without collating and without workers.
Gain: an epoch over 4,000 pictures of 3x32x32 bytes, without a model, took 0.25 s sample by sample from the cache and
0.0015 s from its columns (one core of a busy machine).
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from trainrun.data.cache.fingerprint import build_content_key, fingerprint_source
from trainrun.data.cache.probe import Probe, build_randomness_error, explain_randomness, probe_samples
from trainrun.data.cache.samples import (
    Leaf,
    NotCacheable,
    SampleForm,
    flatten_sample,
    pack_values,
    rebuild_sample,
    sample_kind,
    view_column,
)
from trainrun.data.cache.shared import share_columns
from trainrun.data.engines.batch_reader import WorkerFailure
from trainrun.data.engines.choice import MAX_AUTO_WORKERS
from trainrun.data.engines.generators import read_generator_states, seed_globals
from trainrun.data.engines.workers import LoaderWorkers
from trainrun.data.look import read_in_child
from trainrun.data.map_style import describe_location, find_class_name, is_thread_safe, name_kind
from trainrun.data.readers.column_store import (
    Array,
    ColumnWriter,
    StoredColumns,
    build_in_memory,
    open_or_build,
)
from trainrun.data.readers.mapped_files import check_lengths, find_mapped_path, find_mappings, map_array
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Columns, find_columns
from trainrun.errors import DataError
from trainrun.limits import CacheSpec, parse_cache
from trainrun.output import format_count, format_quantity
from trainrun.runtime.machine import count_usable_cores, read_host_memory

LOG = logging.getLogger(__name__)
PASSED_ON = ("class_names", "classes", "num_classes", "describe", "lengths", "fingerprint")
CHUNK, CHUNK_BYTES = 32, 2**20  # samples that a worker reads and sends at once
LONG_SECONDS = 5.0  # to fill a cache: from then on several workers do it
FIRST_LINE_SECONDS = 2.0
MISSING = object()
EMPTY: Array = np.empty(0, np.uint8)

Gather = Callable[[Any], list[Any]]
Say = Callable[[str], None]


def open_cache(source: Any, spec: str, key: str, say: Say = LOG.info, gather: Gather | None = None,
           options: StreamOptions | None = None) -> Any:  # fmt: skip
    """Return the source with the cache of `spec`. A source in memory is returned unchanged.

    The samples are read in a child process or in loader workers.
    key: the setting of the source in messages (`data.train`). say: receives lines about a slow build of a cache.
    gather: returns the values of all ranks on every rank, if there are several. Ranks of one machine share a cache.
    options: how the source is read in the run.
    """
    wanted = parse_cache(spec)
    options = StreamOptions(key, True, 1, 0, report=say) if options is None else options
    if wanted.mode == "none":
        return source
    where = f"data.cache={wanted.text}: {key}"
    if isinstance(source, IterableDataset):
        raise DataError(
            f"{where} is {name_kind(source)}, whose samples cannot be read by number; use data.cache=none"
        )
    indexed = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    readable_source = indexed and not isinstance(source, type | str | bytes)
    if not readable_source or find_columns(source, key) is not None or not len(source):
        return source  # in memory already, or opening it says what is wrong
    source_key = fingerprint_source(source, wanted.folder, say) if wanted.folder is not None else ""
    probe = read_in_child(partial(probe_samples, source, where), options)
    build = partial(write_cache, source, probe, wanted.num_bytes, where, options)
    if wanted.folder is None:
        return cache_in_memory(source, wanted, where, probe, build, gather)
    expected, built = int(len(source) * probe.sample_bytes), []

    def build_on_disk(writer: ColumnWriter) -> dict[str, Any]:
        built.append(True)
        return build(writer)

    named = f"{key}: {find_class_name(source)}, {format_count(len(source), 'sample')}{describe_location(source, 0)}"
    content = build_content_key(source, source_key, probe.digest)
    try:
        stored = open_or_build(wanted.folder, content, named, expected, build_on_disk, say)
    except OSError as error:
        raise DataError(
            f"{where}: no room for the cache in {wanted.folder} ({error.strerror or error}); make room, name another "
            "folder, or keep a part in memory with data.cache=pool:<size>"
        ) from error
    story = "built" if built else "found"
    note = f"cache on disk, {format_quantity(count_stored_bytes(stored))}B ({story})"
    return CachedDataset(source, stored.arrays, stored.facts, probe.form, probe.leaves, where, note)


def count_stored_bytes(stored: StoredColumns) -> int:
    return sum(array.nbytes for array in stored.arrays.values())


def cache_in_memory(source: Any, wanted: CacheSpec, where: str, probe: Probe,
                    build: Callable[[ColumnWriter], dict[str, Any]],
                    gather: Gather | None) -> CachedDataset:  # fmt: skip
    """Fill a cache in memory, which the ranks of one machine share."""
    if not hasattr(os, "memfd_create"):
        raise DataError(f"{where}: needs Linux; use data.cache=disk:<folder>")
    number, limit = len(source), wanted.num_bytes
    expected = number * probe.sample_bytes
    if limit is not None:
        if probe.sample_bytes > limit:
            raise DataError(
                f"{where}: not one sample of {format_quantity(probe.sample_bytes)}B fits; use a larger pool, "
                "or data.cache=none"
            )
        expected = min(expected, limit)
    free = read_host_memory().free
    if expected > free:
        raise DataError(
            f"{where}: the cache needs about {format_quantity(expected)}B, {format_quantity(free)}B of memory are "
            f"free; use data.cache=pool:{free // 2 // 10**6}MB, or data.cache=disk:<folder>"
        )
    fill, ranks = partial(build_in_memory, where, build), 1
    try:
        if gather is None:
            stored = fill()
        else:
            stored, ranks = share_columns(f"{number} {limit} {probe.digest}", fill, gather, where)
    except OSError as error:
        raise DataError(
            f"{where}: no memory left for the cache ({error.strerror or error}); use data.cache=pool:<size>"
        ) from error
    num_kept = stored.facts["num_samples"]
    part = "" if num_kept == number else f", {num_kept / number:.0%} of the samples"
    shared = "" if ranks == 1 else f", one for {ranks} ranks"
    note = f"cache in memory, {format_quantity(count_stored_bytes(stored))}B{part}{shared}"
    return CachedDataset(source, stored.arrays, stored.facts, probe.form, probe.leaves, where, note)


class UncachedSample(NamedTuple):
    """A sample that cannot be read and so is not in the cache. random: why it must not be cached."""

    random: str = ""


class SampleBlock(NamedTuple):
    """Consecutive samples, as bytes.

    values: the bytes of each leaf, for all samples together. shapes: (n, dimensions) for each leaf. is_kept: (n,)
        whether a sample was read. num_unlike: samples of another kind than the first. random: why a sample must not
        be cached.
    """

    values: list[Array]
    shapes: list[Array]
    is_kept: Array
    num_unlike: int = 0
    random: str = ""

    def sizes(self, leaves: Sequence[Leaf]) -> list[Array]:
        """Return the size of each leaf of each sample in bytes."""
        itemsizes = [leaf.dtype.itemsize for leaf in leaves]
        counts = [shapes.prod(axis=1) * self.is_kept for shapes in self.shapes]
        return [count * size for count, size in zip(counts, itemsizes, strict=True)]

    def first(self, number: int, leaves: Sequence[Leaf]) -> SampleBlock:
        """Return the first samples."""
        sizes = self.sizes(leaves)
        values = [all_[: int(size[:number].sum())] for all_, size in zip(self.values, sizes, strict=True)]
        shapes = [shape[:number] for shape in self.shapes]
        return SampleBlock(values, shapes, self.is_kept[:number], self.num_unlike, self.random)


def build_block(samples: Sequence[Any], form: SampleForm, leaves: Sequence[Leaf]) -> SampleBlock:
    """Return samples as bytes. form, leaves: of the first sample. Samples of another form are left out."""
    kind, num_unlike, is_kept = sample_kind(form, tuple(leaves)), 0, []
    buffers: list[list[Array]] = [[EMPTY] for _ in leaves]
    shapes: list[list[Any]] = [[] for _ in leaves]
    for sample in samples:
        parts: list[tuple[Leaf, Array]] = []
        if not isinstance(sample, UncachedSample):
            with suppress(NotCacheable):
                own_form, own_leaves, own_buffers = flatten_sample(sample)
                if sample_kind(own_form, own_leaves) == kind:
                    parts = list(zip(own_leaves, own_buffers, strict=True))
            num_unlike += not parts
        is_kept.append(bool(parts))
        for number, leaf in enumerate(leaves):
            shapes[number].append(parts[number][0].shape if parts else (0,) * len(leaf.shape))
            buffers[number] += [parts[number][1]] if parts else []
    tables = [
        np.array(shape, np.int64).reshape(len(samples), len(leaf.shape))
        for shape, leaf in zip(shapes, leaves, strict=True)
    ]
    random = next((read.random for read in samples if isinstance(read, UncachedSample) and read.random), "")
    return SampleBlock(list(map(np.concatenate, buffers)), tables, np.array(is_kept), num_unlike, random)


@dataclass
class BlockReader:
    """A map-style data set whose items are blocks of samples.

    seeds_itself: whether the samples of a block seed the generators that they use. Later blocks are then read only
        once.
    """

    source: Any
    form: SampleForm
    leaves: tuple[Leaf, ...]
    seeds_itself: bool = False

    def __getitem__(self, indices: range) -> SampleBlock:
        return build_block(self._read_samples(indices), self.form, self.leaves)

    def _read_samples(self, indices: range) -> list[Any]:
        before = read_generator_states()
        samples = self._read_in_one_call(list(indices)) or [self._try_to_read(index) for index in indices]
        if self.seeds_itself or read_generator_states() == before:
            return samples
        seed_globals(0)
        before = read_generator_states()
        for place, index in enumerate(indices):  # one of them drew
            with suppress(Exception):  # it is tried again when it is asked for
                if why := explain_randomness(partial(self._read_sample, index), index):
                    samples[place] = UncachedSample(why)
        all_read = not any(isinstance(sample, UncachedSample) for sample in samples)
        self.seeds_itself = all_read and read_generator_states() != before
        return samples

    def _read_in_one_call(self, indices: list[int]) -> list[Any]:
        """Read samples in one call. Return an empty list if the source cannot do so, or if a sample fails or is left
        out.
        """
        at_once = getattr(self.source, "__getitems__", None)
        samples: list[Any] = []
        with suppress(Exception):
            samples = list(at_once(indices)) if callable(at_once) else []
        return samples if len(samples) == len(indices) else []

    def _read_sample(self, index: int) -> Any:
        return (self._read_in_one_call([index]) or [self.source[index]])[0]

    def _try_to_read(self, index: int) -> Any:
        try:
            return self.source[index]
        except Exception:
            return UncachedSample()


def write_cache(
    source: Any, probe: Probe, limit: int | None, where: str, options: StreamOptions, writer: ColumnWriter
) -> dict[str, Any]:
    """Write the samples in their order, all of them or the first ones that fit into `limit` bytes.

    Return the facts: the number of samples, and the shapes of the leaves if all samples have the same.
    """
    sample_bytes, leaves = max(1.0, probe.sample_bytes), probe.leaves
    total = len(source) if limit is None else min(len(source), int(limit / sample_bytes))
    size = max(1, min(CHUNK, int(CHUNK_BYTES / sample_bytes)))
    chunks = [range(first, min(first + size, total)) for first in range(0, total, size)]
    is_long = total * probe.seconds > LONG_SECONDS
    num_workers = min(MAX_AUTO_WORKERS, count_usable_cores()) if is_long else 1
    reader = BlockReader(source, probe.form, leaves)
    report_progress = build_progress_printer(options.key, options.report)
    blocks: list[SampleBlock] = []  # without their values
    with closing(read_blocks(reader, chunks, num_workers, options.key)) as read:  # ends workers after a fault
        for chunk, block in zip(chunks, limit_blocks(read, leaves, limit), strict=False):
            if block.random:
                raise build_randomness_error(source, block.random, where)
            for number, values in enumerate(block.values):
                writer.add(f"leaf.{number}", values)
            blocks.append(block._replace(values=[]))
            report_progress(chunk.stop, total)
    num_unlike = sum(block.num_unlike for block in blocks)
    if num_unlike and limit is None:
        LOG.warning(
            "%s: %d samples are of another kind than the first; such samples are read each time", where, num_unlike
        )  # fmt: skip
    return write_shapes(blocks, writer)


def limit_blocks(
    blocks: Iterable[SampleBlock], leaves: Sequence[Leaf], limit: int | None
) -> Iterator[SampleBlock]:
    """Yield blocks until their samples take `limit` bytes. The last block has only the samples that fit."""
    num_bytes = 0
    for block in blocks:
        sizes = sum(block.sizes(leaves), np.zeros(len(block.is_kept), np.int64))
        ends = num_bytes + sizes.cumsum()
        num_fitting = len(ends) if limit is None else int(np.searchsorted(ends, limit, "right"))
        if num_fitting < len(ends):
            yield block.first(num_fitting, leaves)
            return
        yield block
        num_bytes = int(ends[-1])


def write_shapes(blocks: Sequence[SampleBlock], writer: ColumnWriter) -> dict[str, Any]:
    """Write which samples are cached, and their shapes. Nothing is written if all are cached with the same shapes.
    Return the facts.
    """
    is_kept = np.concatenate([block.is_kept for block in blocks])
    shapes = [np.concatenate(parts) for parts in zip(*[block.shapes for block in blocks], strict=True)]
    if is_kept.all() and all((shape == shape[0]).all() for shape in shapes):
        return {"num_samples": len(is_kept), "shapes": [shape[0].tolist() for shape in shapes]}
    writer.add("is_kept", is_kept)
    for number, shape in enumerate(shapes):
        writer.add(f"shapes.{number}", shape)
    return {"num_samples": len(is_kept), "shapes": None}


def read_blocks(
    reader: BlockReader, chunks: list[range], num_workers: int, key: str
) -> Generator[SampleBlock]:
    """Yield the samples of each chunk, read by loader workers."""
    workers = LoaderWorkers(reader, chunks, num_workers, StreamOptions(key, True, 1, 0))
    try:
        for chunk, block in zip(chunks, workers, strict=True):
            lost = [UncachedSample()] * len(chunk)
            yield build_block(lost, reader.form, reader.leaves) if isinstance(block, WorkerFailure) else block
    finally:
        workers.close()


def build_progress_printer(key: str, say: Callable[[str], Any]) -> Callable[[int, int], None]:
    """Return a function that prints the progress of a slow cache build. The time between two lines doubles."""
    started, next_line = time.monotonic(), FIRST_LINE_SECONDS

    def tell(done: int, total: int) -> None:
        nonlocal next_line
        seconds = time.monotonic() - started
        if seconds > next_line and done < total:
            left = seconds / done * (total - done)
            say(f"{key}: {done} of {total} samples are in the cache, {left:.0f} s to go")
            next_line = 2 * seconds

    return tell


class CachedDataset:
    """A map-style source with its cache. Samples that are not cached are read each time.

    Every sample is a copy, equal to the sample of the source. note: a line for the start of a run.
    arrays: `leaf.N` (bytes,) for each leaf. If shapes differ, also `shapes.N` (n, dimensions) and `is_kept` (n,).
    facts: see `write_cache`. form, leaves: the form and the leaves of the first sample.
    """

    def __init__(self, source: Any, arrays: Mapping[str, Array], facts: Mapping[str, Any], form: SampleForm,
                 leaves: tuple[Leaf, ...], where: str, note: str) -> None:  # fmt: skip
        self._arguments = (source, arrays, facts, form, leaves, where, note)
        self.source, self.arrays, self.note, self.where = source, arrays, note, where
        self._form, self._leaves = form, leaves
        self.num_stored: int = facts["num_samples"]
        self._fixed = None if facts["shapes"] is None else list(map(tuple, facts["shapes"]))
        self._values = [arrays.get(f"leaf.{number}", EMPTY).view(np.ndarray) for number in range(len(leaves))]
        self._mappings = find_mappings(arrays.values())
        self._is_kept, self._shapes, self._ends = EMPTY, [], []
        if self._fixed is None:
            self._is_kept = np.array(arrays["is_kept"])
            self._shapes = [arrays[f"shapes.{number}"].view(np.ndarray) for number in range(len(leaves))]
            sizes = SampleBlock([], self._shapes, self._is_kept).sizes(leaves)
            self._ends = [np.append(0, size.cumsum()) for size in sizes]

    def __reduce__(self) -> Any:
        return CachedDataset, self._arguments

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        """Return the attributes of the source that describe its samples."""
        if name in PASSED_ON:
            return getattr(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: int) -> Any:
        position = self._position(index)
        check_lengths(self._mappings)
        sample = self.read(position)
        return self.source[position] if sample is MISSING else sample

    def __getitems__(self, indices: list[int]) -> list[Any]:
        positions = [self._position(index) for index in indices]
        check_lengths(self._mappings)
        samples = [self.read(index) for index in positions]
        missing = [row for row, sample in enumerate(samples) if sample is MISSING]
        at_once = getattr(self.source, "__getitems__", None)
        wanted = [positions[row] for row in missing]
        new = list(at_once(wanted)) if missing and callable(at_once) else [self.source[i] for i in wanted]
        if len(new) != len(missing):
            name = type(self.source).__name__
            raise DataError(
                f"{self.where}: {name}.__getitems__ gave {len(new)} samples for {len(missing)} indices"
            )
        for row, sample in zip(missing, new, strict=True):
            samples[row] = sample
        return samples

    def is_cached(self, index: int) -> bool:
        """Return whether a sample is in the cache."""
        return index < self.num_stored and (self._fixed is not None or bool(self._is_kept[index]))

    def read(self, index: int) -> Any:
        """Return a copy of a sample, or MISSING."""
        if not self.is_cached(index):
            return MISSING
        leaves, buffers = self._leaves, []
        shapes = self._fixed or [tuple(shape[index].tolist()) for shape in self._shapes]
        leaves = tuple(leaf._replace(shape=shape) for leaf, shape in zip(leaves, shapes, strict=True))
        for number, leaf in enumerate(leaves):
            begin = int(self._ends[number][index]) if self._ends else index * leaf.num_bytes
            buffers.append(self._values[number][begin : begin + leaf.num_bytes].copy())
        return rebuild_sample(self._form, iter(leaves), iter(buffers))

    def build_cached_columns(self) -> Columns | None:
        """Return all samples as mapped columns; None if one is missing or shapes differ."""
        is_flat = all(part.container is None for part in self._form.parts)
        if self.num_stored < len(self) or self._fixed is None or not is_flat:
            return None
        leaves = [leaf._replace(shape=shape) for leaf, shape in zip(self._leaves, self._fixed, strict=True)]
        return (
            build_columns_from_arrays(self.arrays, self._form, leaves)
            if all(leaf.is_plain for leaf in leaves)
            else None
        )

    @property
    def thread_safe(self) -> bool:
        return self.count_cached_samples() == len(self) or is_thread_safe(self.source)

    @property
    def source_class_name(self) -> str:
        """Return the class name of the cached data set, which messages about unreadable samples name."""
        return type(self.source).__name__

    def count_cached_samples(self) -> int:
        """Return how many samples are in the cache."""
        return self.num_stored if self._fixed is not None else int(np.count_nonzero(self._is_kept))

    def _position(self, index: int) -> int:
        position = operator.index(index)
        position += len(self) if position < 0 else 0
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is outside of {len(self)} samples")
        return position


def build_columns_from_arrays(
    arrays: Mapping[str, Array], form: SampleForm, leaves: Sequence[Leaf]
) -> Columns:
    """Return stored leaves as columns. They are mapped a second time, so a write changes only a private copy."""
    stored = [map_array(find_mapped_path(arrays[f"leaf.{number}"])) for number in range(len(leaves))]
    values = [view_column(raw.view(np.ndarray), leaf) for raw, leaf in zip(stored, leaves, strict=True)]
    rows = tuple(value.reshape(-1, *leaf.shape) for value, leaf in zip(values, leaves, strict=True))
    again = partial(build_columns_from_arrays, arrays, form, leaves)
    return Columns(
        rows, form.keys, partial(pack_values, form), in_place=True, again=again, files=find_mappings(stored)
    )
