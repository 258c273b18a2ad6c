"""The embeddings of one split as a data set. They are computed in evaluation batches, in the order of the samples.

A sample is always in the same batch, so its embedding is the same bit for bit after an interruption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainrun.embedding.layer_output import LayerOutput
from trainrun.errors import DataError
from trainrun.interfaces import Batches, MicroBatch


class EmbeddedSplit:
    """A data set of `(embedding, target)`, or of embeddings if there are no targets.

    size: samples per batch. Raises DataError for data without a length.
    """

    def __init__(
        self, stream: Batches, layer: LayerOutput, key: str, size: int, class_names: Sequence[str],
        num_classes: int | None,
    ) -> None:  # fmt: skip
        if stream.num_samples is None:
            raise DataError(
                f"{key}: its length is not known, so no place in it can be gone on from; give it __len__"
            )
        self._stream, self._layer, self._key, self._size = stream, layer, key, size
        self._length = stream.num_samples
        self.class_names, self.num_classes = class_names, num_classes
        self._batches: Iterator[MicroBatch] = iter(())
        self._next = -1  # the number of the batch that `_batches` gives next
        self._number = -1  # of the newest batch
        self._rows: tuple[Tensor, Tensor | None] = (torch.empty(0), None)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        found, target = self._compute_batch(index // self._size)
        place = index % self._size
        return found[place] if target is None else (found[place], target[place])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def _compute_batch(self, number: int) -> tuple[Tensor, Tensor | None]:
        if number != self._number:
            if number != self._next:
                self._batches, self._next = iter(self._stream.epoch(0, number)), number
            batch = next(self._batches)
            self._next += 1
            begin = number * self._size
            wanted = torch.arange(begin, min(begin + self._size, self._length))
            if batch.indices is None or not torch.equal(batch.indices.cpu(), wanted):
                raise DataError(
                    f"{self._key}: its samples do not come in their order; leave out what changes it"
                )
            self._rows, self._number = self._layer.compute(batch.data), number
        return self._rows
