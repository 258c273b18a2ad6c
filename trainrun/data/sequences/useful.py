"""Useful tokens of the batches that are trained on: what is left of their size without the padding.

What: the positions of sequences are counted on the device, and read at log points with everything else. When: the
lengths of training samples differ, so that samples a second say little of the work done. When not: tasks whose items
are tokens count them by themselves. Gain: none in speed; a sum of a mask costs a batch about 5 us.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from trainrun.data.sequences.collate import Collate, Packed, Padded
from trainrun.data.stream import Around
from trainrun.interfaces import Batches, MicroBatch


class Tally:
    """Positions since the last look, of this rank. counts: whether any stream is counted by it. padding: what its plan
    says of a whole epoch, as in `SequencePlan`."""

    def __init__(self) -> None:
        self.counts = False
        self.padding: Mapping[str, float] = {}
        self._sum: Tensor | None = None

    def add(self, positions: Tensor) -> None:
        self._sum = positions if self._sum is None else self._sum + positions

    def take(self) -> float:
        """Waits for the device."""
        found, self._sum = self._sum, None
        return 0.0 if found is None else float(found)


def counted(batches: Batches, collate: Collate | None, tally: Tally | None) -> Batches:
    """The stream, told to the tally where every batch says which of its positions are real."""
    says = isinstance(collate, Packed) or (isinstance(collate, Padded) and bool(collate.names))
    if tally is None or not says:
        return batches
    tally.counts = True
    return Counted(batches, tally)


class Counted(Around):
    """Fills `Batches`: the same, with the positions of what is taken from it counted."""

    def __init__(self, batches: Batches, tally: Tally) -> None:
        super().__init__(batches)
        self._tally = tally

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for batch in self._batches.epoch(epoch, start):
            if batch.real:
                self._tally.add(useful_positions(batch.data))
            yield batch


def useful_positions(batch: Mapping[str, Any]) -> Tensor:
    """0-d: the places of a padded or packed batch that are no padding."""
    return _marked(batch).count_nonzero()


def number_of_positions(batch: Any) -> int:
    """All places of a padded or packed batch; 0 of one that says nothing of them."""
    found = isinstance(batch, Mapping) and ("segment_ids" in batch or "attention_mask" in batch)
    return _marked(batch).numel() if found else 0


def _marked(batch: Mapping[str, Any]) -> Tensor:
    """Not 0 where something is."""
    mask: Tensor = batch["segment_ids"] if "segment_ids" in batch else batch["attention_mask"]
    return mask
