"""A random problem that a model can learn, to try out speed and settings without data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainrun.data.order.sampler import check_split
from trainrun.data.tensor_dataset import Arrays
from trainrun.limits import Count, NotNegative
from trainrun.seeding import derive_seed

SPLITS = ("train", "val", "test")


def load(split: str, num_samples: Count = 1024, shape: Sequence[Count] = (16,), num_classes: Count | None = 4,
         seed: int = 0, noise: NotNegative = 1.0) -> Arrays:  # fmt: skip
    """Return inputs (N, *shape) float32 with targets. The same arguments always give the same numbers.

    With num_classes, each class has equally many samples. A sample is the prototype of its class plus noise, with an
    int64 label. With num_classes=None, the target (N, 1) float32 is a linear function of the input plus noise.
    """
    check_split(split, SPLITS)
    problem = torch.Generator().manual_seed(derive_seed(seed, 0))  # shared by the splits
    generator = torch.Generator().manual_seed(derive_seed(seed, 1 + SPLITS.index(split)))
    inputs = torch.randn(num_samples, *shape, generator=generator)
    if num_classes is None:
        weight = torch.randn(inputs[0].numel(), 1, generator=problem) / inputs[0].numel() ** 0.5
        error = noise * torch.randn(num_samples, 1, generator=generator)
        return Arrays((inputs, inputs.flatten(1) @ weight + 0.1 * error))
    prototypes = torch.randn(num_classes, *shape, generator=problem)
    labels = torch.arange(num_samples) % num_classes
    return Arrays((prototypes[labels] + noise * inputs, labels), num_classes=num_classes)
