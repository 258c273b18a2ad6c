"""Random brightness and contrast, with different factors for each image.

When: photographs, whose light differs. When not: pixels that measure something, such as a height or a density.
Source: ColorJitter of torchvision, without hue and saturation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainrun.data.augment.draws import Draws
from trainrun.data.augment.images import get_images, replace_images
from trainrun.limits import Fraction


class ColorJitter:
    """Multiply all pixels of an image by a factor. Then multiply their distances from its mean by another factor.

    brightness, contrast: b and c. The factors are uniform from 1 - b to 1 + b, and from 1 - c to 1 + c. Images must
        be from 0 to 1 or in bytes, so put `Normalize` after this. Bytes are clipped at 0 and 255. Floating-point
        values are not clipped.
    """

    random = True

    def __init__(self, brightness: Fraction = 0.2, contrast: Fraction = 0.2) -> None:
        self.brightness, self.contrast = brightness, contrast

    def __call__(self, batch: Any, draws: Draws) -> Any:
        images = get_images(batch)
        pixels = images if images.is_floating_point() else images.to(draws.float_dtype)
        pixels = pixels * draw_factors(draws, "brightness", self.brightness, pixels)
        mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
        pixels = torch.lerp(mean, pixels, draw_factors(draws, "contrast", self.contrast, pixels))
        if not images.is_floating_point():
            limits = torch.iinfo(images.dtype)
            pixels = pixels.round().clamp(limits.min, limits.max).to(images.dtype)
        return replace_images(batch, pixels)


def draw_factors(draws: Draws, name: str, amount: float, like: Tensor) -> Tensor:
    """Draw a factor for each image, (B, 1, 1, 1), between 1 - amount and 1 + amount."""
    drawn = 1 + amount * (2 * draws.uniform(name) - 1)
    return drawn.to(like.dtype)[:, :, None, None]
