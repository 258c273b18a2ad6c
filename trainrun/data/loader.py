"""Batches of map-style data sets, read by torch's DataLoader in worker processes or the main process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Subset, default_collate

from trainrun.data.batch import Preparation, arrays_to_tensors, map_leaves, to_device
from trainrun.data.columns import Columns
from trainrun.data.order import Plan
from trainrun.data.workers import (
    WorkerOptions,
    build_loader,
    failure_or_raise,
    received,
    seed_globals,
    shut_down,
    starting,
)
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch
from trainrun.usercode import line_of

Collate = Callable[[list[Any]], Any]


class Key(NamedTuple):
    """What a worker is asked for. It carries the epoch: persistent workers cannot see an attribute change."""

    epoch: int
    indices: list[int]
    real: bool
    last: bool


class KeySource:
    """The sampler of the DataLoader: yields the keys that were put in before the epoch."""

    def __init__(self) -> None:
        self.keys: Iterator[Key] = iter(())

    def __iter__(self) -> Iterator[Key]:
        return self.keys


class BatchReader:
    """Turns a key into a batch, in a worker or in the main process.

    Before each `__getitem__` the global generators are seeded by (seed, epoch, index), so what it
    draws depends on neither workers nor resumes. A data set with `__getitems__` is seeded once per
    batch, by the first index.
    """

    def __init__(self, dataset: Any, preparation: Preparation, collate: Collate | None, seed: int,
                 key: str) -> None:  # fmt: skip
        self._dataset = dataset
        self._preparation = preparation
        self._collate = collate
        self._seed = seed
        self._key = key
        self._at_once = reads_at_once(dataset)

    def __getitem__(self, key: Key) -> Any:
        try:
            return MicroBatch(self._batch(key.epoch, key.indices), key.real, key.last)
        except DataError as error:
            return failure_or_raise(error)

    def _batch(self, epoch: int, indices: list[int]) -> Any:
        if isinstance(self._dataset, Columns) and self._collate is None:
            return self._dataset.batch(indices, self._preparation)
        if self._at_once:
            samples = self._read(epoch, indices[0], indices)
        else:
            samples = [self._read(epoch, index) for index in indices]
        return collated(samples, self._collate, self._preparation, self._key)

    def _read(self, epoch: int, index: int, indices: list[int] | None = None) -> Any:
        """One sample, or the list of samples with these indices."""
        seed_globals(self._seed, epoch, index)
        try:
            return self._dataset[index] if indices is None else self._dataset.__getitems__(indices)
        except Exception as error:
            which = f"sample {index}" if indices is None else f"one of the samples {_listed(indices)}"
            name = type(self._dataset).__name__
            raise DataError(
                f"{self._key}: {which} of {name} cannot be read: {type(error).__name__}: {error}{line_of(error)}"
            ) from error


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


def reads_at_once(dataset: Any) -> bool:
    """Whether a data set has `__getitems__` of its own; a Subset merely passes the call on."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def collated(samples: list[Any], collate: Collate | None, preparation: Preparation, key: str) -> Any:
    """One batch from samples. Without a function of the user's, tuples stay tuples, unlike torch's."""
    try:
        samples = [preparation.sample(sample) for sample in samples]
        if collate is not None:
            return preparation.batch(collate(samples))
        batch = default_collate([map_leaves(sample, arrays_to_tensors) for sample in samples])
        return preparation.batch(tuple(batch) if type(samples[0]) is tuple else batch)
    except Exception as error:
        raise DataError(
            f"{key}: its samples do not form a batch: {type(error).__name__}: {error}; "
            f"give them one shape, or a function of your own as data.collate_fn"
        ) from error


class LoaderBatches:
    """A stream over a map-style data set or `Columns`.

    One epoch is open at a time.
    """

    def __init__(self, dataset: Any, plan: Plan, preparation: Preparation, device: torch.device,
                 options: WorkerOptions, collate: Collate | None, key: str) -> None:  # fmt: skip
        self._reader = BatchReader(dataset, preparation, collate, plan.seed, key)
        self._plan = plan
        self._device = device
        self._options = options
        self._key = key
        self._keys = KeySource()
        self._loader: DataLoader[Any] | None = None
        self._end_workers: Callable[[], Any] | None = None

    @property
    def num_batches(self) -> int | None:
        return self._plan.num_batches

    @property
    def num_samples(self) -> int | None:
        return self._plan.num_seen

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        number = self._plan.effective_epoch(epoch)
        shares = self._plan.shares(epoch, start)
        keys = (Key(number, indices.tolist(), real, last) for indices, real, last in shares)
        iterator = self._open(keys)
        try:
            for batch in received(iterator, self._key, self._options):
                data = to_device(batch.data, self._device, self._options.pin_memory)
                yield MicroBatch(data, batch.real, batch.last)
                assert self._keys.keys is keys, "another epoch was opened, or the stream was closed"
        except DataError:
            self.close()
            raise

    def _open(self, keys: Iterator[Key]) -> Iterator[Any]:
        """The DataLoader's iterator; persistent workers are started once and used again."""
        if not self._options.persistent_workers:
            self.close()
        if self._loader is None:
            self._loader = build_loader(self._reader, self._keys, self._options, self._plan.seed)
        self._keys.keys = keys
        with starting(self._key):
            iterator = iter(self._loader)
        if self._end_workers is None:  # also runs when the stream is forgotten, or at the end of Python
            self._end_workers = weakref.finalize(self, shut_down, iterator, os.getpid())
        return iterator

    def close(self) -> None:
        if self._end_workers is not None:
            self._end_workers()
        self._loader = self._end_workers = None
        self._keys.keys = iter(())
