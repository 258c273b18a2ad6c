"""Where a model is made of blocks: the pieces that can be treated one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

# For their backward they save their result, which the next layer saves as its input, or nothing.
SAVE_NOTHING_MORE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Flatten, nn.Unflatten, nn.Identity)


class ModelBlock(NamedTuple):
    """owner: what is called. layers: None for its whole forward, else a run of layers of this Sequential."""

    owner: nn.Module
    layers: list[nn.Module] | None = None


def blocks_of(module: nn.Module) -> Iterator[ModelBlock]:
    """In the order of the model; none inside of another.

    Children of a ModuleList or a Sequential that have layers of their own and are not the only ones of their
    class; and in a Sequential, a layer with weights together with the simple ones that follow it.
    """
    if isinstance(module, nn.Sequential):
        yield from _runs(module)
        return
    repeated = _repeated(module) if isinstance(module, nn.ModuleList) else set()
    for child in module.children():
        if type(child) in repeated:
            yield ModelBlock(child)
        else:
            yield from blocks_of(child)


Forward = Callable[..., Any]


def wrap_blocks(blocks: list[ModelBlock], wrap: Callable[[Forward, list[nn.Module]], Forward]) -> None:
    """Replace the forward of every block, in place; names and modules stay.

    wrap: given the forward, and the modules it uses.
    """
    runs: dict[nn.Module, dict[int, tuple[Forward, list[nn.Module]]]] = {}
    for block in blocks:
        if block.layers is None:
            block.owner.forward = wrap(block.owner.forward, [block.owner])
        else:
            wrapped = wrap(Chain(list(block.layers)), block.layers)
            runs.setdefault(block.owner, {})[id(block.layers[0])] = wrapped, block.layers
    for sequential, starts in runs.items():
        inside = {id(layer) for _, layers in starts.values() for layer in layers}
        sequential.forward = Chain(
            [
                starts[id(layer)][0] if id(layer) in starts else layer
                for layer in sequential.children()
                if id(layer) in starts or id(layer) not in inside
            ]
        )


class Chain:
    """One after the other, as torch.nn.Sequential does it."""

    def __init__(self, steps: list[Forward]) -> None:
        self._steps = steps

    def __call__(self, input: Any) -> Any:
        for step in self._steps:
            input = step(input)
        return input


def _runs(sequential: nn.Sequential) -> Iterator[ModelBlock]:
    repeated = _repeated(sequential)
    run: list[nn.Module] = []
    for layer in sequential:
        composite = next(layer.children(), None) is not None
        if composite or _has_weights(layer):
            yield from _worthy(sequential, run)
            run = []
        if composite and type(layer) not in repeated:
            yield from blocks_of(layer)
        elif composite or run or _has_weights(layer):
            run.append(layer)  # else: a simple layer before any with weights, left as it is
    yield from _worthy(sequential, run)


def _worthy(sequential: nn.Sequential, run: list[nn.Module]) -> Iterator[ModelBlock]:
    """The run, where computing it again forgets more than its own input and output."""
    more = [layer for layer in run[1:] if not isinstance(layer, SAVE_NOTHING_MORE)]
    if more or (run and next(run[0].children(), None) is not None):
        yield ModelBlock(sequential, run)


def _repeated(container: nn.Module) -> set[type[nn.Module]]:
    """Classes of several children that have layers of their own."""
    kinds = Counter(type(child) for child in container.children() if next(child.children(), None) is not None)
    return {kind for kind, number in kinds.items() if number > 1}


def _has_weights(layer: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in layer.parameters(recurse=False))
