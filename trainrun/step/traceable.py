"""Whether an optimizer's update can become part of a graph by now, and whether it can at all.

A graph gives the update other tensors than those the optimizer was built with, and knows of it only what is in its
groups and its state. What an optimizer keeps elsewhere would stand still in a graph, or the weights would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainrun.errors import PluginError
from trainrun.step.body import compiling, shadow_of, update

SCOPE = "trainer.compile.scope=step"
WAY_OUT = "use trainer.compile.scope=model, or trainer.cuda_graphs=false"


def is_ready(optimizer: Optimizer, again: bool = True) -> bool:
    """Whether the optimizer has the state it will have; it makes it in its first, plain step.

    Asked of a copy of one parameter of each group that takes a step, so a stateless one is ready at once.
    again: it has taken a plain step since it was asked before, so whatever it makes once is made.
    PluginError: it is not of its groups and its state alone, and a graph would not do what it does.
    """
    name = type(optimizer).__name__
    probes = [torch.zeros_like(group["params"][0]).detach() for group in optimizer.param_groups]
    for probe in probes:
        probe.grad = torch.zeros_like(probe)
    rates = [torch.full((), 0.1, device=probe.device) for probe in probes]
    other = shadow_of(optimizer, [[probe] for probe in probes], {}, rates)
    before = own_values(other)
    try:
        with compiling(), Touched() as touched:
            update(other)
    except (RuntimeError, TypeError) as error:  # TypeError: its step needs more than the gradients
        first = str(error).partition("\n")[0]
        raise PluginError(f"{SCOPE}: {name} cannot be part of a graph ({first}); {WAY_OUT}") from error
    if not all(touched.reaches(probe) for probe in probes):
        raise PluginError(
            f"{SCOPE}: {name} updates no other parameters than those it was built with, and a graph has others; "
            f"{WAY_OUT}"
        )
    if moved := changed(before, own_values(other)):
        if not again:
            return False
        raise PluginError(
            f"{SCOPE}: {name} keeps {moved[0]} beside its state and changes it, which a graph would not; {WAY_OUT}"
        )
    for probe, group in zip(probes, optimizer.param_groups, strict=True):
        wanted = {key for key, value in other.state.get(probe, {}).items() if isinstance(value, Tensor)}
        if wanted and not any(wanted <= set(optimizer.state.get(param, {})) for param in group["params"]):
            return False
    return True


class Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The memory of all tensors that operations were given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._places.update(leaf.untyped_storage().data_ptr() for leaf in given)
        return func(*args, **(kwargs or {}))

    def reaches(self, probe: Tensor) -> bool:
        """Whether the parameter or its gradient was among them; one without elements is nowhere."""
        places = {tensor.untyped_storage().data_ptr() for tensor in (probe, probe.grad) if tensor is not None}
        return not probe.numel() or not places.isdisjoint(self._places)


def own_values(optimizer: Optimizer) -> dict[str, list[tuple[Any, int]]]:
    """By name, the numbers and tensors that the optimizer keeps besides its state, and the tensors' versions."""
    kept = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    found = {key: values_in(value) for key, value in kept.items()}
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"{key} of group {i}": values_in(value) for key, value in group.items() if key != "params"}
    return found


def values_in(tree: Any) -> list[tuple[Any, int]]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, (Tensor, int, float))]
    return [(leaf, leaf._version if isinstance(leaf, Tensor) else 0) for leaf in leaves]


def changed(before: dict[str, list[tuple[Any, int]]], after: dict[str, list[tuple[Any, int]]]) -> list[str]:
    """The names whose values are others now, or new."""

    def same(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
        if isinstance(one[0], Tensor) or isinstance(other[0], Tensor):
            return one[0] is other[0] and one[1] == other[1]
        return bool(one[0] == other[0])

    return [
        name
        for name, values in after.items()
        if len(values) != len(before.get(name, [])) or not all(map(same, values, before.get(name, [])))
    ]
