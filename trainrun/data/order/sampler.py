"""Choose the samples of each micro-batch, as a pure function of seed, epoch and position.

A *global* micro-batch is `batch_size * world_size` consecutive entries of the epoch's order. Every rank takes its
contiguous share of it. So W ranks see the global batches of one rank with a batch W times as large, and each rank sees
a micro-batch of one process that accumulates gradients over W micro-batches.

Up to `LISTED` samples, the order of an epoch is torch's permutation, a list in memory. Above, it is computed by
index. So neither the memory nor the time to start and to resume grows with the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trainrun.data.order.permutation import KeyedPermutation
from trainrun.errors import DataError
from trainrun.seeding import derive_seed

if TYPE_CHECKING:
    from trainrun.data.order.drawn import WeightedSamples

ROWS_AT_ONCE = 1024  # micro-batches whose index tensors exist at the same time
POSITIONS_AT_ONCE = 2**16  # indices computed together: about 5 ms of a core
MOST_COUNTED = 2**20  # a table of so many counts is made faster than labels are sorted
LISTED = 2**20  # samples: such a list takes 8 MiB and 20 ms to make


class RankBatch(NamedTuple):
    """The samples that one rank reads of one micro-batch. `real` and `last`: as in `MicroBatch`.

    indices: (size,) int64, into the data set.
    """

    indices: Tensor
    real: bool
    last: bool


class StreamPlan(Protocol):
    """The protocol of a plan: which samples form each batch of one rank. A plan has no data."""

    @property
    def num_batches(self) -> int:
        """The number of global micro-batches in an epoch, the same on every rank."""

    @property
    def num_seen(self) -> int:
        """The number of samples in an epoch, over all ranks."""

    def effective_epoch(self, epoch: int) -> int: ...

    def iterate_rank_batches(
        self, epoch: int, start: int, device: torch.device | None = None
    ) -> Iterator[RankBatch]:
        """Yield this rank's shares from position `start` on, with indices on `device`."""


Lookup = Callable[[Tensor], Tensor]


def build_order(num_samples: int, seed: int, epoch: int, shuffle: bool) -> Lookup:
    """Return a permutation: a function from positions in an epoch to sample numbers, both int64 on the host."""
    if not shuffle:
        return lambda positions: positions
    if num_samples > LISTED:
        keyed = KeyedPermutation(num_samples, derive_seed(seed, epoch))
        return lambda positions: torch.from_numpy(keyed.look_up_numbers(positions.numpy()))
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    order = torch.randperm(num_samples, generator=generator)
    return lambda positions: order[positions]


def compute_epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Return the whole order of an epoch, (num_samples,) int64."""
    return build_order(num_samples, seed, epoch, shuffle)(torch.arange(num_samples))


def compute_rank_bounds(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return begin and end of a rank's share of `size` samples. Shares differ by at most one sample."""
    base, extra = divmod(size, world_size)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)


def apply_limit(full: int, limit: float | int) -> int:
    """Return how many of `full` remain under a limit. limit: a fraction (float; at least one remains) or a number
    (int).
    """
    if isinstance(limit, int):
        return min(full, limit)
    return min(full, max(1, math.floor(full * limit + 1e-9)))  # 0.29 * 100 is 28.999999999999996


@dataclass(frozen=True)
class Plan:
    """The batches of one rank, as sample numbers.

    batch_size: per rank. limit: see `limited`; a limit of micro-batches in training, of samples in evaluation.
    drawn: how often each sample occurs in a training epoch; None: once.
    may_shrink: use a smaller training batch if the batch is larger than the data and nothing is trained.
    training: whether each epoch has its own order. If the last micro-batch is too short for a rank, the rank gets a
        filler. In evaluation every epoch equals epoch 0, and such a rank gets no batch. A limit of an evaluation
        selects the same random samples every time, in the order of the data, for all numbers of ranks and batch sizes.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    training: bool = True
    limit: float | int = 1.0
    rank: int = 0
    world_size: int = 1
    drawn: WeightedSamples | None = None
    may_shrink: bool = False

    @property
    def global_size(self) -> int:
        return self.batch_size * self.world_size

    @cached_property
    def num_batches(self) -> int:
        """The number of global micro-batches in an epoch, the same on every rank."""
        if not self.training:
            return -(-self.num_seen // self.global_size)
        full, rest = divmod(self.num_samples, self.global_size)
        return apply_limit(full + (rest > 0 and not self.drop_last), self.limit)

    @cached_property
    def num_seen(self) -> int:
        """The number of samples in an epoch, over all ranks."""
        if not self.training:
            return apply_limit(self.num_samples, self.limit)
        return min(self.num_samples, self.num_batches * self.global_size)

    def effective_epoch(self, epoch: int) -> int:
        return epoch if self.training else 0

    def compute_bounds(self, size: int) -> tuple[int, int, bool]:
        """Return begin and end of the samples of this rank out of `size`, and whether they count.

        In training, the last, short micro-batch fills one rank after the other, as it fills the micro-batches of one
        process that accumulates gradients. So both sum the same numbers. A rank without samples gets those of rank 0
        as a filler, with which a layer such as BatchNorm works as well as on rank 0.
        """
        if not self.training:
            begin, end = compute_rank_bounds(size, self.rank, self.world_size)
            return begin, end, begin < end
        begin = self.rank * self.batch_size
        real = begin < size
        if not real:
            begin = 0
        return begin, min(begin + self.batch_size, size), real

    def iterate_rank_batches(
        self, epoch: int, start: int, device: torch.device | None = None
    ) -> Iterator[RankBatch]:
        """Yield this rank's shares from position `start` on, with indices on `device`."""
        if start and start >= self.num_batches:
            raise build_end_error(start, self.num_batches)
        if (
            not self.training
            and self.num_seen <= POSITIONS_AT_ONCE
            and (device is None or device.type == "cpu")
        ):
            return iter(self._evaluation_batches[start:])
        return self._iterate_shares(epoch, start, device)

    @cached_property
    def _evaluation_batches(self) -> list[RankBatch]:
        """The shares of a small evaluation, which are the same every time."""
        return list(self._iterate_shares(0, 0, None))

    def _iterate_shares(self, epoch: int, start: int, device: torch.device | None) -> Iterator[RankBatch]:
        order, num_full = self.order(epoch), self.num_seen // self.global_size
        tail = self._select_tail(order, num_full)
        left = num_full - start + len(tail)
        mine = torch.arange(self.batch_size) + self.rank * self.batch_size
        at_once = max(1, min(ROWS_AT_ONCE, POSITIONS_AT_ONCE // self.batch_size))
        for first in range(start, num_full, at_once):
            rows = torch.arange(first, min(first + at_once, num_full)) * self.global_size
            for indices in order(rows[:, None] + mine).to(device).unbind():
                left -= 1
                yield RankBatch(indices, True, left == 0)
        for indices, real in tail:
            yield RankBatch(indices.to(device), real, True)

    def order(self, epoch: int) -> Lookup:
        """Return a function from positions in an epoch to samples."""
        drawn, count = self.drawn, self.num_samples
        if self.training or self.num_seen == count:
            slots = build_order(count, self.seed, self.effective_epoch(epoch), self.shuffle)
            if drawn is None:
                return slots
            return lambda positions: drawn.samples(slots(positions), count, self.seed, epoch)
        part, _ = build_order(self.num_samples, self.seed, 0, True)(torch.arange(self.num_seen)).sort()
        return lambda positions: part[positions]

    def _select_tail(self, order: Lookup, whole: int) -> list[tuple[Tensor, bool]]:
        """Return this rank's part of the last, short micro-batch; empty without one."""
        if whole == self.num_batches:
            return []
        rest = order(torch.arange(whole * self.global_size, self.num_seen))
        begin, end, real = self.compute_bounds(len(rest))
        return [(rest[begin:end], real)] if begin < end else []


def build_end_error(start: int, num_batches: int) -> DataError:
    """Return the error of a resume whose data has become smaller."""
    return DataError(
        f"the run stopped at batch {start} of an epoch, but an epoch now has {num_batches} batches: "
        "resume with the data, data.batch_size and number of ranks that the run was started with"
    )


def build_batch_size_error(key: str, num_samples: int, plan: Plan) -> DataError:
    """Return the error of a training batch that is larger than the data."""
    ranks = f" for {plan.world_size} ranks" if plan.world_size > 1 else ""
    largest = num_samples // plan.world_size
    allowed = f"at most {largest} is possible" if largest else "use fewer ranks (parallel.devices)"
    return DataError(
        f"data.batch_size={plan.batch_size}: larger than the data: {key} has {num_samples} samples{ranks}; "
        f"{allowed}"
    )


def check_split(split: str, allowed: Sequence[str]) -> None:
    if split not in allowed:
        raise DataError(f"split={split}: no such part of the data; allowed: {', '.join(allowed)}")


def hold_out(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices for training and the held-out indices, each in rising order.

    labels: (N,) integers. fraction: 0 to below 1, of each class, rounded to whole samples.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"val_fraction={fraction}: must be at least 0 and below 1")
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label, members in iterate_classes(labels):
        order = build_order(len(members), seed, label, shuffle=True)
        positions = torch.arange(round(fraction * len(members)))
        held[members[order(positions)]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def count_different(labels: Tensor) -> int:
    """Return how many different values integer labels have."""
    if not len(labels):
        return 0
    low, high = int(labels.min()), int(labels.max())
    if high - low < min(len(labels), MOST_COUNTED):
        return int(torch.bincount(labels - low).count_nonzero())
    return len(torch.unique(labels))


def iterate_classes(labels: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each label, in rising order, with the rising indices of its samples."""
    if len(labels) == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low == high:
        yield low, torch.arange(len(labels))
        return
    # NumPy sorts numbers of 16 bits in linear time.
    keys = (labels - low).to(torch.int16) if high - low < 2**15 else labels
    order = torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))
    classes, counts = torch.unique_consecutive(labels[order], return_counts=True)
    yield from zip(classes.tolist(), torch.split(order, counts.tolist()), strict=True)
