"""Sequences into rows of one width, and sequences of like length into batches of one token budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.seeding import derive_seed

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Groups:
    """Samples in groups: those of group g are `samples[bounds[g]:bounds[g + 1]]`.

    samples: (n,) int64. bounds: (groups + 1,) int64.
    """

    samples: Tensor
    bounds: Array

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def group(self, number: int) -> Tensor:
        return self.samples[int(self.bounds[number]) : int(self.bounds[number + 1])]


def by_length(lengths: Array, seed: int, shuffle: bool, descending: bool = False) -> Array:
    """The samples in the order of their lengths; equal lengths in an order drawn from the seed."""
    order = np.arange(len(lengths))
    if shuffle:
        generator = torch.Generator().manual_seed(derive_seed(seed, 0, 2))
        order = torch.randperm(len(lengths), generator=generator).numpy()
    keys = -lengths[order] if descending else lengths[order]
    sorted_order: Array = order[np.argsort(keys, kind="stable")]
    return sorted_order


def pack_rows(lengths: Array, width: int, seed: int, shuffle: bool) -> Groups:
    """Rows of at most `width` positions: best fit, longest sequence first.

    A row is opened only by a sequence that fits into no row opened before, so `next_fit` over the samples
    of any rows in the order of their numbers gives the same rows. O(n) steps on a bit set of free spaces.
    """
    rows: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(width + 1)]  # rows by the space that is left in them
    spaces = 0  # bit s: there is a row with s positions left
    for sample in by_length(lengths, seed, shuffle, descending=True).tolist():
        length = int(lengths[sample])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
            rows[row].append(sample)
        else:
            space, row = width, len(rows)
            rows.append([sample])
        with_space[space - length].append(row)
        spaces |= 1 << (space - length)
    sizes = [len(row) for row in rows]
    samples = torch.tensor([sample for row in rows for sample in row], dtype=torch.int64)
    return Groups(samples, np.cumsum([0, *sizes]))


def next_fit(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Row and first position of each sequence: the next row begins where one no longer fits."""
    places, row, used = [], 0, 0
    for length in lengths:
        if used + length > width:
            row, used = row + 1, 0
        places.append((row, used))
        used += length
    return places


def budget_batches(lengths: Array, widths: Array, budget: int, seed: int, shuffle: bool) -> Groups:
    """Batches of like lengths whose samples times the width of the widest is at most `budget`.

    widths: (n,) int64, of each sample when it is alone in a batch, none above `budget`.
    """
    order = by_length(lengths, seed, shuffle)
    wide = widths[order]
    bounds = [0]
    while bounds[-1] < len(order):
        begin = bounds[-1]
        end = min(len(order), begin + budget // int(wide[begin]))  # more cannot fit: widths only grow
        # positions of the batch [begin, j) grow with j: the last j that is within the budget
        fits = bisect_right(range(begin + 1, end + 1), budget, key=lambda j: (j - begin) * int(wide[j - 1]))
        bounds.append(begin + fits)
    return Groups(torch.from_numpy(order.astype(np.int64)), np.array(bounds))
