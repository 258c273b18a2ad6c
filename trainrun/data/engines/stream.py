"""What streams have in common: those that follow a plan, and those that are another stream with a difference."""

from __future__ import annotations

from trainrun.data.order.sampler import StreamPlan
from trainrun.interfaces import Batches


class Planned:
    """Base of `Batches` whose sizes come from a plan."""

    _plan: StreamPlan

    @property
    def num_batches(self) -> int | None:
        return self._plan.num_batches

    @property
    def num_samples(self) -> int | None:
        return self._plan.num_seen


class Around:
    """Base of `Batches` around another stream, whose sizes it reports and which it closes."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    @property
    def num_batches(self) -> int | None:
        return self._batches.num_batches

    @property
    def num_samples(self) -> int | None:
        return self._batches.num_samples

    def close(self) -> None:
        self._batches.close()
