"""Augmentation of whole batches on the device, the same for every engine, worker, rank and resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from trainrun.data.augment.draws import Draws
from trainrun.data.batch import attach_fields
from trainrun.data.engines.stream import BatchesWrapper
from trainrun.data.split_batch import list_tensors
from trainrun.errors import DataError, PluginError
from trainrun.interfaces import Batches, MicroBatch, read_attached_fields


class Augmentation(Protocol):
    """A function `(batch, draws) -> batch` that changes the data of a micro-batch on the device. draws: its random
    numbers.

    It must not change the tensors that it gets, because they may belong to the data set. It must use no other
    random numbers. With the attribute `random = False` it is applied in evaluation too, always with the random
    numbers of epoch 0.
    """

    def __call__(self, batch: Any, draws: Draws) -> Any: ...


class NamedAugmentation(NamedTuple):
    """An augmentation with its setting. key: as typed, `data.augment.crop`, for messages and for the random
    streams.
    """

    key: str
    apply: Augmentation
    random: bool = True


def augment_batches(batches: Batches, augmentations: Sequence[NamedAugmentation], seed: int, training: bool,
              float_dtype: torch.dtype, number: int | None = None) -> Batches:  # fmt: skip
    """Return the stream with its augmentations: all in training, and those without random numbers in evaluation.

    number: see `Draws`.
    """
    chosen = [item for item in augmentations if training or not item.random]
    return AugmentedBatches(batches, chosen, seed, float_dtype, number) if chosen else batches


class AugmentedBatches(BatchesWrapper):
    """A stream whose batches are augmented in the given order."""

    def __init__(self, batches: Batches, augmentations: Sequence[NamedAugmentation], seed: int,
                 float_dtype: torch.dtype = torch.float32, number: int | None = None) -> None:  # fmt: skip
        super().__init__(batches)
        self._augmentations = tuple(augmentations)
        self._seed = seed
        self._float_dtype, self._number = float_dtype, number

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for batch in self._batches.epoch(epoch, start):
            yield batch._replace(data=self._augment(batch, epoch), items=None)  # targets may be others now

    def _augment(self, batch: MicroBatch, epoch: int) -> Any:
        assert batch.indices is not None, "every engine says which samples are in a batch"
        data = batch.data
        device = next((tensor.device for tensor in list_tensors(data)), None)
        draws = Draws(self._seed, epoch, batch.indices, device, self._float_dtype, number=self._number)
        for key, apply, _ in self._augmentations:
            fields = dict(read_attached_fields(data))
            try:
                data = apply(data, draws.derive(key))
            except DataError as error:
                raise DataError(f"{key}: {error}") from error
            if data is None:
                raise PluginError(f"{key}: returned nothing; an augmentation returns the batch")
            if fields:  # its tensors are new ones
                data = attach_fields(data, fields)
        return data
