"""Random numbers for the samples of a batch. Each is a pure function of seed, epoch, index and name.

A counter-based generator: the finalizer of SplitMix64 (Steele, Lea and Flood 2014, with the constants of Stafford's
mix 13) over `key + index * golden ratio`. A key is a BLAKE2 hash of seed, epoch, name and column, so streams are
independent. Only integers are computed, modulo 2^64, so every device gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.order.permutation import STEP, Words, mix_words
from trainrun.seeding import derive_seed

EVERY_EPOCH = -1  # in the place of the epoch's number
QUANTILES = 4096


@dataclass(frozen=True)
class Draws:
    """Random numbers for the samples `indices` (B,) int64. They do not depend on the other samples of the batch.

    They are computed on the host with NumPy, which takes a quarter of torch's time for so few numbers. They are
    copied to `device` (None: that of `indices`) without waiting for it. A name selects a stream, and the same name
    gives the same numbers again. Column j is the same for every n.
    float_dtype: the floating-point type of the run.
    stream: a prefix of every name. number: the number of samples. The index of a repeated sample is increased by
        it.
    """

    seed: int
    epoch: int
    indices: Tensor
    device: torch.device | None = None
    float_dtype: torch.dtype = torch.float32
    stream: str = ""
    number: int | None = None

    def derive(self, name: str) -> Draws:
        """Return draws with separate random streams, for example for one of several augmentations."""
        return replace(self, stream=f"{self.stream}{name}/")

    def ignore_epoch(self) -> Draws:
        """Return draws whose streams are the same in all epochs."""
        return replace(self, epoch=EVERY_EPOCH)

    def numbers(self) -> Tensor:
        """Return the sample numbers, (B,) int64 on `device`."""
        numbers = self.indices.cpu().numpy()
        return self._copy_to_device(numbers if self.number is None else numbers % self.number)

    def words(self, name: str, n: int = 1) -> Words:
        """Draw (B, n) words of 64 random bits."""
        stream = int.from_bytes(f"{self.stream}{name}".encode(), "big")
        keys = np.array(sample_keys(self.seed, self.epoch, stream, n), np.uint64)
        x = self.indices.cpu().numpy().astype(np.uint64)[:, None] * np.uint64(STEP) + keys
        return mix_words(x)

    def bits(self, name: str, n: int = 1) -> Tensor:
        """Draw (B, n) int64 with 64 random bits each, the same on the host."""
        return torch.from_numpy(self.words(name, n).view(np.int64))

    def uniform(self, name: str, n: int = 1) -> Tensor:
        """Draw (B, n) float32 in [0, 1), multiples of 2^-24."""
        return self._copy_to_device((self.words(name, n) >> 40).astype(np.float32) * np.float32(2.0**-24))

    def normal(self, name: str, n: int = 1) -> Tensor:
        """Draw (B, n) of `float_dtype` with mean 0 and variance 1: the inverse distribution at 2^24 points, up to
        5.4.
        """
        places = torch.from_numpy(((self.words(name, n) >> 40).astype(np.float64) + 0.5) * 2.0**-24)
        return self._copy_to_device(torch.special.ndtri(places).to(self.float_dtype).numpy())

    def integers(self, name: str, low: int, high: int, n: int = 1) -> Tensor:
        """Draw (B, n) int64 in low..high-1. Probabilities differ by at most (high - low) / 2^32."""
        assert 0 < high - low <= 2**31, f"integers from {low} below {high}: one to 2^31 values"
        scaled = ((self.words(name, n) >> 32) * np.uint64(high - low)) >> 32
        return self._copy_to_device(scaled.astype(np.int64) + low)

    def beta(self, name: str, alpha: float, n: int = 1) -> Tensor:
        """Draw (B, n) float32 in [0, 1] of Beta(alpha, alpha): the inverse distribution, linear between 4096
        values.
        """
        place = self.words(name, n) >> 40  # 12 bits choose two values, 12 bits stand between them
        quantiles = compute_beta_quantiles(alpha)
        cell, between = (place >> 12).astype(np.int64), (place & 4095).astype(np.float32) / np.float32(4096)
        left = quantiles[cell]
        return self._copy_to_device(left + between * (quantiles[cell + 1] - left))

    def _copy_to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Copy an array to the device from pinned memory, so that the host does not wait."""
        numbers, device = torch.from_numpy(array), self.device or self.indices.device
        if device.type == "cpu":
            return numbers
        if device.type == "cuda":
            return numbers.pin_memory().to(device, non_blocking=True)
        return numbers.to(device)


@lru_cache(maxsize=64)
def sample_keys(seed: int, epoch: int, stream: int, n: int) -> tuple[int, ...]:
    """Return a key for each of n columns. The keys are the same for all samples of an epoch."""
    return tuple(derive_seed(seed, epoch, stream, column) for column in range(n))


@lru_cache(maxsize=16)
def compute_beta_quantiles(alpha: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the quantiles i/4096 of Beta(alpha, alpha), (4097,) float32, for alpha up to 8.

    On the lower half, the density of s = (2 x)^alpha is (1 - x)^(alpha - 1), up to a factor. It is bounded, while
    the density of x has a pole for alpha < 1. It is integrated by trapezoids. The upper half mirrors the lower
    half.
    """
    assert 0 < alpha <= 8
    s = np.linspace(0, 1, 2**14 + 1) ** max(1.0, alpha)  # for alpha > 1 the density falls fast at 0
    x = s ** (1 / alpha) / 2
    density = (1 - x) ** (alpha - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) * np.diff(s))])
    wanted = np.linspace(0, mass[-1], QUANTILES // 2 + 1)
    lower = np.interp(wanted, mass, s) ** (1 / alpha) / 2
    return np.concatenate([lower, 1 - lower[-2::-1]]).astype(np.float32)
