"""Choose the samples of each micro-batch by their lengths, as pure functions of seed, epoch and position.

As in `trainrun.data.order.sampler`, a global micro-batch is divided into one contiguous share for each rank. This
module also estimates the padding of each mode, for a line at the start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.order.sampler import (
    Plan,
    RankBatch,
    StreamPlan,
    apply_limit,
    build_end_error,
    compute_epoch_order,
    compute_rank_bounds,
)
from trainrun.data.sequences.collate import round_length
from trainrun.seeding import derive_seed

MEGA_BATCHES = 50  # global micro-batches that are sorted together
MOST_SAMPLES = 100_000  # more say the same of lengths
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Groups:
    """Samples in groups. Group g has the samples `samples[bounds[g]:bounds[g + 1]]`.

    samples: (n,) int64. bounds: (groups + 1,) int64.
    """

    samples: Tensor
    bounds: Array

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def group(self, number: int) -> Tensor:
        return self.samples[int(self.bounds[number]) : int(self.bounds[number + 1])]


def sort_by_length(lengths: Array, seed: int, shuffle: bool, descending: bool = False) -> Array:
    """Return the samples sorted by length. Samples of equal length are in an order drawn from the seed."""
    order = np.arange(len(lengths))
    if shuffle:
        generator = torch.Generator().manual_seed(derive_seed(seed, 0, 2))
        order = torch.randperm(len(lengths), generator=generator).numpy()
    keys = -lengths[order] if descending else lengths[order]
    sorted_order: Array = order[np.argsort(keys, kind="stable")]
    return sorted_order


def pack_rows(lengths: Array, width: int, seed: int, shuffle: bool) -> Groups:
    """Pack sequences into rows of at most `width` positions: best fit, longest first.

    A new row begins only for a sequence that fits into no earlier row. So `collate.place_in_rows`, which places
    sequences one after the other, finds the same rows again. Time: O(n), with a bit set of the spaces that are free.
    """
    rows: list[list[int]] = []
    with_space: list[list[int]] = [[] for _ in range(width + 1)]  # rows by the space that is left in them
    spaces = 0  # bit s: there is a row with s positions left
    for sample in sort_by_length(lengths, seed, shuffle, descending=True).tolist():
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


def form_budget_batches(lengths: Array, widths: Array, budget: int, seed: int, shuffle: bool) -> Groups:
    """Form batches of similar lengths, in which the number of samples times the largest width is at most `budget`.

    widths: (n,) int64, the width of each sample alone in a batch, at most `budget`.
    """
    order = sort_by_length(lengths, seed, shuffle)
    wide = widths[order]
    bounds = [0]
    while bounds[-1] < len(order):
        begin = bounds[-1]
        end = min(len(order), begin + budget // int(wide[begin]))  # more cannot fit: widths only grow
        # positions of the batch [begin, j) grow with j: the last j that is within the budget
        fits = bisect_right(range(begin + 1, end + 1), budget, key=lambda j: (j - begin) * int(wide[j - 1]))
        bounds.append(begin + fits)
    return Groups(torch.from_numpy(order.astype(np.int64)), np.array(bounds))


def build_rank_batch(group: Tensor, base: Plan, device: torch.device | None, last: bool) -> RankBatch:
    """Return this rank's part of a global training micro-batch, or a filler if the part is empty."""
    begin, end = compute_rank_bounds(len(group), base.rank, base.world_size)
    if begin < end:
        return RankBatch(group[begin:end].to(device), True, last)
    return RankBatch(group[:1].to(device), False, last)


@dataclass(frozen=True, eq=False)
class DerivedPlan:
    """Base class of a `StreamPlan` that changes the batches of another plan (`base`) and takes all other values from
    it.
    """

    base: StreamPlan

    @property
    def num_batches(self) -> int:
        return self.base.num_batches

    @property
    def num_seen(self) -> int:
        return self.base.num_seen

    def effective_epoch(self, epoch: int) -> int:
        return self.base.effective_epoch(epoch)


@dataclass(frozen=True, eq=False)
class BucketPlan(DerivedPlan):
    """Samples of similar length in one batch: sorted inside mega-batches of the shuffled order.

    The batches of an epoch have a random order, with the short one last, which has samples of a random length. With
    drop_last a random part of the samples is left out, not the longest.
    lengths: (num_samples,) int64.
    """

    base: Plan
    lengths: Tensor

    def iterate_rank_batches(
        self, epoch: int, start: int, device: torch.device | None = None
    ) -> Iterator[RankBatch]:
        if start and start >= self.num_batches:
            raise build_end_error(start, self.num_batches)
        groups = self.batches(epoch)[start : self.num_batches]
        return (
            build_rank_batch(group, self.base, device, number == len(groups))
            for number, group in enumerate(groups, 1)
        )

    def batches(self, epoch: int) -> list[Tensor]:
        """Return all global micro-batches of an epoch."""
        base, size, number = self.base, self.base.global_size, self.effective_epoch(epoch)
        order = compute_epoch_order(base.num_samples, base.seed, number, base.shuffle)
        if base.drawn is not None:
            order = base.drawn.samples(order, base.num_samples, base.seed, number)
        num_full, rest = divmod(base.num_samples, size)
        if base.drop_last:
            order, rest = order[: num_full * size], 0
        order = self._sort_by_length(order)
        generator = torch.Generator().manual_seed(derive_seed(base.seed, number, 1))
        tail = order[:0]
        if rest:
            first = (
                num_full // MEGA_BATCHES * MEGA_BATCHES
            )  # of the last mega-batch, where the short batch is cut
            here = num_full - first
            place = int(torch.randint(here + 1, (), generator=generator)) if base.shuffle else here
            begin = (first + place) * size
            tail = order[begin : begin + rest]
            order = torch.cat([order[:begin], order[begin + rest :]])
        rows = order.view(num_full, size)
        if base.shuffle:
            rows = rows[torch.randperm(num_full, generator=generator)]
        return [*rows.unbind(), *([tail] if rest else [])]

    def _sort_by_length(self, order: Tensor) -> Tensor:
        mega = torch.arange(len(order)) // (MEGA_BATCHES * self.base.global_size)
        lengths = self.lengths[order % len(self.lengths)]
        keys = mega * (int(lengths.max()) + 1) + lengths if len(order) else mega
        return order[torch.argsort(keys, stable=True)]


@dataclass(frozen=True, eq=False)
class PackPlan(DerivedPlan):
    """Rows that were packed once, in the order of `base`.

    base: its samples and its batch_size are rows. The plan returns the samples of this rank's rows, in the order of
        the row numbers, so that `collate.place_in_rows` builds the same rows.
    """

    base: Plan
    rows: Groups

    @property
    def num_seen(self) -> int:
        """The number of samples in an epoch; an average if rows are left out."""
        return count_seen(self.rows, self.base.num_seen, self.base.shuffle)

    def iterate_rank_batches(
        self, epoch: int, start: int, device: torch.device | None = None
    ) -> Iterator[RankBatch]:
        return (
            share._replace(indices=self._list_samples(share.indices).to(device))
            for share in self.base.iterate_rank_batches(epoch, start)
        )

    def _list_samples(self, rows: Tensor) -> Tensor:
        return torch.cat([self.rows.group(row) for row in sorted(rows.tolist())])


@dataclass(frozen=True, eq=False)
class BudgetPlan(DerivedPlan):
    """Batches that are formed once. Each epoch has another order of the same batches, so their number never changes.

    base: its batch_size and drop_last have no effect, because no batch is short.
    """

    base: Plan
    groups: Groups

    @property
    def num_batches(self) -> int:
        return apply_limit(len(self.groups), self.base.limit)

    @property
    def num_seen(self) -> int:
        """The number of samples in an epoch; an average if the number of batches is limited."""
        return count_seen(self.groups, self.num_batches, self.base.shuffle)

    def iterate_rank_batches(
        self, epoch: int, start: int, device: torch.device | None = None
    ) -> Iterator[RankBatch]:
        of_groups = replace(
            self.base, num_samples=len(self.groups), batch_size=1, drop_last=False, rank=0, world_size=1
        )
        return (
            build_rank_batch(self.groups.group(int(item.indices)), self.base, device, item.last)
            for item in of_groups.iterate_rank_batches(epoch, start)
        )


def count_seen(groups: Groups, number: int, shuffled: bool) -> int:
    """Return the number of samples in the first `number` groups, or the average if groups are shuffled."""
    if number == len(groups) or not shuffled:
        return int(groups.bounds[number])
    return round(len(groups.samples) * number / len(groups))


@dataclass(frozen=True, eq=False)
class SelectedPlan(DerivedPlan):
    """A plan over some of the samples. numbers: (num_samples,) int64, their numbers in the data set."""

    numbers: Tensor

    def iterate_rank_batches(
        self, epoch: int, start: int, device: torch.device | None = None
    ) -> Iterator[RankBatch]:
        return (
            share._replace(indices=self.numbers[share.indices].to(device))
            for share in self.base.iterate_rank_batches(epoch, start)
        )


def estimate_padding(
    lengths: Array, base: Plan, width: int, multiple: int | None, max_tokens: int | None
) -> dict[str, float]:
    """Estimate the share of padding in epoch 0, for each padding mode.

    lengths: (n,) int64, of the samples after the cut. width: of rows that are all padded to one width.
    """
    lengths = lengths[:: -(-len(lengths) // MOST_SAMPLES)]
    single = replace(base, num_samples=len(lengths), rank=0, world_size=1, drop_last=False, limit=1.0,
                  drawn=None)  # fmt: skip
    order = compute_epoch_order(len(lengths), single.seed, 0, single.shuffle).numpy()
    shuffled = np.split(order, range(single.batch_size, len(order), single.batch_size))
    buckets = [batch.numpy() for batch in BucketPlan(single, torch.from_numpy(lengths)).batches(0)]
    rows = pack_rows(lengths, width, single.seed, single.shuffle)
    positions = {
        "longest": count_padded_positions(lengths, shuffled, multiple),
        "max": len(lengths) * width,
        "bucket": count_padded_positions(lengths, buckets, multiple),
        "pack": len(rows) * width,
    }
    if max_tokens is not None:
        groups = form_budget_batches(
            lengths, round_widths(lengths, multiple), max_tokens, single.seed, single.shuffle
        )
        positions["token_budget"] = count_padded_positions(lengths, list_batches(groups), multiple)
    useful = int(lengths.sum())
    return {mode: 1 - useful / total for mode, total in positions.items()}


def count_padded_positions(lengths: Array, batches: list[Array], multiple: int | None) -> int:
    return sum(len(batch) * round_length(int(lengths[batch].max()), multiple) for batch in batches)


def list_batches(groups: Groups) -> list[Array]:
    return [groups.group(number).numpy() for number in range(len(groups))]


def round_widths(lengths: Array, multiple: int | None) -> Array:
    """Round each length up, as `rounded` does, (n,) int64."""
    step = multiple or 1
    widths: Array = -(-np.maximum(lengths, 1) // step) * step
    return widths


def describe_padding(before: Array, shares: dict[str, float], chosen: str, size: int | None, truncate: str,
            how: str) -> str:  # fmt: skip
    """Return `lengths: 12 to 812, median 98; padding longest 61 %, bucket 4 %, pack 1 %; 0.3 % truncated`.

    before: (n,) int64, the lengths before the cut. size: max_sequence_length.
    """
    shown = {mode: share for mode, share in shares.items() if mode in ("longest", "bucket", "pack", chosen)}
    parts = [
        f"lengths: {before.min()} to {before.max()}, median {np.median(before):g}",
        "padding " + ", ".join(f"{mode} {format_percent(share)}" for mode, share in shown.items()),
    ]
    if size is not None:
        words = {"drop": "left out", "split": "split"}.get(truncate, "truncated")
        parts.append(f"{format_percent(float((before > size).mean()))} {words}")
    return "; ".join([*parts, f"data.padding={chosen}", *([how] if how else [])])


def format_percent(share: float) -> str:
    """Format a fraction as a percentage, with two digits below ten percent. A small fraction is never shown as 0."""
    value = 100 * share
    if value == 0 or value >= 9.95:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.05 else "under 0.1 %"
