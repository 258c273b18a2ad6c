"""Horizontal flips: at random, or in alternate epochs. Targets that are maps of the pixels are flipped with their
image.

When: the mirror image has the same class (clothes, animals). When not: letters, digits, left and right.
Source of alternating flips: Jordan 2024 (https://arxiv.org/abs/2404.00498). Half of the images are flipped in the
first epoch. From then on every image is flipped in every second epoch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainrun.data.augment.draws import Draws
from trainrun.data.augment.images import (
    change_images_and_map,
    get_images,
    is_channels_last,
    make_contiguous,
    restore_layout,
)
from trainrun.limits import Fraction


class RandomFlip:
    """Flip left and right with probability p, drawn again in every epoch."""

    random = True

    def __init__(self, p: Fraction = 0.5) -> None:
        self.p = p

    def __call__(self, batch: Any, draws: Draws) -> Any:
        images = get_images(batch)
        which = draws.uniform("side")[:, 0] < self.p
        return change_images_and_map(batch, images, lambda each: flip_images(each, which))


class AlternatingFlip:
    """Flips an image in every second epoch; a random half of them begins flipped."""

    random = True

    def __call__(self, batch: Any, draws: Draws) -> Any:
        images = get_images(batch)
        first = draws.ignore_epoch().integers("side", 0, 2)[:, 0]
        return change_images_and_map(
            batch, images, lambda each: flip_images(each, (first + draws.epoch) % 2 == 1)
        )


def flip_images(images: Tensor, which: Tensor) -> Tensor:
    """Return the images, flipped where `which` (B,) bool is True.

    Whole images are selected from both versions, which is up to 4 times as fast on a CPU as `torch.where`.
    """
    ordered = make_contiguous(images)
    both = torch.cat((ordered, ordered.flip(2 if is_channels_last(images) else 3)))
    chosen = torch.arange(len(images), device=images.device) + which * len(images)
    return restore_layout(images, both.index_select(0, chosen))
