"""Batches of data that lies in memory on the training device: no workers, no copies from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainrun.data.batch import Preparation
from trainrun.data.engines.device_feed import Sizes
from trainrun.data.engines.stream import Planned
from trainrun.data.order.sampler import StreamPlan
from trainrun.data.tensor_dataset import Column, Columns, is_mapped, tensor_view
from trainrun.interfaces import MicroBatch

BLOCK_BYTES = 2**26  # of a mapped file on its way to a GPU
BLOCK_ROWS = 4096  # whose items are counted at once


class ResidentBatches(Planned):
    """Moves the columns to the device once; a batch is one `index_select` per column.

    Mapped files stay where they are on a CPU: their rows are gathered from the system's page cache, and
    prepared after that. Batches are copies, never views of one gathered epoch: their memory is aligned
    alike after every resume, so the kernels round alike.
    """

    def __init__(
        self,
        columns: Columns,
        plan: StreamPlan,
        preparation: Preparation,
        device: torch.device,
        sizes: Sizes | None = None,
    ) -> None:
        self._sizes = None
        if sizes is not None and device.type != "cpu":
            self._sizes = sizes_of(columns, preparation, sizes)
        gathers = [_gather(value, preparation, device, columns.in_place) for value in columns.values]
        self._gathers = gathers if columns.int_dtype is None else [_widening(columns, g) for g in gathers]
        self._pack = columns.pack
        self._plan = plan
        self._device = device

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        gathers, pack = self._gathers, self._pack
        if self._device.type == "cpu":
            for indices, real, last in self._plan.shares(epoch, start):
                yield MicroBatch(pack([gather(indices) for gather in gathers]), real, last, indices)
            return
        # the order is made once more on the host, where it is asked for: a copy back would wait for the device
        both = zip(
            self._plan.shares(epoch, start, self._device), self._plan.shares(epoch, start), strict=True
        )
        for (indices, real, last), (on_host, _, _) in both:
            items = None if self._sizes is None else int(self._sizes[on_host].sum())
            yield MicroBatch(pack([gather(indices) for gather in gathers]), real, last, on_host, items)

    def close(self) -> None:
        """Nothing to end."""


def sizes_of(columns: Columns, preparation: Preparation, sizes: Sizes) -> Tensor | None:
    """(N,) on the host: the items of every sample; None if counting a batch reads no values of it."""
    found: list[Tensor] = []
    for begin in range(0, len(columns), BLOCK_ROWS):
        blocks = (preparation.column(value[begin : begin + BLOCK_ROWS]) for value in columns.values)
        rows = [columns.widened(block) for block in blocks]
        part = sizes(columns.pack(rows))
        if part is None:
            return None
        found.append(part.cpu())
    return torch.cat(found)


def _gather(value: Column, preparation: Preparation, device: torch.device,
            in_place: bool) -> Callable[[Tensor], Tensor]:  # fmt: skip
    """From indices on the device to the rows of one column, prepared."""
    if in_place or is_mapped(value):
        view = tensor_view(value)
        if device.type == "cpu" and view is not None:
            first = preparation.column(view[:1])
            if first.dtype == view.dtype and first.shape[1:] == view.shape[1:]:
                return lambda indices: view.index_select(0, indices)  # 2 us less for each batch
            return lambda indices: preparation.column(view.index_select(0, indices))
        tensor = _in_blocks(value, preparation, device)
    else:
        tensor = preparation.column(value).to(device)
    return lambda indices: tensor.index_select(0, indices)


def _widening(columns: Columns, gather: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda indices: columns.widened(gather(indices))


def _in_blocks(value: Column, preparation: Preparation, device: torch.device) -> Tensor:
    """A column on the device without a copy of it as a whole on the host."""
    first = preparation.column(value[:1])
    tensor = torch.empty((len(value), *first.shape[1:]), dtype=first.dtype, device=device)
    size = max(1, BLOCK_BYTES // max(1, first.numel() * first.element_size()))
    for begin in range(0, len(value), size):
        tensor[begin : begin + size] = preparation.column(value[begin : begin + size])
    return tensor
