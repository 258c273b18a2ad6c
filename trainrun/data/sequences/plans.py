"""Which samples form which micro-batch where lengths decide it: pure functions of seed, epoch and position.

As in `trainrun.data.order.sampler`, a global micro-batch is cut into one contiguous share for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainrun.data.order.sampler import (
    Plan,
    Share,
    StreamPlan,
    behind_the_end,
    epoch_order,
    limited,
    share_bounds,
)
from trainrun.data.sequences.packing import Groups
from trainrun.seeding import derive_seed

MEGA_BATCHES = 50  # global micro-batches that are sorted together


def share_of(group: Tensor, base: Plan, device: torch.device | None) -> Share | None:
    """This rank's part of a global micro-batch; without one a filler in training, else None."""
    begin, end = share_bounds(len(group), base.rank, base.world_size)
    if begin < end:
        return Share(group[begin:end].to(device), True, False)
    return Share(group[:1].to(device), False, False) if base.training else None


def marked(shares: Iterator[Share | None]) -> Iterator[Share]:
    """Leave out what is None, and mark the last."""
    waiting = None
    for share in shares:
        if share is not None:
            if waiting is not None:
                yield waiting
            waiting = share
    if waiting is not None:
        yield waiting._replace(last=True)


@dataclass(frozen=True, eq=False)
class Derived:
    """Base of a `StreamPlan` that is made from another one, whose values it passes on."""

    base: StreamPlan

    @property
    def seed(self) -> int:
        return self.base.seed

    @property
    def world_size(self) -> int:
        return self.base.world_size

    @property
    def global_size(self) -> int:
        return self.base.global_size

    @property
    def num_batches(self) -> int:
        return self.base.num_batches

    @property
    def num_seen(self) -> int:
        return self.base.num_seen

    def effective_epoch(self, epoch: int) -> int:
        return self.base.effective_epoch(epoch)


@dataclass(frozen=True, eq=False)
class BucketPlan(Derived):
    """Samples of like length in one batch: sorted inside mega-batches of the shuffled order.

    The batches of an epoch come in random order, the short one last; it holds samples of a random
    length. With drop_last it is a random part of the samples that is left out, not the longest.
    lengths: (num_samples,) int64.
    """

    base: Plan
    lengths: Tensor

    def shares(self, epoch: int, start: int, device: torch.device | None = None) -> Iterator[Share]:
        if start and start >= self.num_batches:
            raise behind_the_end(start, self.num_batches)
        groups = self.batches(epoch)[start : self.num_batches]
        return marked(share_of(group, self.base, device) for group in groups)

    def batches(self, epoch: int) -> list[Tensor]:
        """All global micro-batches of an epoch."""
        base, size, number = self.base, self.global_size, self.effective_epoch(epoch)
        order = epoch_order(base.num_samples, base.seed, number, base.shuffle)
        whole, rest = divmod(base.num_samples, size)
        if base.drop_last:
            order, rest = order[: whole * size], 0
        order = self._sorted(order)
        generator = torch.Generator().manual_seed(derive_seed(base.seed, number, 1))
        tail = order[:0]
        if rest:
            first = (
                whole // MEGA_BATCHES * MEGA_BATCHES
            )  # of the last mega-batch, where the short batch is cut
            here = whole - first
            place = int(torch.randint(here + 1, (), generator=generator)) if base.shuffle else here
            begin = (first + place) * size
            tail = order[begin : begin + rest]
            order = torch.cat([order[:begin], order[begin + rest :]])
        rows = order.view(whole, size)
        if base.shuffle:
            rows = rows[torch.randperm(whole, generator=generator)]
        return [*rows.unbind(), *([tail] if rest else [])]

    def _sorted(self, order: Tensor) -> Tensor:
        mega = torch.arange(len(order)) // (MEGA_BATCHES * self.global_size)
        lengths = self.lengths[order]
        keys = mega * (int(lengths.max()) + 1) + lengths if len(order) else mega
        return order[torch.argsort(keys, stable=True)]


@dataclass(frozen=True, eq=False)
class PackPlan(Derived):
    """Rows that were composed once, in the order that `base` gives to rows.

    base: its samples and its batch_size are rows. What comes out are the samples of this rank's rows,
    rows in the order of their numbers, so that `next_fit` finds them again.
    """

    base: Plan
    rows: Groups

    @property
    def num_seen(self) -> int:
        """Samples seen in an epoch; an average if rows are left out."""
        return seen(self.rows, self.base.num_seen, self.base.shuffle)

    def shares(self, epoch: int, start: int, device: torch.device | None = None) -> Iterator[Share]:
        return (
            share._replace(indices=self._samples(share.indices).to(device))
            for share in self.base.shares(epoch, start)
        )

    def _samples(self, rows: Tensor) -> Tensor:
        return torch.cat([self.rows.group(row) for row in sorted(rows.tolist())])


@dataclass(frozen=True, eq=False)
class BudgetPlan(Derived):
    """Batches that were composed once, in a new order each epoch: their number never changes.

    base: its batch_size and drop_last play no part, as no batch is short.
    """

    base: Plan
    groups: Groups

    @property
    def global_size(self) -> int:
        """Samples in the largest batch."""
        bounds = self.groups.bounds
        return int((bounds[1:] - bounds[:-1]).max())

    @property
    def num_batches(self) -> int:
        return limited(len(self.groups), self.base.limit)

    @property
    def num_seen(self) -> int:
        """Samples seen in an epoch; an average if the number of batches is limited."""
        return seen(self.groups, self.num_batches, self.base.shuffle)

    def shares(self, epoch: int, start: int, device: torch.device | None = None) -> Iterator[Share]:
        of_groups = replace(
            self.base, num_samples=len(self.groups), batch_size=1, drop_last=False, rank=0, world_size=1
        )
        numbers = of_groups.shares(epoch, start)
        return marked(share_of(self.groups.group(int(item.indices)), self.base, device) for item in numbers)


def seen(groups: Groups, number: int, shuffled: bool) -> int:
    """Samples in `number` of the groups: the first ones, or as many as there are on average."""
    if number == len(groups) or not shuffled:
        return int(groups.bounds[number])
    return round(len(groups.samples) * number / len(groups))


@dataclass(frozen=True, eq=False)
class SelectedPlan(Derived):
    """A plan over some of the samples. numbers: (num_samples,) int64, their numbers in the data set."""

    numbers: Tensor

    def shares(self, epoch: int, start: int, device: torch.device | None = None) -> Iterator[Share]:
        return (
            share._replace(indices=self.numbers[share.indices].to(device))
            for share in self.base.shares(epoch, start)
        )
