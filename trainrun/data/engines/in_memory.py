"""Batches of data that is in memory on the training device: no workers, and no copies from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.batch import Preparation, convert_to_tensor
from trainrun.data.order.sampler import RankBatch
from trainrun.data.readers.mapped_files import check_lengths
from trainrun.data.stream_options import PreparedStream, Sizes, describe_unused_options
from trainrun.data.tensor_dataset import Column, Columns, is_mapped, view_as_tensor
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch
from trainrun.runtime.machine import read_free_bytes

BLOCK_BYTES = 2**26  # of a mapped file on its way to a GPU
SMALL_BATCH_BYTES = 2**14  # larger batches are gathered one by one, which copies them once
ROWS_AT_ONCE = 2**16  # whose numbers are looked up in one call; a computed one then takes 10 to 30 ns
MOST_LISTED = 2**25  # row numbers of 4 bytes: 128 MiB, computed in about a second
BLOCK_ROWS = 4096  # whose items are counted at once
BATCHES_BYTES = 2**19  # of batches that are gathered together; they are in memory twice for a moment
ROOMY_BATCH_BYTES = 2**20
SPLIT: Any = torch.split_with_sizes_copy  # its types know only the form that fills given tensors


def explain_resident(prepared: PreparedStream) -> str:
    """Return why the resident engine reads the data; empty if another engine does."""
    options, columns, device = prepared.options, prepared.columns, prepared.options.device
    if options.engine == "resident" and columns is None:
        raise DataError(
            f"data.engine=resident: {options.key} is not in memory; give tensors, arrays or a TensorDataset, "
            "or use data.engine=auto"
        )
    if options.engine == "resident" and prepared.single:
        raise DataError(
            f"data.engine=resident: {prepared.single} needs single samples; leave one of them out, "
            "or use data.engine=workers"
        )
    in_place = gathers_in_place(prepared)
    name = "mapped files, read in the page cache" if in_place else f"resident on {device}"
    if options.engine == "resident":
        return f"{name} (asked for{describe_unused_options(options, 'num_workers', 'num_threads')})"
    open_number = options.num_workers in ("auto", 0) and options.num_threads == "auto"
    if options.engine != "auto" or not open_number or columns is None or prepared.single:
        return ""
    return f"{name} ({count_resident_bytes(prepared)})" if fits_in_memory(prepared) else ""


def gathers_in_place(prepared: PreparedStream) -> bool:
    """Return whether rows are gathered from mapped files for each batch."""
    return prepared.columns is not None and prepared.options.device.type == "cpu" and prepared.columns.mapped


def count_resident_bytes(prepared: PreparedStream) -> str:
    return f"in memory, {resident_bytes(prepared) / 1e6:.1f} MB"


def resident_bytes(prepared: PreparedStream) -> int:
    """Return the size of the columns on the device, after their types and lengths are converted."""
    assert prepared.columns is not None
    firsts = [prepared.preparation.convert_column(value[:1]) for value in prepared.columns.values]
    return len(prepared.columns) * sum(first.numel() * first.element_size() for first in firsts)


def fits_in_memory(prepared: PreparedStream) -> bool:
    """Return whether the columns may be resident: they fit into half of the free memory, or nothing is copied."""
    options, columns = prepared.options, prepared.columns
    assert columns is not None
    if gathers_in_place(prepared) or (columns.in_place and options.device.type == "cpu"):
        return True
    copies = 1 if options.device.type == "cuda" else options.local_world_size
    return resident_bytes(prepared) * copies <= read_free_bytes(options.device) / 2


def choose_evaluation_batch_size(columns: Columns, batch_size: int, scaled: bool) -> int:
    """Return a batch size for evaluation: twice that of training, and up to 32 times if the inputs stay below 1 MiB.

    Such a batch takes less memory and time than a training step, so signals are handled as fast. Integers that are
    not scaled may be tokens, whose outputs are far larger than the inputs. Their batch size stays.
    """
    inputs = convert_to_tensor(columns.values[0][:1])
    if not (inputs.is_floating_point() or scaled):
        return batch_size
    sample_bytes = max(4 * inputs.numel(), 1)
    return max(2 * batch_size, min(32 * batch_size, ROOMY_BATCH_BYTES // sample_bytes))


class ResidentBatches:
    """Batches of columns that are moved to the device once. A batch is one `index_select` per column.

    On a CPU, mapped files are not copied: their rows are gathered from the system's page cache and then converted.
    Several small batches are gathered at a time, which takes a third of the time. Batches are copies, never views. So
    their memory is aligned in the same way after a resume, kernels round equally, and no batch keeps others in
    memory.
    """

    def __init__(self, prepared: PreparedStream) -> None:
        options, columns, preparation = prepared.options, prepared.columns, prepared.preparation
        assert columns is not None
        self._sizes = None
        if options.sizes is not None and options.device.type != "cpu":
            self._sizes = _count_items(columns, preparation, options.sizes)
        gathers = [_gather(columns, value, preparation, options.device) for value in columns.values]
        self._row_numbers = list_row_numbers(columns.row_numbers) if options.device.type == "cpu" else None
        self._gathers = (
            gathers if columns.int_dtype is None else [_choose_widening(columns, g) for g in gathers]
        )
        self._pack = columns.pack
        self._mappings = columns.mapped_files() if options.device.type == "cpu" else ()
        self._plan = prepared.plan
        self._device = options.device
        self._number = None if options.drawn is None else options.drawn.number
        batch_bytes = resident_bytes(prepared) // max(1, len(columns)) * options.batch_size
        # batches whose rows are gathered together, and those whose row numbers are looked up together
        self._together = 1
        if batch_bytes <= SMALL_BATCH_BYTES:
            self._together = max(1, BATCHES_BYTES // max(1, batch_bytes))
        self._numbered = self._together
        if self._row_numbers is not None:
            self._numbered = max(self._together, ROWS_AT_ONCE // options.batch_size)

    @property
    def num_batches(self) -> int:
        return self._plan.num_batches

    @property
    def num_samples(self) -> int:
        return self._plan.num_seen

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        gathers, pack = self._gathers, self._pack
        if self._device.type == "cpu":
            shares = self._plan.iterate_rank_batches(epoch, start)
            yield from (
                self._copy_several_batches(shares) if self._together > 1 else self._copy_batches(shares)
            )
            return
        # the order is made once more on the host, where it is asked for: a copy back would wait for the device
        both = zip(
            self._plan.iterate_rank_batches(epoch, start, self._device),
            self._plan.iterate_rank_batches(epoch, start),
            strict=True,
        )
        for (indices, real, last), (on_host, _, _) in both:
            items = None if self._sizes is None else int(self._sizes[self._select_rows(on_host)].sum())
            rows = self._select_rows(indices)
            yield MicroBatch(pack([gather(rows) for gather in gathers]), real, last, on_host, items)

    def _copy_batches(self, shares: Iterator[RankBatch]) -> Iterator[MicroBatch]:
        """Make the batches of these shares, each in one copy."""
        gathers, pack, mappings = self._gathers, self._pack, self._mappings
        if self._row_numbers is None:
            with_rows: Iterator[tuple[RankBatch, Tensor]] = (
                (share, self._select_rows(share.indices)) for share in shares
            )
        else:
            with_rows = self._look_up_rows(shares)
        for (indices, real, last), rows in with_rows:
            check_lengths(mappings)
            yield MicroBatch(pack([gather(rows) for gather in gathers]), real, last, indices)

    def _copy_several_batches(self, shares: Iterator[RankBatch]) -> Iterator[MicroBatch]:
        """Make the batches of these shares. The rows of `together` batches are gathered in one call."""
        pack, together = self._pack, self._together
        for block, rows in self._group_shares(shares):
            sizes = [share.indices.numel() for share in block]
            begins = range(0, len(block), together)
            parts = torch.split(rows, [sum(sizes[begin : begin + together]) for begin in begins])
            for begin, part in zip(begins, parts, strict=True):
                columns = self._gather(part, sizes[begin : begin + together])
                for (indices, real, last), values in zip(
                    block[begin : begin + together], columns, strict=True
                ):
                    yield MicroBatch(pack(values), real, last, indices)

    def _look_up_rows(self, shares: Iterator[RankBatch]) -> Iterator[tuple[RankBatch, Tensor]]:
        """Yield each share with its rows of the columns."""
        for block, rows in self._group_shares(shares):
            parts = torch.split(rows, [share.indices.numel() for share in block])
            yield from zip(block, parts, strict=True)

    def _group_shares(self, shares: Iterator[RankBatch]) -> Iterator[tuple[list[RankBatch], Tensor]]:
        """Yield the shares whose rows are looked up together, and these rows."""
        for first in shares:
            block = [first, *islice(shares, self._numbered - 1)]
            rows = self._select_rows(torch.cat([share.indices for share in block]))
            if self._row_numbers is not None:
                rows = torch.from_numpy(self._row_numbers[rows.numpy()])
            yield block, rows

    def _gather(self, rows: Tensor, sizes: list[int]) -> Iterable[Sequence[Tensor]]:
        """Return the columns of each batch. rows: of all batches. sizes: the number of rows of each batch."""
        check_lengths(self._mappings)
        columns = [gather(rows) for gather in self._gathers]
        if len(sizes) == 1:
            return [columns]
        return zip(*[SPLIT(column, sizes) for column in columns], strict=True)

    def _select_rows(self, indices: Tensor) -> Tensor:
        return indices if self._number is None else indices % self._number

    def close(self) -> None:
        """Do nothing, because no process or thread was started."""


def list_row_numbers(row_numbers: Any) -> Any:
    """Return row numbers as an array if it takes at most 128 MiB: a lookup then takes a third of the time."""
    if row_numbers is None or isinstance(row_numbers, np.ndarray) or len(row_numbers) > MOST_LISTED:
        return row_numbers
    blocks = [np.empty(0, np.int32)]
    for begin in range(0, len(row_numbers), ROWS_AT_ONCE):
        block = row_numbers[np.arange(begin, min(begin + ROWS_AT_ONCE, len(row_numbers)))]
        blocks.append(block.astype(np.int32) if block.max() < 2**31 else block)
    return np.concatenate(blocks)  # of 8 bytes each if one of them needs it


def _count_items(columns: Columns, preparation: Preparation, sizes: Sizes) -> Tensor | None:
    """Return the number of items of every sample, (N,) on the host; None if counting does not need their values."""
    counts: list[Tensor] = []
    for begin in range(0, len(columns), BLOCK_ROWS):
        blocks = (
            preparation.convert_column(_block(columns, value, begin, BLOCK_ROWS)) for value in columns.values
        )
        part = sizes(columns.pack([columns.widen(block) for block in blocks]))
        if part is None:
            return None
        counts.append(part.cpu())
    return torch.cat(counts)


def _block(columns: Columns, value: Column, begin: int, size: int) -> Column:
    """Return `size` samples of a column from `begin` on, fewer at the end."""
    if columns.row_numbers is None:
        return value[begin : begin + size]
    return columns.copy_samples(value, np.arange(begin, min(begin + size, len(columns))))


def _gather(
    columns: Columns, value: Column, preparation: Preparation, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return a function from row numbers (on a GPU: sample numbers) to the prepared values of one column."""
    if columns.in_place or is_mapped(value):
        view = view_as_tensor(value)
        if device.type == "cpu" and view is not None:
            first = preparation.convert_column(view[:1])
            if first.dtype == view.dtype and first.shape[1:] == view.shape[1:]:
                return lambda indices: view.index_select(0, indices)  # 2 us less for each batch
            return lambda indices: preparation.convert_column(view.index_select(0, indices))
        tensor = _copy_in_blocks(columns, value, preparation, device)
    elif columns.row_numbers is not None and device.type != "cpu":
        tensor = _copy_in_blocks(columns, value, preparation, device)
    else:
        tensor = preparation.convert_column(value).to(device)
    return lambda indices: tensor.index_select(0, indices)


def _choose_widening(columns: Columns, gather: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda indices: columns.widen(gather(indices))


def _copy_in_blocks(
    columns: Columns, value: Column, preparation: Preparation, device: torch.device
) -> Tensor:
    """Copy a column to the device block by block, without a copy of the whole column on the host."""
    first = preparation.convert_column(value[:1])
    tensor = torch.empty((len(columns), *first.shape[1:]), dtype=first.dtype, device=device)
    size = max(1, BLOCK_BYTES // max(1, first.numel() * first.element_size()))
    for begin in range(0, len(columns), size):
        tensor[begin : begin + size] = preparation.convert_column(_block(columns, value, begin, size))
    return tensor
