"""Batches of data that lies in memory on the training device: no workers, no copies from the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainrun.data.batch import Preparation
from trainrun.data.columns import Columns
from trainrun.data.order import Plan
from trainrun.interfaces import MicroBatch


class ResidentBatches:
    """Moves the columns to the device once; a batch is one `index_select` per column.

    Batches are copies, never views of one gathered epoch: their memory is aligned alike after every
    resume, so the kernels round alike.
    """

    def __init__(self, columns: Columns, plan: Plan, preparation: Preparation, device: torch.device) -> None:
        self._tensors = [preparation.column(value).to(device) for value in columns.values]
        self._pack = columns.pack
        self._plan = plan
        self._device = device

    @property
    def num_batches(self) -> int | None:
        return self._plan.num_batches

    @property
    def num_samples(self) -> int | None:
        return self._plan.num_seen

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        tensors, pack = self._tensors, self._pack
        for indices, real, last in self._plan.shares(epoch, start, self._device):
            yield MicroBatch(
                pack([tensor.index_select(0, indices) for tensor in tensors]), real, last, indices
            )

    def close(self) -> None:
        """Nothing to end."""
