"""Which channels of a network go together: those of layers that are added to each other, normed or convolved alone.

The graph of `torch.export` is read once, from the inputs on. Each result is known by the group of its channels, or is
nobody's; what mixes channels, or gives them out, fixes the groups that go into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.export.served import suppress_output
from trainrun.transform.int8 import untied_layers

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.RMSNorm)
# operations of a graph that keep every channel by itself
KEEPS = {
    "relu", "relu_", "gelu", "silu", "silu_", "sigmoid", "tanh", "leaky_relu", "leaky_relu_", "elu", "elu_", "hardtanh",
    "hardtanh_", "hardswish", "hardswish_", "hardsigmoid", "dropout", "dropout_", "contiguous", "clone",
    "to", "_to_copy",
}  # fmt: skip
POOLS = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"}
PAIRS = {"add", "add_", "sub", "mul", "mul_", "div"}
SHAPES = {"flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"}


class Channels:
    """Channels that stay or go together. writers: layers whose outputs they are; along: norms and depthwise
    convolutions; readers: layers, with their inputs for each channel. why: what keeps all of them, or nothing."""

    def __init__(self, writers: Sequence[str], why: str = "") -> None:
        self.writers, self.why = list(writers), why
        self.along: list[str] = []
        self.readers: list[tuple[str, int]] = []
        self.joined: Channels | None = None

    def root(self) -> Channels:
        return self if self.joined is None else self.joined.root()

    def join(self, other: Channels) -> None:
        """Merge the group with another."""
        here, there = self.root(), other.root()
        if here is there:
            return
        here.writers += there.writers
        here.along += there.along
        here.readers += there.readers
        here.why = here.why or there.why
        there.joined = here


Place = tuple[Channels, int, int]  # the group; the dimension of its channels; how many numbers stand for each


def find_channel_groups(model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor]) -> list[Channels]:
    """Return the groups of all layers that can be narrowed. Raise ValueError if the network cannot be traced."""
    try:
        with suppress_output():
            program = torch.export.export(model, tuple(args), named or None)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"this model cannot be traced ({type(error).__name__}: {text})") from error
    reading = _Reading(model, program)
    for node in program.graph.nodes:
        reading.read(node)
    seen = dict.fromkeys(group.root() for group in reading.groups)
    return list(seen)


class _Reading:
    """The places of the results so far."""

    def __init__(self, model: nn.Module, program: Any) -> None:
        self._parameters = program.graph_signature.inputs_to_parameters
        self._layers, self._alone = dict(model.named_modules()), untied_layers(model)
        owners = [self._owner(node) for node in program.graph.nodes]
        self._shared = {name for name in owners if name is not None and owners.count(name) > 1}
        self._places: dict[Any, Place] = {}
        self.groups: list[Channels] = []

    def read(self, node: Any) -> None:
        if node.op == "output":
            self._fix(node, "is a model output")
        if node.op != "call_function":
            return
        name, kind = self._owner(node), _kind(node)
        if name is not None and kind in ("linear", "conv2d"):
            self._layer(node, kind, name)
            return
        place = self._places.get(next(iter(node.all_input_nodes), None))
        after = None
        if (
            place is not None
            and isinstance(node.args[0], torch.fx.Node)
            and not (kind in PAIRS and len(node.all_input_nodes) > 1)
        ):
            after = self._after(node, kind, name, place)
        elif kind in PAIRS:
            after = self._pair(node)
        if after is None:
            self._fix(node, f"goes into {kind}")
        else:
            self._places[node] = after

    def _layer(self, node: Any, kind: str, name: str) -> None:
        layer: Any = self._alone.get(name)
        own = layer is not None and name not in self._shared
        able = own and type(layer) in (nn.Linear, nn.Conv2d)
        place, dims = self._places.get(node.args[0]), _dims(node)
        groups = getattr(layer, "groups", 1)
        channel = dims - 1 if kind == "linear" else dims - 3
        if able and place is not None and place[1] == channel:
            if groups == len(layer.weight) > 1 and layer.weight.shape[1] == place[2] == 1:
                place[0].root().along.append(name)
                self._places[node] = place
                return
            if groups == 1:
                place[0].root().readers.append((name, place[2]))
                place = None
        if place is not None:
            self._fix(node, f"goes into {name}")
        why = (
            "shares its weight with another layer" if not own
            else f"is a {type(layer).__name__}" if not able
            else "is a convolution in groups" if groups != 1 else ""
        )  # fmt: skip
        group = Channels([name], why)
        self.groups.append(group)
        self._places[node] = (group, channel, 1)

    def _after(self, node: Any, kind: str, name: str | None, place: Place) -> Place | None:
        """Return where the channels are after an operation that keeps them apart; None if it may not."""
        (group, dim, block), dims = place, _dims(node.args[0])
        if kind in KEEPS or kind in PAIRS or (kind in POOLS and dim == dims - 3):
            return place if len(node.all_input_nodes) == 1 else None
        if kind in ("batch_norm", "layer_norm", "rms_norm"):
            norm: Any = self._layers.get(name or "")
            fits = isinstance(norm, NORMS) and name not in self._shared and block == 1
            if not fits or dim != (1 if kind == "batch_norm" else dims - 1) or norm.weight.ndim != 1:
                return None
            group.root().along.append(name or "")
            return place
        if kind in ("mean", "sum", "amax") and len(node.args) > 1:
            reduced = sorted(axis % dims for axis in node.args[1])
            if dim in reduced or not reduced:
                return None
            keeps = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
            return group, dim if keeps else dim - sum(axis < dim for axis in reduced), block
        if kind in SHAPES:
            after = channel_dimension(node.args[0].meta["val"].shape, node.meta["val"].shape, dim)
            return None if after is None else (group, after[0], block * after[1])
        if kind in ("permute", "transpose"):
            order = list(range(dims))
            if kind == "permute":
                order = [axis % dims for axis in node.args[1]]
            else:
                first, second = node.args[1] % dims, node.args[2] % dims
                order[first], order[second] = second, first
            return group, order.index(dim), block
        if kind in ("select", "slice") and len(node.args) > 1 and node.args[1] % dims != dim:
            return group, dim - (kind == "select" and node.args[1] % dims < dim), block
        return None

    def _pair(self, node: Any) -> Place | None:
        """Return the place of an element-wise operation on two results, whose channels become one group."""
        shape, places = node.meta["val"].shape, list[Place]()
        for operand in node.all_input_nodes:
            value = operand.meta["val"]
            if (place := self._places.get(operand)) is not None:
                places.append((place[0], place[1] + len(shape) - value.ndim, place[2]))
        if not places or any(place[1:] != places[0][1:] for place in places):
            return None
        group, dim, block = places[0]
        for operand in node.all_input_nodes:
            value = operand.meta["val"]
            axis = dim - len(shape) + value.ndim
            if operand not in self._places and axis >= 0 and value.shape[axis] != 1:
                return None
            if operand in self._places and value.shape[axis] != shape[dim]:
                return None
        for place in places[1:]:
            group.join(place[0])
        return group, dim, block

    def _fix(self, node: Any, why: str) -> None:
        for input_node in node.all_input_nodes:
            if input_node in self._places:
                group = self._places[input_node][0].root()
                group.why = group.why or why

    def _owner(self, node: Any) -> str | None:
        """Return the layer of an operation, by its weight."""
        if node.op != "call_function":
            return None
        for argument in node.args[1:3]:
            if isinstance(argument, torch.fx.Node) and (path := self._parameters.get(argument.name, "")):
                name, _, ending = path.rpartition(".")
                return name if ending == "weight" else None
        return None


def channel_dimension(before: Sequence[int], after: Sequence[int], dim: int) -> tuple[int, int] | None:
    """Return the dimension of the channels in another shape of the same numbers, and the numbers of one channel."""
    for place, size in enumerate(after):
        if math.prod(after[:place]) == math.prod(before[:dim]) and size % before[dim] == 0 and size > 1:
            rest = math.prod(before[dim + 1 :])
            return (place, size // before[dim]) if rest % (size // before[dim]) == 0 else None
    return None


def _kind(node: Any) -> str:
    text = str(node.target)
    return text.split(".")[1] if "." in text else text


def _dims(node: Any) -> int:
    return int(node.meta["val"].ndim)


def format_reasons(left: dict[str, str]) -> str:
    """Return the names of layers beside each reason, at most four names of each."""
    lines = []
    for why in dict.fromkeys(left.values()):
        names = [name or "the model" for name, reason in left.items() if reason == why]
        rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"{', '.join(names[:4])}{rest} ({why})")
    return "; ".join(lines)
