"""Make it an error to use a whole weight after `parallel=fsdp` divided it over the ranks.

Why: `fully_shard` gives the modules new parameters. A list, a function or a view of the user that refers to an old
    parameter would compute with values that are never trained.
How: the old parameter, and its views in attributes of modules, become a `DividedWeight`, of which each use raises an
    error. The old memory is filled with NaN before it is released, so a view elsewhere makes the loss NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainrun.errors import ConfigError, PluginError
from trainrun.parallel.deferred_init import is_deferred
from trainrun.runtime.network_copy import iterate_held_objects
from trainrun.tensors import map_tree_leaves

OF_TORCH = frozenset(vars(nn.Module()))  # attributes of each module


class DividedWeight(Tensor):
    """A weight of which this rank keeps only some rows. Its shape and type can be read, and each other use is an error.

    what: the name of the weight, and of the attribute that holds a view of it.
    """

    what: str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                value = function(*args, **(kwargs or {}))
            if not isinstance(value, Tensor):
                return value
        names: list[str] = []
        map_tree_leaves(
            (args, kwargs), lambda leaf: names.append(leaf.what) if isinstance(leaf, cls) else None
        )
        raise PluginError(
            f"model: {names[0]} is read from a variable that was set before parallel=fsdp divided the weights; read "
            "the weight from its module in each forward, or use parallel=ddp"
        )


class MemoryRange(NamedTuple):
    """Where a tensor lies: its storage, and the bytes from `start` to `stop`."""

    storage: int
    start: int
    stop: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> MemoryRange:
        storage, start = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
        address = storage.data_ptr() or storage._cdata  # no two tensors without memory have one address
        return cls(address, start, start + tensor.nbytes)

    def overlaps(self, other: MemoryRange) -> bool:
        return self.storage == other.storage and max(self.start, other.start) < min(self.stop, other.stop)


def check_shared_memory(model: nn.Module) -> None:
    """Raise ConfigError for a parameter that shares memory with another parameter or a buffer."""
    params = dict(model.named_parameters())
    by_storage = defaultdict(list)
    for name, tensor in (params | dict(model.named_buffers())).items():
        place = MemoryRange.from_tensor(tensor)
        by_storage[place.storage].append((name, place))
    pairs = (pair for places in by_storage.values() for pair in combinations(places, 2))
    for (name, place), (other, other_place) in pairs:
        if place.overlaps(other_place) and (name in params or other in params):
            raise ConfigError(
                f"parallel=fsdp: {name} and {other} are two tensors in the same memory, which would be divided "
                "separately; use one parameter for both, or parallel=ddp"
            )


def find_views(model: nn.Module) -> list[tuple[Tensor, str]]:
    """Return the tensors in attributes of modules that share the memory of a parameter, each with its description."""
    params = {id(param) for param in model.parameters()}
    weights = defaultdict(list)
    for name, param in model.named_parameters():
        weights[MemoryRange.from_tensor(param).storage].append((name, MemoryRange.from_tensor(param)))
    views: list[tuple[Tensor, str]] = []
    for module_name, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
        for attribute, value in attributes.items():
            for tensor in iterate_tensors(value):
                if id(tensor) in params or tensor.layout is not torch.strided:
                    continue
                place = MemoryRange.from_tensor(tensor)
                for name, of_weight in weights[place.storage]:
                    if place.overlaps(of_weight):
                        views.append((tensor, f"{name} (by {f'{module_name}.{attribute}'.lstrip('.')})"))
    return views


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a value holds: in containers, objects and functions, but not in modules."""
    held = iterate_held_objects(value, nn.Module, Tensor)
    return (part for part in held if isinstance(part, Tensor))


@torch.no_grad()
def retire_tensor(tensor: Tensor, what: str) -> None:
    """Release the memory of a tensor, and make each use of the tensor an error."""
    if not is_deferred(tensor):
        value = torch.nan if tensor.is_floating_point() else 0
        tensor.data = tensor.new_full((), value).expand(tensor.shape)
    tensor.__class__ = DividedWeight
    tensor.what = what  # type: ignore[attr-defined]


@torch.no_grad()
def overwrite_with_nan(memory: Tensor) -> None:
    """Fill memory with NaN. Memory that is not torch's own, as of a file or of numpy, does not change."""
    if memory.is_floating_point() and memory.untyped_storage().resizable():
        memory.fill_(torch.nan)
