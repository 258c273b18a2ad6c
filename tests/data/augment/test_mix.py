"""Mixed images, their targets and their loss, against slow ones in float64; and who is mixed with whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor
from torch.nn.functional import one_hot

from trainrun.data.augment.draws import Draws
from trainrun.data.augment.mix import CutMix, MixUp, find_partner_positions
from trainrun.errors import DataError

CLASSES = 5


def batch(num: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num, 3, 6, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(CLASSES, (num,), generator=generator)


def draws(num: int = 8, **changes: Any) -> Draws:
    return Draws(5, 2, torch.arange(num), float_dtype=torch.float64, **changes)


def partner_of(i: int, num: int) -> int:
    return min(i + 1 if i % 2 == 0 else i - 1, num - 1)


@pytest.mark.parametrize("num", [1, 2, 7, 8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mixup_is_the_weighted_mean_of_two(num: int, layout: torch.memory_format) -> None:
    x, y = batch(num)
    found, target = MixUp(0.4, CLASSES)((x.contiguous(memory_format=layout), y), draws(num))
    weight = draws(num).beta("weight", 0.4).double().flatten().tolist()
    for i, w in enumerate(weight):
        j = partner_of(i, num)
        torch.testing.assert_close(found[i], w * x[i] + (1 - w) * x[j], rtol=1e-12, atol=1e-12)
        soft = w * one_hot(y[i], CLASSES).double() + (1 - w) * one_hot(y[j], CLASSES).double()
        torch.testing.assert_close(target[i], soft, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous(memory_format=layout)
    assert target.dtype is torch.float64


@pytest.mark.parametrize("num", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_cutmix_puts_a_box_of_the_partner_in(
    num: int, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    x, y = batch(num)
    x = (255 * x).to(dtype).contiguous(memory_format=layout)
    found, target = CutMix(1.0, CLASSES)((x, y), draws(num))
    weight = draws(num).beta("weight", 1.0).flatten()
    rows, columns = draws(num).integers("row", 0, 6), draws(num).integers("column", 0, 8)
    for i in range(num):
        j = partner_of(i, num)
        side = torch.sqrt(1 - weight[i])
        half_y, half_x = int(side * 6) // 2, int(side * 8) // 2
        wanted, area = x[i].clone(), 0
        for row in range(max(0, int(rows[i]) - half_y), min(6, int(rows[i]) + half_y)):
            for column in range(max(0, int(columns[i]) - half_x), min(8, int(columns[i]) + half_x)):
                wanted[:, row, column] = x[j, :, row, column]
                area += 1
        assert torch.equal(found[i], wanted)
        soft = (48 - area) / 48 * one_hot(y[i], CLASSES).double() + area / 48 * one_hot(
            y[j], CLASSES
        ).double()
        torch.testing.assert_close(target[i], soft, rtol=1e-12, atol=1e-12)
    assert found.dtype is dtype
    assert found.is_contiguous(memory_format=layout)


def test_targets_that_are_numbers_or_mixed_already_are_mixed_as_they_are() -> None:
    x, y = batch()
    weight = draws().beta("weight", 0.2).double()
    for shape in ((8,), (8, 4)):
        real = torch.rand(shape, dtype=torch.float64)
        _, target = MixUp()((x, real), draws())
        w = weight.view(8, *[1] * (real.ndim - 1))
        torch.testing.assert_close(target, w * real + (1 - w) * real[find_partner_positions(real)])
    twice = MixUp(1.0, CLASSES)(CutMix(1.0, CLASSES)((x, y), draws()), draws().derive("other"))
    torch.testing.assert_close(twice[1].sum(1), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("mix", [MixUp(1.0, CLASSES), CutMix(1.0, CLASSES)])
def test_even_micro_batches_are_the_joined_batch(mix: MixUp | CutMix) -> None:
    """So accumulation and ranks mix as one large batch does."""
    x, y = batch(24)
    indices = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:24]
    whole = mix((x, y), Draws(5, 2, indices))
    for size in (2, 4, 6, 12):
        for begin in range(0, 24, size):
            part = slice(begin, begin + size)
            images, target = mix((x[part], y[part]), Draws(5, 2, indices[part]))
            assert torch.equal(images, whole[0][part])
            assert torch.equal(target, whole[1][part])
    odd = mix((x[:3], y[:3]), Draws(5, 2, indices[:3]))
    assert torch.equal(odd[0][:2], whole[0][:2])
    assert torch.equal(odd[0][2], x[2]), "the last of an odd number has no partner"


def test_batches_that_cannot_be_mixed_are_refused() -> None:
    x, y = batch()
    with refused(DataError, "num_classes=10"):
        MixUp()((x, y), draws())
    with refused(DataError):
        CutMix(1.0, CLASSES)((x, y[:, None].expand(8, 2)), draws())
    with refused(DataError, "num_classes=3"):
        CutMix(1.0, 3)((x, y), draws())
    with refused(DataError, "torch.uint8"):
        MixUp(1.0, CLASSES)((x.to(torch.uint8), y), draws())
    for lonely in (x, (x,), {"image": x}, (x, "label")):
        with refused(DataError):
            MixUp(1.0, CLASSES)(lonely, draws())
