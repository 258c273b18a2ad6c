"""Each augmentation against a slow one, a sample at a time."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor

from trainrun.config.compose import compose_run
from trainrun.data.augment.augmented import Augmentation
from trainrun.data.augment.color import ColorJitter
from trainrun.data.augment.crop import RandomCrop
from trainrun.data.augment.cutout import Cutout
from trainrun.data.augment.draws import Draws
from trainrun.data.augment.flip import AlternatingFlip, RandomFlip
from trainrun.data.augment.mix import CutMix, MixUp
from trainrun.data.augment.normalize import Normalize
from trainrun.errors import ConfigError, DataError

TYPES = [torch.uint8, torch.float32, torch.float64, torch.int16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
SHAPES = [(16, 1, 7, 5), (9, 3, 6, 8)]


def images(shape: tuple[int, ...] = (9, 3, 6, 8), dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def draws(num: int = 9, epoch: int = 0, **changes: Any) -> Draws:
    return Draws(5, epoch, torch.arange(100, 100 + num), **changes)


def slow_crop(x: Tensor, numbers: Draws) -> Tensor:
    places = numbers.integers("place", 0, 5, n=2)
    out = torch.zeros_like(x)
    height, width = x.shape[2:]
    for i, (top, left) in enumerate(places.tolist()):
        for y in range(height):
            for column in range(width):
                from_y, from_x = y + top - 2, column + left - 2
                if 0 <= from_y < height and 0 <= from_x < width:
                    out[i, :, y, column] = x[i, :, from_y, from_x]
    return out


def slow_flip(x: Tensor, numbers: Draws) -> Tensor:
    mirrored = [bool(value < 0.3) for value in numbers.uniform("side")]
    return torch.stack([one.flip(-1) if flip else one for one, flip in zip(x, mirrored, strict=True)])


def slow_turns(x: Tensor, numbers: Draws) -> Tensor:
    first = numbers.ignore_epoch().integers("side", 0, 2).flatten().tolist()
    return torch.stack(
        [one.flip(-1) if (side + numbers.epoch) % 2 else one for one, side in zip(x, first, strict=True)]
    )


def slow_cutout(x: Tensor, numbers: Draws) -> Tensor:
    rows = numbers.integers("row", 0, x.shape[2]).flatten().tolist()
    columns = numbers.integers("column", 0, x.shape[3]).flatten().tolist()
    out = x.clone()
    for one, row, column in zip(out, rows, columns, strict=True):
        one[:, max(0, row - 1) : row + 2, max(0, column - 1) : column + 2] = 0
    return out


CASES: list[tuple[Augmentation, Callable[[Tensor, Draws], Tensor]]] = [
    (RandomCrop(2), slow_crop),
    (RandomFlip(0.3), slow_flip),
    (AlternatingFlip(), slow_turns),
    (Cutout(3), slow_cutout),
]


@pytest.mark.parametrize(("augmentation", "slow"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_equals_its_samples_one_by_one(
    augmentation: Augmentation, slow: Callable[[Tensor, Draws], Tensor], layout: torch.memory_format,
    dtype: torch.dtype, shape: tuple[int, ...],
) -> None:  # fmt: skip
    x = images(shape, dtype).contiguous(memory_format=layout)
    before = x.clone()
    found = augmentation(x, draws(len(x), epoch=1))
    assert found.dtype is dtype
    assert torch.equal(found, slow(x, draws(len(x), epoch=1)))
    assert found.is_contiguous(memory_format=layout)
    assert torch.equal(x, before), "the data set may own it"
    assert not torch.equal(found, x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_colours_of_a_batch_equal_those_of_its_samples(
    dtype: torch.dtype, layout: torch.memory_format
) -> None:
    x = images(dtype=dtype).contiguous(memory_format=layout)
    before = x.clone()
    augmentation, numbers = ColorJitter(0.4, 0.3), draws(len(x), epoch=1)
    found = augmentation(x, numbers)
    light, contrast = (1 + amount * (2 * numbers.uniform(name)[:, 0].double() - 1)
                       for name, amount in (("brightness", 0.4), ("contrast", 0.3)))  # fmt: skip
    for number, one in enumerate(x.double() * light[:, None, None, None]):
        wanted = one.mean() + contrast[number] * (one - one.mean())
        if dtype is torch.uint8:
            wanted = wanted.clamp(0, 255)
        tolerance = 1e-6 if dtype.is_floating_point else 0.501  # of a rounded pixel
        torch.testing.assert_close(found[number].double(), wanted, rtol=1e-5, atol=max(tolerance, 1e-3))
    assert found.dtype is dtype
    assert found.is_contiguous(memory_format=layout)
    assert torch.equal(x, before), "the data set may own it"
    assert len(set(light.tolist())) == len(x)


def test_alternating_flips_turn_in_every_epoch() -> None:
    x = images((64, 1, 4, 6))
    epochs = [AlternatingFlip()(x, draws(64, epoch)) for epoch in range(3)]
    assert torch.equal(epochs[0], epochs[2])
    assert torch.equal(epochs[0], epochs[1].flip(-1))
    begins_flipped = sum(torch.equal(one, two) for one, two in zip(epochs[0], x.flip(-1), strict=True))
    assert 16 < begins_flipped < 48


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uint8_becomes_the_float_type_of_the_run(layout: torch.memory_format, dtype: torch.dtype) -> None:
    x = images().contiguous(memory_format=layout)
    found = Normalize([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])(x, draws(float_dtype=dtype))
    mean, std = torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([0.5, 0.6, 0.7]).double()
    wanted = (x.double() / 255 - mean[:, None, None]) / std[:, None, None]
    assert found.dtype is dtype
    assert found.is_contiguous(memory_format=layout)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_floats_are_scaled_already_and_keep_their_type() -> None:
    x = images(dtype=torch.float64) / 255
    before = x.clone()
    found = Normalize(0.25, 0.5)(x, draws())
    torch.testing.assert_close(found, (x - 0.25) / 0.5)
    assert torch.equal(x, before), "the data set may own it"


Pair = namedtuple("Pair", ["image", "label"])
BATCHES = [lambda x, y: (x, y), lambda x, y: [x, y], lambda x, y: {"id": y, "image": x, "label": y}, Pair]


@pytest.mark.parametrize("batch_of", BATCHES)
def test_containers_and_what_else_is_in_them_stay(batch_of: Callable[[Tensor, Tensor], Any]) -> None:
    x, y = images(), torch.arange(9)
    batch = batch_of(x, y)
    found = RandomCrop(2)(batch, draws())
    assert type(found) is type(batch)
    values = list(found.values()) if isinstance(found, dict) else list(found)
    assert values[-1] is y
    assert torch.equal(values[-2], slow_crop(x, draws()))
    kept = batch["image"] if isinstance(batch, dict) else batch[0]
    assert kept is x, "the batch itself is not changed"


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(4, 16), torch.zeros(4)),
        torch.zeros(4, 28, 28),
        (["a"], torch.zeros(1)),
        {"tokens": torch.zeros(4, 3)},
        (),
    ],
)
def test_other_data_is_refused(batch: Any) -> None:
    for augmentation in (
        RandomCrop(),
        RandomFlip(),
        AlternatingFlip(),
        Cutout(),
        ColorJitter(),
        Normalize(0, 1),
        MixUp(),
        CutMix(),
    ):
        with refused(DataError):
            augmentation(batch, draws(4))


def test_channels_and_number_types_that_do_not_fit_are_refused() -> None:
    with refused(DataError):
        Normalize([0.1, 0.2], [1, 1])(images(), draws())
    with refused(DataError):
        Normalize(0.5, 0.5)(images(dtype=torch.int16), draws())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("crop.RandomCrop data.augment.x.padding=0", "padding=0: must be a whole number, 1 or more"),
        ("cutout.Cutout data.augment.x.size=1.5", "size=1.5: must be a whole number, 1 or more"),
        ("flip.RandomFlip data.augment.x.p=1.5", "p=1.5: must be a number, 0 or more and at most 1"),
        (
            "normalize.Normalize data.augment.x.mean=grey data.augment.x.std=1",
            "mean=grey: must be a number, or a list",
        ),
        (
            "normalize.Normalize data.augment.x.mean=0 data.augment.x.std=0",
            "std=0: must be a number, more than 0",
        ),
        ("mix.MixUp data.augment.x.alpha=9", "alpha=9: must be a number, more than 0 and at most 8"),
        ("mix.CutMix data.augment.x.num_classes=1", "num_classes=1: must be a whole number, 2 or more"),
        ("noise.LatentNoise data.augment.x.size=0", "size=0: must be a whole number, 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(words: str, text: str) -> None:
    with refused(ConfigError, "data.augment.x"):
        compose_run(f"data.augment.x._target_=trainrun.data.augment.{words}".split())
    with refused(ConfigError):
        Normalize([0.5, 0.5], [1, 1, 1])
