"""Random numbers for the samples of a batch, each a pure function of seed, epoch, index and name.

A counter-based generator: the finalizer of SplitMix64 (Steele, Lea and Flood 2014, with the constants of
Stafford's mix 13) over `key + index * golden ratio`. A key is a BLAKE2 hash of seed, epoch, name and column,
so streams share nothing. Only integers are computed, modulo 2^64, so every device gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trainrun.randomness import derive_seed

EVERY_EPOCH = -1  # in the place of the epoch's number
LARGEST_ALPHA = 8.0
QUANTILES = 4096


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return word - (1 << 64) if word >> 63 else word


GOLDEN = signed(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


@dataclass(frozen=True)
class Draws:
    """Numbers for the samples `indices` (B,) int64; which other samples are in the batch does not matter.

    They are computed where `indices` lie, best on the host, where small tensors are cheapest, and returned
    on `device` (None: there too) without waiting for it. A name stands for one stream, and the same name
    gives the same numbers again; column j is the same for every n.
    float_dtype: what the floating-point data of the run has, for augmentations that make some.
    stream: put before every name.
    """

    seed: int
    epoch: int
    indices: Tensor
    device: torch.device | None = None
    float_dtype: torch.dtype = torch.float32
    stream: str = ""

    def named(self, name: str) -> Draws:
        """Streams of their own, for instance for one of several augmentations."""
        return replace(self, stream=f"{self.stream}{name}/")

    def of_every_epoch(self) -> Draws:
        """Streams that are the same in all epochs."""
        return replace(self, epoch=EVERY_EPOCH)

    def bits(self, name: str, n: int = 1) -> Tensor:
        """(B, n) int64, all 64 bits random, where `indices` lie."""
        stream = int.from_bytes(f"{self.stream}{name}".encode(), "big")
        keys = [derive_seed(self.seed, self.epoch, stream, column) for column in range(n)]
        x = self.indices[:, None] * GOLDEN + torch.tensor(keys, device=self.indices.device)
        x = (x ^ shifted_right(x, 30)) * MIX_1
        x = (x ^ shifted_right(x, 27)) * MIX_2
        return x ^ shifted_right(x, 31)

    def uniform(self, name: str, n: int = 1) -> Tensor:
        """(B, n) float32 in [0, 1), multiples of 2^-24."""
        return self._moved(shifted_right(self.bits(name, n), 40).float() * 2.0**-24)

    def integers(self, name: str, low: int, high: int, n: int = 1) -> Tensor:
        """(B, n) int64 in low..high-1; no value is likelier than another by more than (high - low) / 2^32."""
        assert 0 < high - low <= 2**31, f"integers from {low} below {high}: one to 2^31 values"
        return self._moved(((shifted_right(self.bits(name, n), 32) * (high - low)) >> 32) + low)

    def beta(self, name: str, alpha: float, n: int = 1) -> Tensor:
        """(B, n) float32 in [0, 1], Beta(alpha, alpha): its inverse distribution, linear between 4096 values."""
        place = shifted_right(self.bits(name, n), 40)  # 12 bits choose two values, 12 bits stand between them
        quantiles = torch.from_numpy(beta_quantiles(alpha)).to(place.device)
        cell, between = place >> 12, (place & 4095).float() / 4096
        left = quantiles[cell]
        return self._moved(left + between * (quantiles[cell + 1] - left))

    def _moved(self, numbers: Tensor) -> Tensor:
        """To the device; the host goes on at once, because the copy starts from pinned memory."""
        if self.device is None or self.device == numbers.device:
            return numbers
        if self.device.type == "cuda" and numbers.device.type == "cpu":
            return numbers.pin_memory().to(self.device, non_blocking=True)
        return numbers.to(self.device)


def shifted_right(x: Tensor, places: int) -> Tensor:
    """With zeros coming in, where torch's own shift of an int64 repeats the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


@lru_cache(maxsize=16)
def beta_quantiles(alpha: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Where Beta(alpha, alpha) has left i/4096 of its mass behind, (4097,) float32, for alpha up to 8.

    The density of s = (2 x)^alpha on the lower half is (1 - x)^(alpha - 1), up to a factor: bounded, where
    that of x has a pole for alpha < 1. It is summed up by trapezoids; the upper half mirrors the lower.
    """
    assert 0 < alpha <= LARGEST_ALPHA
    s = np.linspace(0, 1, 2**14 + 1) ** max(1.0, alpha)  # for alpha > 1 the density falls fast at 0
    x = s ** (1 / alpha) / 2
    density = (1 - x) ** (alpha - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) * np.diff(s))])
    wanted = np.linspace(0, mass[-1], QUANTILES // 2 + 1)
    lower = np.interp(wanted, mass, s) ** (1 / alpha) / 2
    return np.concatenate([lower, 1 - lower[-2::-1]]).astype(np.float32)
