"""Batches of torch's IterableDataset: samples that can only be read one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from trainrun.data.engines.batch_reader import Reading, Recipe, Transform, collated, failure_or_raise
from trainrun.data.engines.generators import seed_globals, seeded
from trainrun.data.order.sampler import Plan, batch_too_large, behind_the_end, share_bounds
from trainrun.errors import DataError
from trainrun.runtime.user_traceback import ANY_FAULT, line_of


@dataclass(frozen=True, eq=False)
class StreamReader(IterableDataset[Any]):  # the base class is how torch tells it from a map-style one
    """One epoch of one rank from position `start` on, in a worker or in the main process.

    It reads the samples of all ranks in order, forms the global micro-batches and collates its own
    share of each, so W ranks see what one rank would see. The global generators are seeded before
    every sample by (seed, epoch, position of the sample).
    num_samples: of an epoch; None if the data set has no length. most: micro-batches, in evaluation
    samples, that are read; None is all.
    """

    dataset: Any
    plan: Plan
    num_samples: int | None
    most: int | None
    recipe: Recipe
    epoch: int = 0
    start: int = 0

    def at(self, epoch: int, start: int) -> StreamReader:
        """The reader of another epoch. Opening it is O(start): the samples before are read and thrown away."""
        return replace(self, epoch=self.plan.effective_epoch(epoch), start=start)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from with_last(self._batches())
        except DataError as error:
            yield failure_or_raise(error)

    def _batches(self) -> Iterator[Reading]:
        plan, count, position = self.plan, 0, 0
        for samples in islice(self._global_batches(), self.most if plan.training else None):
            count += 1
            first, position = position, position + len(samples)
            if count <= self.start:
                continue  # its samples had to be read, but not to be collated
            begin, end = share_bounds(len(samples), plan.rank, plan.world_size)
            if begin < end:
                yield self._reading(samples[begin:end], first + begin, True)
            elif plan.training:
                yield self._reading(samples[:1], first, False)
        if count == 0:
            raise DataError(f"{self.recipe.key}: {self._name} gave no batch in epoch {self.epoch}")
        if count <= self.start:
            raise behind_the_end(self.start, count)

    def _global_batches(self) -> Iterator[list[Any]]:
        """The samples of each micro-batch over all ranks, from the beginning of the epoch."""
        plan = self.plan
        samples = islice(self._samples(), None if plan.training else self.most)
        first = True
        while chunk := list(islice(samples, plan.global_size)):
            if len(chunk) < plan.global_size:
                if first and plan.training:
                    raise batch_too_large(self.recipe.key, len(chunk), plan)
                if plan.drop_last:
                    return
            first = False
            yield chunk

    def _samples(self) -> Iterator[Any]:
        seed, epoch, position = self.plan.seed, self.epoch, 0
        end = object()
        try:
            seed_globals(seed, epoch)
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            samples = iter(self.dataset)
            while True:
                seed_globals(seed, epoch, position)
                sample = next(samples, end)
                if sample is end:
                    break
                position += 1
                yield sample
        except ANY_FAULT as error:
            raise DataError(
                f"{self.recipe.key}: sample {position} of {self._name} cannot be read: "
                f"{type(error).__name__}: {error}{line_of(error)}"
            ) from error
        if self.num_samples not in (None, position):
            raise DataError(
                f"{self.recipe.key}: len() of {self._name} says {self.num_samples} samples, but its iterator gave "
                f"{position}; correct __len__ or leave it out"
            )

    def _reading(self, samples: list[Any], first: int, real: bool) -> Reading:
        """first: position of the first sample in the epoch."""
        transform = Transform(self.recipe, seeded, self.dataset)
        indices = list(range(first, first + len(samples)))
        changed = [transform(sample, self.epoch, i) for i, sample in zip(indices, samples, strict=True)]
        return Reading(collated(changed, self.recipe), indices, real, False)

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__


def with_last(batches: Iterator[Reading]) -> Iterator[Reading]:
    """Looks one batch ahead, to mark the last."""
    waiting = next(batches, None)
    for batch in batches:
        assert waiting is not None
        yield waiting
        waiting = batch
    if waiting is not None:
        yield waiting._replace(last=True)
