"""Trials that leave no trace in a run: on copies of model and task, or on the model itself with everything put back.

when: `stand_ins` where weights' worth of memory is free and Python attributes may change; `snapshot` where the real
    tensors have to take part. Both leave gradients to their user. What every step keeps for its own repetition is
    `trainrun.training.recovery.step_snapshot`, which must cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from trainrun.interfaces import Batches, MicroBatch
from trainrun.runtime.machine import free_bytes
from trainrun.runtime.model_copy import copied
from trainrun.seeding import kept_random_state
from trainrun.training.recovery.put_back import put_back

LARGE_MODEL = 2**31  # bytes; a host takes half a second to copy them


def first_batches(batches: Batches, count: int = 1, epoch: int = 0, start: int = 0) -> list[Any]:
    """The data of batches from `start` on; what was opened to read them is closed."""
    opened = batches.epoch(epoch, start)
    try:
        return [batch.data for batch in islice(opened, count)]
    finally:
        getattr(opened, "close", lambda: None)()


def endless(batches: Batches, place: list[int]) -> Generator[MicroBatch]:
    """Those from `place` on, an epoch and the number of a batch, which moves along; as above, closed at the end."""
    while True:
        epoch, start = place
        found = batches.epoch(epoch, start)
        try:
            for number, batch in enumerate(found, start + 1):
                place[:] = (epoch + 1, 0) if batch.last else (epoch, number)
                yield batch
        finally:
            getattr(found, "close", lambda: None)()
        place[:] = epoch + 1, 0


@contextmanager
def snapshot(model: nn.Module) -> Iterator[None]:
    """Put back buffers and the random states of this process at the end. Tensors keep their memory."""
    buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()]
    with kept_random_state():
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer, contents in buffers:
                    put_back(model, name, buffer, contents)


def copy_obstacle(model: nn.Module, device: torch.device) -> str:
    """Why the model cannot be copied for a trial; "" if it can."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        return "the model has layers whose shape is not known yet"
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > LARGE_MODEL and device.type == "cpu":
        return "copying the model would take too long"
    return "the model fills the memory" if 4 * size > free_bytes(device) else ""


def stand_ins(model: nn.Module, task: Any) -> tuple[nn.Module, Any]:
    """Copies of model and task, sharing what those share. A compiled model's copy is not compiled."""
    model, task = copied((model, task), model)
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.eval()  # or it would wait for the other ranks in every forward
    return model, task
