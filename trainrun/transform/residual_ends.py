"""`model.init=zero-gamma`: every residual branch that ends in a norm begins as nothing: that norm's weight is zero.

When: deep residual networks from nothing, which begin as shallow ones. When not: pretrained weights, which it spoils.
How: torch.fx makes a graph of each module that it can follow, and a norm is taken where it is added to what its branch
began with, so none without a shortcut beside it, where zeros would end all learning.
Source: Goyal et al. 2017, arXiv:1706.02677, section 5.1.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator

import torch
from torch import fx, nn

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
PASSED = (nn.Identity, nn.Dropout, nn.Dropout2d)  # an activation would have no slope at zero


def zero_gammas(model: nn.Module) -> None:
    """Raises ValueError if there is none."""
    if not (norms := last_norms(model)):
        raise ValueError(
            f"model.init=zero-gamma: {type(model).__name__} has no residual branch that ends in a norm with a weight "
            "(that torch.fx finds); use model.init=he"
        )
    for name in norms:
        nn.init.zeros_(model.get_submodule(name).weight)  # type: ignore[arg-type]


def last_norms(model: nn.Module) -> set[str]:
    """The norms at the ends of residual branches, as the graphs of those modules show that torch.fx can follow."""
    found = set()
    copied = copy.deepcopy(model)  # a forward that is followed may write into its module
    for name, module in copied.named_modules():
        layers = dict(module.named_modules())
        if not any(map(is_norm, layers.values())) or is_norm(module):
            continue
        try:
            graph = fx.symbolic_trace(module).graph
        except Exception:  # what depends on the values is not followed: its parts may be
            continue
        found |= {f"{name}.{norm}".removeprefix(".") for norm in norms_before_additions(graph, layers)}
    return found


def norms_before_additions(graph: fx.Graph, layers: dict[str, nn.Module]) -> Iterator[str]:
    """Those added to what their branch began with, or to that after a shorter branch."""
    before: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        before[node] = {node}.union(*(before[given] for given in node.all_input_nodes))
        sides = [side for side in node.args[:2] if isinstance(side, fx.Node)]
        if node.target not in ADDITIONS or len(sides) < 2:
            continue
        for side, other in (sides, sides[::-1]):
            while isinstance(layer_of(side, layers), PASSED):
                side = side.all_input_nodes[0]
            length = 0
            while other.op == "call_module" and other not in before[side]:
                other, length = other.all_input_nodes[0], length + 1
            longer = sum(each.op == "call_module" for each in before[side] - before[other]) > length
            if longer and other in before[side] and is_norm(layer_of(side, layers)):
                yield str(side.target)


def layer_of(node: fx.Node, layers: dict[str, nn.Module]) -> nn.Module | None:
    return layers[str(node.target)] if node.op == "call_module" else None


def is_norm(layer: nn.Module | None) -> bool:
    return "Norm" in type(layer).__name__ and isinstance(getattr(layer, "weight", None), nn.Parameter)
