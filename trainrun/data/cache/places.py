"""Which samples a cache has a slot for: all of them, or a fixed and evenly spread part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

MULTIPLIERS = (
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
    0x94D049BB133111EB,
)  # of splitmix64; odd, so invertible


@dataclass(frozen=True)
class Places:
    """A sample's slot is its place in a fixed shuffle of 0..num_samples-1; the first num_slots are kept.

    The shuffle is a hash that is one to one on the next power of two, repeated until it falls inside, so
    no table is needed.
    """

    num_samples: int
    num_slots: int

    def slot(self, index: int) -> int | None:
        """None where the sample is never kept."""
        if self.num_slots == self.num_samples:
            return index
        place = self._mixed(index)
        while place >= self.num_samples:
            place = self._mixed(place)
        return place if place < self.num_slots else None

    def _mixed(self, value: int) -> int:
        mask, shift = self._mask_and_shift
        for multiplier in MULTIPLIERS:
            value = ((value + 1) * multiplier) & mask
            value ^= value >> shift
        return value

    @cached_property
    def _mask_and_shift(self) -> tuple[int, int]:
        bits = max(1, (self.num_samples - 1).bit_length())
        return (1 << bits) - 1, (bits + 1) // 2
