"""What is known of a run before anything is tried on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainrun.config import RunConfig
from trainrun.lab.orders import Ready


@dataclass(frozen=True)
class Facts:
    """What is known of the run before anything is tried.

    step_seconds, load_seconds: of one step, and of reading the samples of one. memory_bytes: of the device.
    run_seconds: how long the whole training would take; infinite if only its user ends it.
    """

    config: RunConfig
    ready: Ready
    cores: int
    step_seconds: float
    load_seconds: float
    peak_bytes: int
    memory_bytes: int
    run_seconds: float

    @property
    def on_cpu(self) -> bool:
        return self.ready.device == "cpu"

    def has(self, *parts: str) -> bool:
        """Whether the model has a layer with such a word in its name."""
        return any(part in name for name in self.ready.layers for part in parts)


def seconds_of_run(total_steps: int | None, step_seconds: float, max_time: float | None) -> float:
    trained = math.inf if total_steps is None else total_steps * step_seconds
    return min(trained, math.inf if max_time is None else max_time)
