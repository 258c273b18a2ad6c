"""Save the state that steps change and restore it, so that all compared turns start with the same numbers.

What: weights, buffers, averages, and the states of optimizer and precision. They are copied back into the same
    memory, because captured graphs contain the addresses. Plain numbers, random states and the position in the data
    are not restored.
When: before each turn. When not: a second copy does not fit into the memory of some rank, or the memory itself is
    measured.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from trainrun.checkpoint.save import count_bytes
from trainrun.runtime.machine import read_free_bytes
from trainrun.training.components import Components

MAX_DEPTH: Final = 16  # of what an optimizer keeps: a tree that holds itself has no end
MOST_OF_FREE: Final = 0.25  # of the free memory for one copy: several runs stand at once
SMALL_BYTES: Final = 32 * 2**20  # always fits


class StateCopy(NamedTuple):
    tensors: dict[str, Tensor]
    precision: dict[str, Any]


class StateSnapshot:
    """A saved state of one rank's run."""

    def __init__(self, run: Components) -> None:
        self._components = run
        self._start: StateCopy | None = None
        self._fits: bool | None = None
        self._bytes = self._peak_before = 0

    def restart(self) -> None:
        """Restore the state of the first call. If state was added since that call, save the current state instead."""
        tensors = state_tensors(self._components)
        if not self._has_room(tensors):
            return
        if self._start is not None and self._start.tensors.keys() == tensors.keys():
            self._copy_back(self._start)
        else:
            self._start = self._copy(tensors)

    def restore(self) -> None:
        """Restore weights and averages as of the last `restart`. State that appeared since then stays."""
        if self._start is not None:
            self._copy_back(self._start)

    def peak_bytes(self, device: torch.device) -> int:
        """Return the peak memory of the device, or of this process on a CPU, without the copies."""
        if device.type == "cuda":
            return max(torch.cuda.max_memory_allocated(device) - self._bytes, 0)
        return max(peak_rss() - self._bytes, self._peak_before)

    def _has_room(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a copy fits into memory. It is decided once, and is the same on all ranks."""
        if self._fits is None:
            size, parallel = count_bytes(tensors), self._components.parallel
            free = MOST_OF_FREE * read_free_bytes(parallel.device) / parallel.local_world_size
            self._fits = all(parallel.gather(size < SMALL_BYTES or size < free))
        return self._fits

    def _copy(self, tensors: Mapping[str, Tensor]) -> StateCopy:
        if not self._bytes:
            self._peak_before = peak_rss()
        self._bytes = max(self._bytes, count_bytes(tensors))
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        return StateCopy(copies, self._components.precision.state_dict())

    def _copy_back(self, copy: StateCopy) -> None:
        """Copy back the state that still has the same shape. State that appeared since then stays."""
        with torch.no_grad():
            for name, tensor in state_tensors(self._components).items():
                if is_same_form(old := copy.tensors.get(name), tensor):
                    tensor.copy_(old)
        self._components.precision.load_state_dict(copy.precision)


def state_tensors(run: Components) -> dict[str, Tensor]:
    """Return all tensors that a step may change, by their path in the state. Nothing is copied."""
    state = {
        "weights": dict(run.model.named_parameters()),
        "buffers": dict(run.model.named_buffers()),
        "average": {} if run.ema is None else run.ema.state_dict(),
        "optimizer": list(run.optimizer.state.values()),
        "precision": run.precision.state_dict(),
    }
    return dict(_leaves(state, "", MAX_DEPTH))


def _leaves(tree: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        if is_ordinary(tree):
            yield path, tree.detach()
    elif isinstance(tree, Mapping | list | tuple) and depth:
        for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(value, f"{path}/{name}", depth - 1)


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor can be copied and restored: not lazy, sparse, nested, quantized, expanded or a
    subclass.
    """
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    odd = (
        tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
    )
    expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return type(tensor.detach()) is Tensor and not odd and not expanded


def is_same_form(copy: Tensor | None, tensor: Tensor) -> TypeGuard[Tensor]:
    return copy is not None and (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
