"""Learn facts about a source before the training, by reading a few samples in a child process.

what: the child is a fork of this process. It reads a few samples, each of them twice, and returns plain values: kind
    and shape of the first input, seconds and bytes of a sample, lengths, and which calls are random. Everything that
    the data set opens or changes while it is read ends with the child. So the process that reads in the training (the
    main process or the loader workers, never both, see `choice.py`) is the first one to use the data set.
when: the source runs code for a sample. All facts about tensors and arrays are known already.
when not: a fork is not safe: on systems without it, after CUDA was started, or beside threads of the user. There the
    main process reads in the training anyway, so it reads these samples too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from trainrun.data.batch import Preparation, convert_numbers, is_integer, map_leaves
from trainrun.data.engines.batch_reader import (
    FILLERS_TRIED,
    BatchReader,
    BatchRequest,
    SampleSteps,
)
from trainrun.data.engines.generators import GLOBAL_GENERATORS, RecordDraws
from trainrun.data.map_style import choose_spread_indices
from trainrun.data.same_samples import build_shared_memory_error, hash_samples
from trainrun.data.scale import Scale
from trainrun.data.sequences.lengths import (
    SequenceLengths,
    learn_lengths,
    measure_columns,
    read_all_lengths,
)
from trainrun.data.stream_options import FirstInput, SourceFacts, StreamOptions
from trainrun.data.tensor_dataset import Columns, find_byte_pictures, find_columns, measure_length
from trainrun.errors import DataError
from trainrun.interfaces import TARGET_KEYS, choose_input_key
from trainrun.runtime.child_process import (
    ChildError,
    ChildExited,
    ChildTimeout,
    can_fork_safely,
    report_progress,
    run_in_child,
)
from trainrun.seeding import restore_random_state

T = TypeVar("T")

ROWS_READ = 8  # spread over the source; each is read three times
READ_SECONDS = 0.5  # after so long no further row is begun


def inspect_source(source: Any, options: StreamOptions) -> SourceFacts:
    """Read a few samples of a source that can be indexed, and return their facts. No other source is read."""
    if isinstance(source, IterableDataset):
        return SourceFacts()
    columns = find_columns(source, options.key)
    dataset = source if columns is None else columns
    if measure_length(dataset, options.key) == 0:
        return SourceFacts(fault=f"{options.key}: the data set is empty")
    if columns is not None and options.transform is None and options.collate_fn is None:
        return SourceFacts(describe_first_input(columns[0]), drawn_from=())
    return read_in_child(partial(_look, dataset, options), options)


def find_kind_of_input(source: Any, options: StreamOptions) -> str:
    """Return the kind of the first input, as in `FirstInput`; "" if no sample can be read, which is reported
    elsewhere.
    """
    look = inspect_source(source, options) if options.look is None else options.look
    return "" if look.first is None else look.first.kind


def find_sequences(source: Any, options: StreamOptions) -> SequenceLengths:
    """Return the sequences of a source, from its `SourceFacts`, or with all lengths if `options` need them.

    The result is the same on every rank, except for `seen`. Raise DataError if a sample cannot be read, or if all
    lengths are needed and the fields of a sample are unknown.
    """
    needs_all = options.needs_lengths
    if len(source) == 0:
        raise DataError(f"{options.key}: the data set is empty")
    if isinstance(source, Columns):
        return measure_columns(source)
    sequences = None if options.look is None else options.look.sequences
    if sequences is None and (options.look is None or not needs_all):
        sequences = read_in_child(
            partial(learn_lengths, source, options.key, options.seed, needs_all), options
        )
    if sequences is None:
        read_all = partial(read_all_lengths, source, options.key, options.seed, options.report)
        return _run_on_one_rank(lambda: read_in_child(read_all, options), options)
    return sequences


def _run_on_one_rank(work: Callable[[], T], options: StreamOptions) -> T:
    """Compute a value on rank 0 and return it on every rank. Raise the DataError of rank 0 on every rank."""
    if options.gather is None:
        return work()
    answer: T | DataError | None = None
    if options.rank == 0:
        try:
            answer = work()
        except DataError as error:
            answer = error
    shared: Any = options.gather(answer)[0]
    if isinstance(shared, DataError):
        raise shared
    result: T = shared
    return result


def read_in_child(work: Callable[[], T], options: StreamOptions) -> T:
    """Return the result of `work`, which reads a source. Run it in a child process if a fork is safe.

    Raise DataError for a fault in it, or if the child ended. The child must make progress within
    `data.worker_timeout_seconds`. Without a child, the main process reads the source.
    """
    if not uses_fork(options):
        with restore_random_state():
            return work()
    try:
        return run_in_child(work, options.timeout_seconds, computes=False, say=options.report)
    except ChildTimeout as error:
        if (
            options.num_workers == 0
        ):  # a fork has no threads of its parent: a source may wait for one of its own
            with restore_random_state():
                return work()
        raise DataError(
            f"data.worker_timeout_seconds={options.timeout_seconds:g}: {options.key} gave no sample for that long in a "
            "child process; increase it (0: no limit), or see with data.num_workers=0 where reading hangs"
        ) from error
    except ChildExited as error:
        raise DataError(
            f"{options.key}: reading its first samples ended the process that read them ({error}): code of the data "
            "set, or of a library that it uses, crashes, or memory ran out"
        ) from error
    except ChildError as error:
        raise DataError(f"{options.key}: cannot be looked at before the training: {error}") from RuntimeError(
            error.text
        )


def uses_fork(options: StreamOptions) -> bool:
    """Return whether a source is read in a fork before the training.

    Loader workers are forked in the same way, so their sources can always be read in a fork.
    """
    if sys.platform != "linux":
        return False
    if options.num_workers not in ("auto", 0) and options.engine != "threads":
        return True
    return can_fork_safely()


def build_recipe(options: StreamOptions, scale: Scale | None = None) -> SampleSteps:
    """Return the steps that are applied to samples whose form is not known yet."""
    return SampleSteps(Preparation(options.float_dtype, options.max_sequence_length), options.seed, options.key,
                  options.transform, options.collate_fn, options.on_error == "skip", options.training, scale,
                  options.transform_key)  # fmt: skip


def _look(dataset: Any, options: StreamOptions) -> SourceFacts:
    raw, scale = find_byte_pictures(dataset)
    recipe = build_recipe(options, scale)
    first, fault = _read_first_input(BatchReader(raw, recipe), recipe.skips)
    if first is None:
        return SourceFacts(fault=fault)
    reads = _SampleReads(raw, recipe, options.batch_size)
    for row in choose_spread_indices(len(raw), ROWS_READ).tolist():
        reads.read(row)
        report_progress()
        if reads.total_seconds > READ_SECONDS:
            break
    if reads.reuses_memory and options.batch_size > 1:
        raise build_shared_memory_error(options.key)
    reads.read_batch()
    sequences = None
    if find_columns(dataset, options.key) is None and options.sequences_matter:
        sequences = learn_lengths(raw, options.key, options.seed, options.needs_lengths)
    return replace(reads.look(first), sequences=sequences)


class _SampleReads:
    """Reads of samples in three ways, for a comparison: seeded, seeded again in the same way, and with other seeds."""

    def __init__(self, dataset: Any, recipe: SampleSteps, batch_size: int) -> None:
        self._draws = RecordDraws()
        self._reader = BatchReader(dataset, recipe, self._draws)
        self._again = BatchReader(dataset, recipe)
        self._other = BatchReader(dataset, replace(recipe, seed=recipe.seed + 1))
        self._recipe, self._batch_size = recipe, batch_size
        self._times: list[tuple[float, float, int]] = []
        self._rows: list[int] = []
        self._changes: dict[str, None] = {}
        self._last: list[Any] = []  # the sample of the row before
        self.reuses_memory = False
        self._depends = False  # on a seed, though no generator moves
        self._sample_bytes = 0

    @property
    def total_seconds(self) -> float:
        return self._draws.seconds

    def read(self, row: int) -> None:
        """Read one sample. A fault is left to the training, where `data.on_error` decides."""
        self._rows.append(row)
        before = self._draws.seconds, self._draws.busy_seconds, self._draws.pauses
        last = hash_samples(self._last)
        try:
            sample, *first = _read_and_digest(self._reader, row)
            self.reuses_memory = self.reuses_memory or hash_samples(self._last) != last
            self._last = [sample]
            after = self._draws.seconds, self._draws.busy_seconds, self._draws.pauses
            self._times.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
            _, *second = _read_and_digest(self._again, row)
            _, *other = _read_and_digest(self._other, row)
        except DataError:
            return
        for place, mine, its in zip(
            (self._recipe.key, self._recipe.transform_key), first, second, strict=True
        ):
            if mine != its:
                self._changes[place] = None
                break
        else:
            self._depends = self._depends or (first != other and not self._draws.moved)

    def read_batch(self) -> None:
        """Read these samples as a batch, to measure its size and to detect random numbers in functions of whole
        batches.
        """
        rows = self._rows
        try:
            data = self._reader.read(BatchRequest(0, rows[:1], True, False)).data
            sizes: list[int] = []
            map_leaves(data, lambda leaf: sizes.append(leaf.nbytes) if isinstance(leaf, Tensor) else None)
            self._sample_bytes = sum(sizes)
            if self._reader.draws_for_batches:
                self._reader.read(BatchRequest(0, rows, True, False))
        except DataError:
            return

    def look(self, first: FirstInput) -> SourceFacts:
        times = self._times[1:] or self._times or [(0.0, 0.0, 0)]  # the first opens what the data set reads
        seconds, busy, pauses = (sum(each) / len(times) for each in zip(*times, strict=True))
        if pauses < 1:  # what is missing of the time, other processes have had
            seconds = busy
        moved = {place: tuple(sorted(names)) for place, names in self._draws.moved.items()}
        drawn = {name for names in moved.values() for name in names}
        drawn_from = tuple(name for name in GLOBAL_GENERATORS if self._depends or name in drawn)
        return SourceFacts(
            first, "", seconds, busy, self._sample_bytes, drawn_from, moved, tuple(self._changes)
        )


def _read_and_digest(reader: BatchReader, row: int) -> tuple[Any, str, str]:
    """Read a sample. Return it as it goes into a batch, and its digests before and after the transform."""
    sample = reader.read_sample(0, row)
    raw = hash_samples([sample])
    transformed = reader.transform_sample(sample, 0, row)
    return transformed, raw, hash_samples([transformed])


def _read_first_input(reader: BatchReader, skips: bool) -> tuple[FirstInput | None, str]:
    """Return the input of the first sample that can be read, or the reason why there is none.

    skips: whether samples that cannot be read are left out.
    """
    fault = ""
    for index in range(min(reader.number, FILLERS_TRIED) if skips else 1):
        try:
            sample = reader.transform_sample(reader.read_sample(0, index), 0, index)
        except DataError as error:
            fault = str(error)
            continue
        return describe_first_input(sample), ""
    return None, fault


def describe_first_input(sample: Any) -> FirstInput:
    """Return kind and shape of the first part of a sample that is not a target."""
    sample = map_leaves(sample, lambda leaf: leaf, convert_numbers)
    while isinstance(sample, tuple | list | dict) and sample:
        fields = sample if isinstance(sample, dict) else dict(enumerate(sample))
        others = [name for name in fields if name not in TARGET_KEYS]
        sample = fields[choose_input_key(fields) or next(iter(others or fields))]
    if not isinstance(sample, Tensor | np.ndarray) or (isinstance(sample, Tensor) and sample.is_nested):
        return FirstInput(f"a {type(sample).__name__}", None)
    return FirstInput(_describe_kind(sample), tuple(sample.shape))


def _describe_kind(values: Any) -> str:
    return "integers" if is_integer(values) else "floats"
