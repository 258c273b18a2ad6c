"""Find the blocks of a model: parts that are computed one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

# For their backward they save their result, which the next layer saves as its input, or nothing.
SAVE_NOTHING_MORE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Flatten, nn.Unflatten, nn.Identity)


class ModelBlock(NamedTuple):
    """A block of a model.

    owner: the module that is called. layers: neighbouring layers of the Sequential `owner`; empty if the block is
        the whole owner.
    start: the position of the first layer in the Sequential.
    """

    owner: nn.Module
    layers: tuple[nn.Module, ...] = ()
    start: int = 0


def model_blocks(model: nn.Module) -> list[ModelBlock]:
    """Return the blocks in the order of the model. Each occurs once, and no block is inside another.

    A block is a child of a ModuleList or Sequential that has layers of its own and siblings of its class. In a
    Sequential without a custom forward, a layer with weights and the simple layers after it are also a block.
    """
    return list(dict.fromkeys(_blocks(model)))


def _blocks(module: nn.Module) -> Iterator[ModelBlock]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        yield from _sequential_blocks(module)
        return
    repeated = _repeated_classes(module) if isinstance(module, nn.ModuleList | nn.Sequential) else set()
    for child in module.children():
        if type(child) in repeated:
            yield ModelBlock(child)
        else:
            yield from _blocks(child)


Forward = Callable[..., Any]


def wrap_blocks(blocks: list[ModelBlock], wrap: Callable[[Forward, tuple[nn.Module, ...]], Forward]) -> None:
    """Replace the forward of every block in place; names and modules stay.

    wrap: called with the forward and the modules that it uses; returns the new forward.
    """
    chains: dict[nn.Module, list[Forward]] = {}
    for owner, layers, start in reversed(blocks):
        if layers:
            steps = chains.setdefault(owner, list(cast(nn.Sequential, owner)))
            steps[start : start + len(layers)] = [wrap(Chain(layers), layers)]
        else:
            owner.forward = wrap(owner.forward, (owner,))
    for sequential, steps in chains.items():
        sequential.forward = Chain(steps)


class Chain:
    """Functions that are called one after the other, like torch.nn.Sequential."""

    def __init__(self, steps: Sequence[Forward]) -> None:
        self._steps = steps

    def __call__(self, input: Any) -> Any:
        for step in self._steps:
            input = step(input)
        return input


def _sequential_blocks(sequential: nn.Sequential) -> Iterator[ModelBlock]:
    repeated = _repeated_classes(sequential)
    run: list[nn.Module] = []
    for position, layer in enumerate(sequential):
        composite = next(layer.children(), None) is not None
        if composite or _has_weights(layer):
            yield from _worthwhile_blocks(sequential, run, position)
            run = []
        if composite and type(layer) not in repeated:
            yield from _blocks(layer)
        elif composite or run or _has_weights(layer):
            run.append(layer)  # else: a simple layer before any with weights, left as it is
    yield from _worthwhile_blocks(sequential, run, len(sequential))


def _worthwhile_blocks(sequential: nn.Sequential, run: list[nn.Module], end: int) -> Iterator[ModelBlock]:
    """Yield the layers as a block if recomputing them saves more memory than their input and output take."""
    worthy_layers = [layer for layer in run[1:] if not isinstance(layer, SAVE_NOTHING_MORE)]
    if worthy_layers or (run and next(run[0].children(), None) is not None):
        yield ModelBlock(sequential, tuple(run), end - len(run))


def _repeated_classes(container: nn.Sequential | nn.ModuleList) -> set[type[nn.Module]]:
    """Return the classes of which several children have layers of their own. A child that is used twice counts
    twice.
    """
    children = (child for child in container if child is not None)  # which a ModuleList may hold
    kinds = Counter(type(child) for child in children if next(child.children(), None) is not None)
    return {kind for kind, number in kinds.items() if number > 1}


def _has_weights(layer: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in layer.parameters(recurse=False))
