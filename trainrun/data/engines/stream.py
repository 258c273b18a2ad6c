"""Streams around another stream."""

from __future__ import annotations

from trainrun.interfaces import Batches


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
