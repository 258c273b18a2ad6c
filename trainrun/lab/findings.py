"""What a diagnosis measured, for the verdict, the report and the pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from trainrun.data.stages import Stages
from trainrun.lab.orders import Limits, Profiled, Ready
from trainrun.lab.statistics import Ratio

CLEAR: Final = 1.10  # a gain below that is not worth a word


@dataclass(frozen=True)
class WhatIf:
    """How much faster the whole run would be with one thing free. name: one of `trainrun.lab.verdict.CAUSES`."""

    name: str
    gain: Ratio
    about: str

    @property
    def computed(self) -> bool:
        """From seconds that are known, and not from turns."""
        return self.gain.low == self.gain.high

    @property
    def sure(self) -> bool:
        """Whether it has an interval: a single turn has none."""
        return self.computed or self.gain.pairs > 1


class Slowed(NamedTuple):
    """factor: how long a step of the untouched loop took in the end, over the beginning. account: of the ledger, where
    the difference is. flushed: whether numbers next to 0 count as 0 already."""

    factor: float
    account: str
    flushed: bool = False


UNCHANGED: Final = Slowed(1.0, "")


@dataclass(frozen=True)
class Diagnosis:
    """All that was measured. speed: items a second of the loop; step_seconds: with its share of validation and
    checkpoints. phases: seconds of forward, backward and update, from removals. load_busy: how many cores loading
    keeps busy. fused: of the optimizer. growing: the share of a step that grows with the batch. stages: of loading,
    where it costs something and reads single samples. others: cores that other processes kept busy meanwhile.
    untried: what there was no time for, in words. slowed: meanwhile."""

    ready: Ready
    speed: float
    step_seconds: float
    what_ifs: list[WhatIf]
    limits: Limits
    phases: dict[str, float]
    load_busy: float
    fused: bool = True
    growing: float = 1.0
    stages: Stages | None = None
    profiled: Profiled | None = None
    others: float = 0.0
    untried: tuple[str, ...] = ()
    slowed: Slowed = UNCHANGED
