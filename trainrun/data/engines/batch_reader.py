"""Read, transform and collate samples into a batch, in the same way for every engine."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from trainrun.data.batch import Preparation, detach_fields, map_leaves, reattach_fields
from trainrun.data.engines.generators import (
    GLOBAL_GENERATORS,
    LeaveGlobals,
    SeedGlobals,
    SeedsCalls,
    build_generator,
    has_parameter,
    read_generator_states,
    seed_globals,
)
from trainrun.data.map_style import (
    copy_shallow,
    describe_location,
    find_batch_method,
    find_class_name,
    find_innermost,
    has_own_getitems,
)
from trainrun.data.scale import Scale
from trainrun.data.sequences.collate import stack_samples
from trainrun.data.stream_options import Collate
from trainrun.data.tensor_dataset import Columns, list_parts
from trainrun.errors import ANY_FAULT, DataError
from trainrun.interfaces import MicroBatch
from trainrun.user_code import format_error_with_line

TRANSFORM, COLLATE = 1, 2  # their numbers do not depend on how many the reading drew before
FILLERS_TRIED = 100
SAMPLE, AT_ONCE, COLLATE_KEY = "__getitem__", "__getitems__", "data.collate_fn"  # what is called


class BatchRequest(NamedTuple):
    """A request for one batch. It includes the epoch, because persistent workers do not see a changed attribute."""

    epoch: int
    indices: list[int]
    real: bool
    last: bool


class WorkerFailure(NamedTuple):
    """A fault that a worker returns: its message, and the traceback as text."""

    message: str
    trace: str


def raise_or_return_failure(error: DataError) -> WorkerFailure:
    """Raise the error. In a worker, return it as a value, because torch would turn an exception into a page of text."""
    if get_worker_info() is None:
        raise error
    return WorkerFailure(str(error), traceback.format_exc())


class LoadedBatch(NamedTuple):
    """A batch that a worker or thread has read, before the main process receives it.

    data: None if no sample could be read and no filler is needed. Its fields are detached (`detach_fields`).
    indices: the sample numbers, as a list, because a tensor would take shared memory and an open file.
    faults: the errors of the samples that were left out. state: the state of an iterable source after the batch.
    whole: see `MicroBatch`.
    """

    data: Any
    indices: list[int]
    real: bool
    last: bool
    faults: tuple[str, ...] = ()
    state: Any = None
    whole: str = ""

    def build_micro_batch(self) -> MicroBatch:
        indices = torch.tensor(self.indices, dtype=torch.int64)
        return MicroBatch(reattach_fields(self.data), self.real, self.last, indices, whole=self.whole)


@dataclass(frozen=True)
class SampleSteps:
    """The steps that turn samples into a batch, in this order: `scale` and `transform` each sample, then `collate` and
    `preparation`.

    seed: the seed of the stream. key: the setting of the source, for messages. skips: whether samples that cannot be
        read are left out.
    training: whether a batch that lost all samples is filled with a sample that does not count (`real=False`), because
        the other ranks wait.
    scale: None if no code receives single samples and batches are scaled instead. one_by_one: whether `__getitems__` is
        called with one sample at a time.
    drawn_from: the global generators that the user's code is known to use.
    """

    preparation: Preparation
    seed: int
    key: str
    transform: Callable[..., Any] | None = None
    collate: Collate | None = None
    skips: bool = False
    training: bool = True
    scale: Scale | None = None
    transform_key: str = "data.transform"
    one_by_one: bool = False
    drawn_from: tuple[str, ...] = GLOBAL_GENERATORS


def describe_whole_sample_error(sample: Any, error: BaseException) -> str:
    """Return a hint for a transform that fails because it gets the whole sample instead of the picture."""
    if not (isinstance(sample, tuple | list | dict) and isinstance(error, TypeError | AttributeError)):
        return ""
    return (
        f"; it gets the whole sample, a {type(sample).__name__}: let it change its part and return all of it"
    )


class Transform:
    """A transform of the user, with random numbers seeded by (seed, epoch, index). number: of samples, if it is
    known.
    """

    def __init__(self, recipe: SampleSteps, dataset: Any, number: int | None = None) -> None:
        self._recipe, self._dataset, self._number = recipe, dataset, number
        self._takes_generator = has_parameter(recipe.transform, "generator")

    def __call__(self, sample: Any, epoch: int, index: int, calls: SeedsCalls) -> Any:
        recipe = self._recipe
        if recipe.scale is not None:
            sample = recipe.scale.scale_first(sample)
        if recipe.transform is None:
            return sample
        parts = (recipe.seed, epoch, index, TRANSFORM)
        try:
            calls.before(recipe.transform_key, *parts)
            if self._takes_generator:
                sample = recipe.transform(sample, generator=build_generator(*parts))
            else:
                sample = recipe.transform(sample)
            calls.after(recipe.transform_key)
            return sample
        except ANY_FAULT as error:
            row = index % (self._number or index + 1)
            place = describe_location(self._dataset, row)
            raise DataError(
                f"{recipe.transform_key}: sample {row}{place} of {recipe.key} cannot be transformed: "
                f"{format_error_with_line(error)}{describe_whole_sample_error(sample, error)}"
            ) from error


class BatchReader:
    """A function from a `BatchRequest` to a batch. It runs in a worker, a thread or the main process.

    An index beyond the last sample is a repeated sample of the epoch. It is read again, with its own random numbers.

    Random numbers of `__getitem__` depend only on (seed, epoch, index). If the data set has `set_epoch`, it is called
    before the first sample of an epoch. Every reader has its own copy of the data set, because another reader may be in
    another epoch.
    """

    def __init__(self, dataset: Any, recipe: SampleSteps, calls: SeedsCalls | None = None) -> None:
        if has_epochs(dataset):
            dataset = copy_shallow(dataset)
        self.dataset = dataset
        self._has_epochs, self._epoch = has_epochs(dataset), -1
        self.recipe = recipe
        self._calls: SeedsCalls = SeedGlobals(recipe.drawn_from) if calls is None else calls
        self._transform = Transform(recipe, dataset, len(dataset))
        self.number = len(dataset)
        parts = list_parts(dataset)
        self._at_once = has_own_getitems(dataset) and not recipe.one_by_one
        self._is_columns = isinstance(dataset, Columns)
        is_plain = recipe.transform is None and (self._is_columns or recipe.scale is None)
        self._read_batch = find_batch_method(dataset, recipe.collate) if is_plain else None
        self._drawing = {
            type(part) for part in parts if has_parameter(getattr(part, "__getitem__", None), "generator")
        }
        asks = self._at_once or recipe.one_by_one or self._drawing or self._is_columns
        self._reads_plainly = not asks and recipe.transform is None and recipe.scale is None
        self._takes_generators = self._at_once and has_parameter(parts[0].__getitems__, "generators")

    @property
    def runs_user_code(self) -> bool:
        """Return whether reading runs code that is not of this package."""
        return self._read_batch is None

    @property
    def draws_for_batches(self) -> bool:
        """Return whether a function of the user that receives a batch might use random numbers."""
        return (self._at_once and not self._takes_generators) or self.recipe.collate is not None

    def __getitem__(self, key: BatchRequest) -> LoadedBatch | WorkerFailure:
        try:
            return self.read(key)
        except DataError as error:
            return raise_or_return_failure(error)

    def read(self, key: BatchRequest) -> LoadedBatch:
        """Read a batch. Raise DataError with the number of a sample that cannot be read."""
        if self._read_batch is not None:
            batch = self._read_whole_batch(self._read_batch, self._find_rows(key.indices))
            if batch is not None:
                return LoadedBatch(batch, *key[1:])
        self._begin_epoch(key.epoch)
        calls = self._calls
        if not isinstance(calls, SeedGlobals) or not calls.others:
            return self._read_samples(key)
        return self._read_unseeded(key, calls.others)

    def _read_unseeded(self, key: BatchRequest, generators: tuple[str, ...]) -> LoadedBatch:
        """Read a batch without seeding these generators. If one of them is used, read again with all of them seeded."""
        before, reading, fault = read_generator_states(generators), None, None
        try:
            reading = self._read_samples(key)
        except DataError as error:
            fault = error
        if read_generator_states(generators) != before:
            self._calls = SeedGlobals()  # from here on
            if self._at_once and not self._takes_generators:  # what it draws must not depend on the batch
                self.recipe, self._at_once = replace(self.recipe, one_by_one=True), False
            return self._read_samples(key)
        if reading is None:
            assert fault is not None
            raise fault
        return reading

    def _read_samples(self, key: BatchRequest) -> LoadedBatch:
        """Read, transform and collate the samples of a batch."""
        samples, faults = self._samples(key.epoch, key.indices)
        if samples:
            indices = [index for index, _ in samples]
            data = self._collate(key, [sample for _, sample in samples])
            return LoadedBatch(data, indices, key.real, key.last, faults)
        if not self.recipe.training:
            return LoadedBatch(None, [], False, key.last, faults)
        index, sample = self._read_filler(key)
        return LoadedBatch(self._collate(key, [sample]), [index], False, key.last, faults)

    def _find_rows(self, indices: list[int]) -> list[int]:
        return [index % self.number for index in indices]

    def _read_whole_batch(self, read_batch: Callable[[list[int]], Any], indices: list[int]) -> Any:
        """Read a batch in one call. Return None if that fails, so that samples are read singly to find the faulty
        one.
        """
        try:
            batch = read_batch(indices)
        except DataError:
            if self._is_columns:  # a file was cut short, which no sample alone is to blame for
                raise
            return None
        return (
            None
            if batch is None
            else detach_fields(map_leaves(batch, self.recipe.preparation.convert_column))
        )

    def read_sample(self, epoch: int, index: int) -> Any:
        """Return one sample as the data set returns it."""
        self._begin_epoch(epoch)
        return self._read_seeded(epoch, index)

    def transform_sample(self, sample: Any, epoch: int, index: int) -> Any:
        """Return one sample after scaling and transform."""
        return self._transform(sample, epoch, index, self._calls)

    def _begin_epoch(self, epoch: int) -> None:
        if not self._has_epochs or epoch == self._epoch:
            return
        try:
            if not isinstance(self._calls, LeaveGlobals):
                seed_globals(self.recipe.seed, epoch)
            for part in list_parts(self.dataset):
                getattr(part, "set_epoch", lambda epoch: None)(epoch)
        except ANY_FAULT as error:
            raise self._build_error(f"epoch {epoch}", "", error) from error
        self._epoch = epoch

    def copy_for_thread(self) -> BatchReader:
        """Return the same reader for a thread during the training."""
        return BatchReader(self.dataset, self.recipe, LeaveGlobals())

    def _collate(self, key: BatchRequest, samples: list[Any]) -> Any:
        if self.recipe.collate is None:
            return collate_samples(samples, self.recipe)
        self._calls.before(COLLATE_KEY, self.recipe.seed, key.epoch, key.indices[0], COLLATE)
        batch = collate_samples(samples, self.recipe)
        self._calls.after(COLLATE_KEY)
        return batch

    def _samples(self, epoch: int, indices: list[int]) -> tuple[list[tuple[int, Any]], tuple[str, ...]]:
        """Return the samples that can be read, each with its index, and the faults of samples that may be left out."""
        if self._reads_plainly and self._calls.is_idle:
            try:
                number, dataset = self.number, self.dataset
                return [(index, dataset[index % number]) for index in indices], ()
            except ANY_FAULT:
                pass  # one by one, the fault gets the number of its sample
        at_once = self._read_in_one_call(epoch, indices) if self._at_once else None
        changes = self.recipe.transform is not None or self.recipe.scale is not None
        samples, faults = [], []
        for place, index in enumerate(indices):
            try:
                sample = self._read_seeded(epoch, index) if at_once is None else at_once[place]
                samples.append((index, self.transform_sample(sample, epoch, index) if changes else sample))
            except DataError as error:
                if not self.recipe.skips:
                    raise
                faults.append(str(error))
        return samples, tuple(faults)

    def _read_filler(self, key: BatchRequest) -> tuple[int, Any]:
        """Return the next sample of the data set that can be read."""
        number = self.number
        for step in range(1, min(number, FILLERS_TRIED) + 1):
            index = (key.indices[-1] + step) % number
            samples, _ = self._samples(key.epoch, [index])
            if samples:
                return samples[0]
        raise DataError(
            f"{self.recipe.key}: neither sample {key.indices[-1]} nor the {FILLERS_TRIED} after it can be read"
        )

    def _read_seeded(self, epoch: int, index: int) -> Any:
        row = index % self.number
        try:
            if self._is_columns:
                return self.dataset[row]
            calls, seed = self._calls, self.recipe.seed
            calls.before(SAMPLE, seed, epoch, index)
            if self.recipe.one_by_one:
                sample = self.dataset.__getitems__([row])[0]
            elif self._drawing:
                sample = self._read_drawing(row, seed, epoch, index)
            else:
                sample = self.dataset[row]
            calls.after(SAMPLE)
            return sample
        except ANY_FAULT as error:
            raise self._build_error(f"sample {row}", describe_location(self.dataset, row), error) from error

    def _read_drawing(self, row: int, *parts: int) -> Any:
        """Read a sample of a data set that takes a generator, or that contains data sets which take one."""
        base, place = find_innermost(self.dataset, row)
        if type(base) in self._drawing:
            return base.__getitem__(place, generator=build_generator(*parts))
        return base[place]

    def _read_in_one_call(self, epoch: int, indices: list[int]) -> list[Any] | None:
        """Return the samples of one call of `__getitems__`; None if the call failed, but each sample can be read
        singly.

        If a sample cannot be read and may not be left out, raise the fault of that sample.
        """
        seed, rows = self.recipe.seed, self._find_rows(indices)
        try:
            self._calls.before(AT_ONCE, seed, epoch, indices[0])
            if not self._takes_generators:
                samples = self.dataset.__getitems__(rows)
            else:
                places = [find_innermost(self.dataset, row)[1] for row in rows]
                generators = [build_generator(seed, epoch, index) for index in indices]
                samples = list_parts(self.dataset)[0].__getitems__(places, generators=generators)
            self._calls.after(AT_ONCE)
            assert len(samples) == len(indices), f"{len(samples)} samples for {len(indices)} indices"
            return list(samples)
        except ANY_FAULT as error:
            if self.recipe.skips:
                return None
            for index in indices:
                self._read_seeded(epoch, index)
            raise self._build_error(f"one of the samples {_format_list(rows)}", "", error) from error

    def _build_error(self, which: str, place: str, error: BaseException) -> DataError:
        return DataError(
            f"{self.recipe.key}: {which}{place} of {find_class_name(self.dataset)} cannot be read: "
            f"{format_error_with_line(error)}"
        )


def has_epochs(dataset: Any) -> bool:
    return any(callable(getattr(part, "set_epoch", None)) for part in list_parts(dataset))


def _format_list(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


def collate_samples(samples: list[Any], recipe: SampleSteps) -> Any:
    """Collate samples into a batch. Unlike with torch's function, tuples stay tuples."""
    preparation = recipe.preparation
    try:
        if preparation.max_sequence_length is not None:
            samples = [preparation.sample(sample) for sample in samples]
        if recipe.collate is not None:
            return detach_fields(preparation.convert_batch(recipe.collate(samples)))
        return preparation.convert_batch(stack_samples(samples))
    except ANY_FAULT as error:
        raise DataError(
            f"{recipe.key}: its samples do not form a batch: {format_error_with_line(error)}; "
            f"give them one shape, or a function of your own as data.collate_fn"
        ) from error
