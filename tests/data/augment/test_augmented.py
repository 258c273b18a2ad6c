"""An augmented stream: the same pixels for a sample in every batch, rank, order and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from approved import refused
from torch import Tensor

from trainrun.data.augment.augmented import AugmentedBatches, NamedAugmentation, augment_batches
from trainrun.data.augment.crop import RandomCrop
from trainrun.data.augment.cutout import Cutout
from trainrun.data.augment.draws import Draws
from trainrun.data.augment.flip import RandomFlip
from trainrun.data.augment.mix import CutMix, MixUp
from trainrun.data.augment.normalize import Normalize
from trainrun.data.order.sampler import Plan
from trainrun.errors import DataError, PluginError
from trainrun.interfaces import Batches, MicroBatch

N = 50
IMAGES = torch.randint(256, (N, 1, 6, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
LABELS = torch.arange(N) % 4


class Stream:
    """A plain engine over `IMAGES`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.closed = False

    @property
    def num_batches(self) -> int | None:
        return self.plan.num_batches

    @property
    def num_samples(self) -> int | None:
        return self.plan.num_seen

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for indices, real, last in self.plan.iterate_rank_batches(epoch, start):
            yield MicroBatch((IMAGES[indices], LABELS[indices]), real, last, indices)

    def close(self) -> None:
        self.closed = True


def named(**augmentations: Any) -> list[NamedAugmentation]:
    return [
        NamedAugmentation(f"data.augment.{name}", apply, getattr(apply, "random", True))
        for name, apply in augmentations.items()
    ]


def all_kinds() -> list[NamedAugmentation]:
    return named(crop=RandomCrop(2), flip=RandomFlip(), normalize=Normalize(0.5, 0.25), cutout=Cutout(2),
                 mixup=MixUp(1.0, 4), cutmix=CutMix(1.0, 4))  # fmt: skip


def stream(batch_size: int, seed: int = 3, **plan: Any) -> Batches:
    return AugmentedBatches(Stream(Plan(N, batch_size, **({"seed": 3} | plan))), all_kinds(), seed)


def by_sample(*streams: Batches, epoch: int = 0) -> dict[int, list[Tensor]]:
    found = {}
    for batches in streams:
        for batch in batches.epoch(epoch):
            assert batch.indices is not None
            for i, index in enumerate(batch.indices.tolist() if batch.real else []):
                assert index not in found
                found[index] = [part[i] for part in batch.data]
    return found


def same(left: dict[int, list[Tensor]], right: dict[int, list[Tensor]]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(one, two) for index in left for one, two in zip(left[index], right[index], strict=True)
    )


def test_batch_size_and_ranks_change_no_sample() -> None:
    """Mixed ones too, in even micro-batches."""
    whole = by_sample(stream(10))
    assert len(whole) == N
    assert same(by_sample(stream(50)), whole)
    assert same(by_sample(stream(2)), whole)
    for world_size, size in ((5, 2), (5, 10)):
        ranks = [stream(size, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert same(by_sample(*ranks), whole)


def test_a_resume_goes_on_with_the_same_batches() -> None:
    for start in (0, 3, 4):
        went_on = list(stream(10).epoch(1, start))
        assert len(went_on) == 5 - start
        for one, two in zip(went_on, list(stream(10).epoch(1))[start:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one.data, two.data, strict=True))
            assert one[1:3] == two[1:3]


def test_two_of_a_kind_draw_their_own_numbers() -> None:
    seen: list[Tensor] = []

    def spy(batch: Any, draws: Draws) -> Any:
        seen.append(draws.uniform("u"))
        return batch

    next(AugmentedBatches(Stream(Plan(N, 10)), named(a=spy, b=spy), 0).epoch(0))
    assert not torch.equal(seen[0], seen[1])


def test_they_are_applied_in_the_order_given() -> None:
    calls: list[str] = []
    steps = {
        name: (lambda batch, draws, name=name: (calls.append(name), batch)[1]) for name in ("b", "a", "c")
    }
    next(AugmentedBatches(Stream(Plan(N, 10)), named(**steps), 0).epoch(0))
    assert calls == ["b", "a", "c"]


def test_evaluation_gets_what_is_not_random() -> None:
    inner = Stream(Plan(N, N, shuffle=False, training=False))
    batches = augment_batches(inner, all_kinds(), 0, training=False, float_dtype=torch.float64)
    found = next(batches.epoch(0)).data[0]
    assert torch.equal(
        found, Normalize(0.5, 0.25)(IMAGES, Draws(0, 0, torch.arange(N), float_dtype=torch.float64))
    )
    assert found.dtype is torch.float64
    assert augment_batches(inner, named(flip=RandomFlip()), 0, False, torch.float32) is inner
    assert augment_batches(inner, (), 0, True, torch.float32) is inner
    assert isinstance(
        augment_batches(inner, named(flip=RandomFlip()), 0, True, torch.float32), AugmentedBatches
    )


def test_faults_name_the_augmentation() -> None:
    def tokens(batch: Any, draws: Draws) -> Any:
        return (batch[0].flatten(1), batch[1])

    with refused(DataError, "data.augment.crop"):
        next(AugmentedBatches(Stream(Plan(N, 10)), named(flat=tokens, crop=RandomCrop()), 0).epoch(0))
    with refused(PluginError, "data.augment.mine"):
        next(AugmentedBatches(Stream(Plan(N, 10)), named(mine=lambda batch, draws: None), 0).epoch(0))
