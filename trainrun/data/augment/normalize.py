"""Convert uint8 images to floats of mean 0 and deviation 1 on the device. Memory and copies stay four times
smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainrun.data.augment.draws import Draws
from trainrun.data.augment.images import get_images, replace_images
from trainrun.errors import ConfigError, DataError
from trainrun.limits import Number, Positive


class Normalize:
    """Compute (pixel - mean) / std per channel, for pixels between 0 and 1. It is applied in evaluation too.

    uint8 images are divided by 255 first and get the floating-point type of the run. Floating-point images are not
    divided and keep their type. mean, std: one number, or one for every channel.
    """

    random = False

    def __init__(self, mean: Number | Sequence[Number], std: Positive | Sequence[Positive]) -> None:
        self.mean, self.std = (
            tuple(number) if isinstance(number, Sequence) else (number,) for number in (mean, std)
        )
        if len(self.mean) != len(self.std):
            raise ConfigError(f"std={std}: {len(self.std)} values, but mean has {len(self.mean)}")
        self._constants: dict[tuple[torch.device, torch.dtype, bool], tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Any, draws: Draws) -> Any:
        images = get_images(batch)
        are_bytes = images.dtype is torch.uint8
        if not are_bytes and not images.is_floating_point():
            raise DataError(f"needs uint8 or floating-point images, not {images.dtype}")
        if len(self.mean) not in (1, images.shape[1]):
            raise DataError(
                f"mean has {len(self.mean)} values, but the images have {images.shape[1]} channels"
            )
        dtype = draws.float_dtype if are_bytes else images.dtype
        mean, scale = self._move_constants(images.device, dtype, are_bytes)
        return replace_images(batch, torch.sub(images, mean).mul_(scale))  # uint8 minus a float is a float

    def _move_constants(self, device: torch.device, dtype: torch.dtype, whole: bool) -> tuple[Tensor, Tensor]:
        """Return mean and 1 / deviation in units of the pixels, (C, 1, 1), on a device. They are copied once."""
        if (device, dtype, whole) not in self._constants:
            unit = 255 if whole else 1
            mean = torch.tensor([unit * value for value in self.mean], dtype=dtype, device=device)
            scale = torch.tensor([1 / (unit * value) for value in self.std], dtype=dtype, device=device)
            self._constants[device, dtype, whole] = mean[:, None, None], scale[:, None, None]
        return self._constants[device, dtype, whole]
