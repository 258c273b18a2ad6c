"""Trials that leave no trace in a run: on copies of model and task, or on the model itself with everything put back.

when: `stand_ins` where weights' worth of memory is free and Python attributes may change; `snapshot` where the real
    tensors have to take part. Both leave gradients to their user. What every step keeps for its own repetition is
    `trainrun.training.recovery.step_snapshot`, which must cost next to nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainrun.interfaces import Batches
from trainrun.runtime.machine import free_bytes
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


@contextmanager
def snapshot(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Put back buffers and the random states of this process at the end; with an optimizer, also the weights that it
    changes and its own state. Tensors keep their memory."""
    weights = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(weight, weight.detach().clone()) for weight in weights]
    buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()]
    state = None if optimizer is None else copy_of_state(optimizer)
    with kept_random_state():
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, contents in kept:
                    weight.copy_(contents)
                for name, buffer, contents in buffers:
                    put_back(model, name, buffer, contents)
                if optimizer is not None and state is not None:
                    restore_state(optimizer, *state)


State = tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]


def copy_of_state(optimizer: Optimizer) -> State:
    """The entries of each weight, a tensor with a copy of its contents; the options of each group."""
    entries = {
        weight: {
            key: (value, value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value))
            for key, value in own.items()
        }
        for weight, own in optimizer.state.items()
    }
    options = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return entries, copy.deepcopy(options)


def restore_state(
    optimizer: Optimizer, entries: dict[Any, dict[str, Any]], options: list[dict[str, Any]]
) -> None:
    """Undo all changes since `copy_of_state`; entries that were made since are removed."""
    optimizer.state.clear()
    for weight, own in entries.items():
        optimizer.state[weight] = {
            key: value.copy_(contents) if isinstance(value, Tensor) else contents
            for key, (value, contents) in own.items()
        }
    for group, before in zip(optimizer.param_groups, options, strict=True):
        group.update(before)


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
    model, task = copy.deepcopy((model, task))
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.eval()  # or it would wait for the other ranks in every forward
    return model, task
