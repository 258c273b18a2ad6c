"""Useful tokens of the batches that are trained on: what is left of their size without the padding.

What: the positions of sequences are counted on the device, and read at log points with everything else. When: the
lengths of training samples differ, so that samples a second say little of the work done. When not: tasks whose items
are tokens count them by themselves. Gain: none in speed; a sum of a mask costs a batch about 5 us.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from trainrun.data.engines.stream import Around
from trainrun.data.sequences.collate import Collate, Packed, Padded
from trainrun.data.stream_options import TokenCounter
from trainrun.interfaces import Batches, MicroBatch, batch_fields


def count_tokens(batches: Batches, collate: Collate | None, tally: TokenCounter | None) -> Batches:
    """Return the stream, counting the real positions of batches that know which of their positions are real."""
    says = isinstance(collate, Packed) or (isinstance(collate, Padded) and bool(collate.names))
    if tally is None or not says:
        return batches
    tally.counts = True
    return Counted(batches, tally)


class Counted(Around):
    """Fills `Batches`: the same, with the positions of what is taken from it counted."""

    def __init__(self, batches: Batches, tally: TokenCounter) -> None:
        super().__init__(batches)
        self._tally = tally

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for batch in self._batches.epoch(epoch, start):
            if batch.real:
                self._tally.add(count_useful_positions(batch.data))
            yield batch


def count_useful_positions(batch: Any) -> Tensor:
    """Count the positions of a padded or packed batch that are not padding, 0-d."""
    fields = batch_fields(batch)
    mask: Tensor = fields["segment_ids"] if "segment_ids" in fields else fields["attention_mask"]
    return mask.count_nonzero()
