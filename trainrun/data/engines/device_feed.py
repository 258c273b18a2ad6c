"""Move host batches to the device. On a GPU the next batch is copied while the model computes.

What: pinned memory, a copy on a separate stream, and an event for which the stream of the training waits. The host
never waits. When: CUDA, with any engine that reads on the host. On other devices batches are moved one by one, and on
a CPU nothing is moved. Source: torch.Tensor.record_stream, "CUDA semantics" of torch's documentation; NVIDIA's data
prefetchers work in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainrun.data.batch import map_leaves
from trainrun.data.engines.stream import BatchesWrapper
from trainrun.data.stream_options import Copying, Sizes
from trainrun.interfaces import Batches, MicroBatch

AHEAD = 1  # batches on their way while another is computed with


class BatchInTransfer(NamedTuple):
    """A batch that is being copied. host: the batch in pinned memory, kept until the copy is complete."""

    host: MicroBatch
    data: Any
    copied: torch.cuda.Event | None


def count_items(batch: MicroBatch, sizes: Sizes) -> MicroBatch:
    lengths = sizes(batch.data)
    return batch if lengths is None else batch._replace(items=int(lengths.sum()))


class DeviceFeed(BatchesWrapper):
    """A stream of batches on the device. It implements `Batches`. Faults and the end are raised after all earlier
    batches.

    copying: a context for each copy.
    sizes: counts the items of a batch while it is on the host.
    """

    def __init__(self, batches: Batches, device: torch.device, copying: Copying | None = None,
                 sizes: Sizes | None = None) -> None:  # fmt: skip
        super().__init__(batches)
        self._device = device
        self._copying: Copying = copying or nullcontext
        self._sizes = sizes
        self._ahead = AHEAD if device.type == "cuda" else 0
        self._stream: torch.cuda.Stream | None = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        source = self._batches.epoch(epoch, start)
        waiting: deque[BatchInTransfer] = deque()
        fault: Exception | None = None
        has_more = True
        try:
            while has_more or waiting:
                while has_more and len(waiting) <= self._ahead:
                    try:
                        batch = next(source, None)
                        batch = (
                            batch if batch is None or self._sizes is None else count_items(batch, self._sizes)
                        )
                    except Exception as error:  # raised below, once what was read before it is used
                        batch, fault = None, error
                    has_more = batch is not None
                    if batch is not None:
                        waiting.append(self._start_copy(batch))
                if waiting:
                    yield self._finish_copy(waiting.popleft())
            if fault is not None:
                raise fault
        finally:
            close = getattr(source, "close", None)
            if close is not None:  # a generator: its threads end now, not when it is collected
                close()

    def _start_copy(self, batch: MicroBatch) -> BatchInTransfer:
        if self._stream is None:
            with self._copying():
                return BatchInTransfer(batch, map_leaves(batch.data, self._move), None)
        with self._copying(), torch.cuda.stream(self._stream):
            data = map_leaves(batch.data, self._copy)
            return BatchInTransfer(batch, data, self._stream.record_event())

    def _move(self, leaf: Any) -> Any:
        return leaf.to(self._device) if hasattr(leaf, "to") else leaf

    def _copy(self, leaf: Any) -> Any:
        """Move a leaf to the device. Only tensors are moved without waiting, because other objects cannot be recorded
        on the stream.
        """
        return leaf.to(self._device, non_blocking=True) if hasattr(leaf, "record_stream") else leaf

    def _finish_copy(self, item: BatchInTransfer) -> MicroBatch:
        if item.copied is None:
            return item.host._replace(data=item.data)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(item.copied)

        def use(leaf: Any) -> Any:
            if hasattr(leaf, "record_stream"):
                leaf.record_stream(current)  # its memory is not given away while this stream still reads it
                return leaf
            return leaf.to(self._device, non_blocking=True) if hasattr(leaf, "to") else leaf

        return item.host._replace(data=map_leaves(item.data, use))


def pin_batch(data: Any) -> Any:
    """Copy a batch to page-locked memory, so that its copy to a GPU does not block the host. GPU tensors stay
    unchanged.
    """

    def pin(leaf: Any) -> Any:
        there = isinstance(leaf, Tensor) and leaf.is_cuda
        return leaf.pin_memory() if hasattr(leaf, "pin_memory") and not there else leaf

    return map_leaves(data, pin)
