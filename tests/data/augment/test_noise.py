"""Noise beside the inputs: normal, and of the sample alone."""

from __future__ import annotations

import math

import torch

from trainrun.data.augment.augmented import NamedAugmentation, augment_batches
from trainrun.data.augment.draws import Draws
from trainrun.data.augment.noise import LatentNoise
from trainrun.interfaces import batch_fields


def noise_of(indices: torch.Tensor, epoch: int = 0, seed: int = 1) -> torch.Tensor:
    batch = LatentNoise(3)(torch.zeros(len(indices), 2), Draws(seed, epoch, indices))
    return batch_fields(batch)["noise"]


def test_the_numbers_are_normal() -> None:
    values = noise_of(torch.arange(1 << 15)).double().flatten()
    n = values.numel()
    assert abs(values.mean()) * math.sqrt(n) < 4
    assert abs(values.var() - 1) * math.sqrt(n / 2) < 4
    assert abs((values**4).mean() - 3) * math.sqrt(n / 96) < 4
    assert torch.isfinite(values).all()
    ordered = values.sort().values
    expected = 0.5 * (1 + torch.erf(ordered / math.sqrt(2)))
    distance = (expected - torch.arange(1, n + 1) / n).abs().max()
    assert distance * math.sqrt(n) < 2  # Kolmogorov and Smirnov: 1.36 is 5 %


def test_a_batch_keeps_the_structure_that_it_has() -> None:
    images, labels = torch.zeros(2, 3), torch.tensor([0, 1])
    batch = LatentNoise(3)((images, labels), Draws(1, 0, torch.arange(2)))
    assert type(batch) is tuple
    assert torch.equal(batch[0], images)
    assert batch[1] is labels
    assert not batch_fields((images, labels)), "the tensors of the data set are as before"


def test_they_depend_on_seed_epoch_and_sample_alone() -> None:
    whole, other = noise_of(torch.arange(10)), torch.tensor([7, 2])
    assert torch.equal(noise_of(other), whole[other])
    assert not torch.equal(noise_of(other, epoch=1), whole[other])
    assert not torch.equal(noise_of(other, seed=2), whole[other])
    assert len(whole.flatten().unique()) == 30


def test_it_is_there_in_evaluation_too() -> None:
    named = [NamedAugmentation("data.augment.noise", LatentNoise(3), LatentNoise.random)]
    stream = object()
    assert augment_batches(stream, named, 0, False, torch.float32) is not stream  # type: ignore[arg-type]


def test_a_model_without_a_latent_dim_draws_itself() -> None:
    batch = torch.zeros(2, 2)
    assert LatentNoise(None)(batch, Draws(0, 0, torch.arange(2))) is batch
