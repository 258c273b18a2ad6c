"""MixUp and CutMix: combine two images and their targets.

When: classification that overfits. When not: short training, or targets that cannot be averaged. Sources: Zhang et
al. 2017 (https://arxiv.org/abs/1710.09412), Yun et al. 2019 (https://arxiv.org/abs/1905.04899).

The partner of an image is its neighbour in the order of the epoch: the 1st and 2nd, the 3rd and 4th, and so on. The
order is random, so the partners are random too. With an even `data.batch_size` the pairs do not depend on batch
size, accumulation or number of ranks. Only a last, short batch of several ranks can have other pairs. In a batch of
an odd number the last image is not mixed. With `data.shuffle=false` the partners are the same in every epoch.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from trainrun.data.augment.draws import Draws
from trainrun.data.augment.images import (
    build_box_mask,
    get_images,
    get_target,
    replace_images,
    replace_target,
    select_images,
)
from trainrun.errors import DataError
from trainrun.limits import Fraction, Limits


class MixUp:
    """Mix images as weight * image + (1 - weight) * partner, and their targets in the same way.

    weight: drawn from Beta(alpha, alpha). p: the fraction of images that are mixed. num_classes: class numbers (B,)
        become probabilities (B, num_classes). Floating-point targets are mixed directly.
    """

    random = True

    def __init__(
        self,
        alpha: Annotated[float, Limits(above=0, at_most=8)] = 0.2,
        num_classes: Annotated[int, Limits(at_least=2)] | None = None,
        p: Fraction = 1.0,
    ) -> None:
        self.mixture = Mixture(alpha, num_classes, p)

    def __call__(self, batch: Any, draws: Draws) -> Any:
        images = get_images(batch)
        if not images.is_floating_point():
            raise DataError(
                f"needs floating-point images, not {images.dtype}; put "
                "trainrun.data.augment.normalize.Normalize before this augmentation"
            )
        weight = self.mixture.weight(draws).to(images.dtype)
        mixed = torch.lerp(
            select_images(images, find_partner_positions(images)), images, weight[:, None, None, None]
        )
        return replace_images(self.mixture.mix_targets(batch, weight, draws.float_dtype), mixed)


class CutMix:
    """Replace a box of the image by the partner's pixels. Targets are mixed by the area. It works for any number type.

    The box covers the fraction 1 - weight of the image, where weight is drawn from Beta(alpha, alpha). It covers less
    if a part of the box is outside of the image. p and num_classes: as in MixUp.
    """

    random = True

    def __init__(
        self,
        alpha: Annotated[float, Limits(above=0, at_most=8)] = 1.0,
        num_classes: Annotated[int, Limits(at_least=2)] | None = None,
        p: Fraction = 1.0,
    ) -> None:
        self.mixture = Mixture(alpha, num_classes, p)

    def __call__(self, batch: Any, draws: Draws) -> Any:
        images = get_images(batch)
        corners = self._draw_boxes(images, draws)
        height, width = images.shape[2:]
        partners = select_images(images, find_partner_positions(images))
        mixed = torch.where(build_box_mask(corners, height, width), partners, images)
        area = (corners[:, 1] - corners[:, 0]) * (corners[:, 3] - corners[:, 2])
        weight = 1 - area.to(draws.float_dtype) / (height * width)
        return replace_images(self.mixture.mix_targets(batch, weight, draws.float_dtype), mixed)

    def _draw_boxes(self, images: Tensor, draws: Draws) -> Tensor:
        """Draw boxes (B, 4) int64 inside the image: top, bottom, left, right."""
        side = (1 - self.mixture.weight(draws)).sqrt()
        corners = []
        for name, length in zip(("row", "column"), images.shape[2:], strict=True):
            centre = draws.integers(name, 0, length)[:, 0]
            half = (side * length).long() // 2
            corners += [(centre - half).clamp(min=0), (centre + half).clamp(max=length)]
        return torch.stack(corners, 1)


class Mixture:
    """The common part of MixUp and CutMix: the weights and the targets."""

    def __init__(self, alpha: float, num_classes: int | None, p: float) -> None:
        self.alpha, self.num_classes, self.p = alpha, num_classes, p
        self.checked = False

    def weight(self, draws: Draws) -> Tensor:
        """Draw the weight of each image, (B,) float32. An image that is not mixed has 1."""
        weight = draws.beta("weight", self.alpha)[:, 0]
        return weight if self.p == 1 else torch.where(draws.uniform("mixed")[:, 0] < self.p, weight, 1.0)

    def mix_targets(self, batch: Any, weight: Tensor, dtype: torch.dtype) -> Any:
        """Return the batch with mixed targets. weight: (B,), of the target of the image itself."""
        target = get_target(batch)
        if not target.is_floating_point():
            target = self._convert_to_probabilities(target, dtype)
        weights = weight.to(target.dtype).view(-1, *[1] * (target.ndim - 1))
        partners = target.index_select(0, find_partner_positions(target))
        return replace_target(batch, torch.lerp(partners, target, weights))

    def _convert_to_probabilities(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert class numbers (B,) to probabilities (B, num_classes)."""
        if self.num_classes is None or target.ndim != 1:
            raise DataError(
                f"class numbers of shape {tuple(target.shape)} are mixed as probabilities; one number for each image "
                "and num_classes are needed, for example num_classes=10"
            )
        if not self.checked:  # of the first batch only: it waits for the device
            if len(target) and not 0 <= int(target.min()) <= int(target.max()) < self.num_classes:
                raise DataError(
                    f"num_classes={self.num_classes}: but the labels of the first batch lie between "
                    f"{int(target.min())} and {int(target.max())}"
                )
            self.checked = True
        soft = torch.zeros(len(target), self.num_classes, dtype=dtype, device=target.device)
        return soft.scatter_(1, target.long()[:, None], 1)


def find_partner_positions(rows: Tensor) -> Tensor:
    """Return the position of each sample's partner, (B,): 1, 0, 3, 2, ... A last sample without a neighbour is its
    own partner.
    """
    return (torch.arange(len(rows), device=rows.device) ^ 1).clamp(max=len(rows) - 1)
