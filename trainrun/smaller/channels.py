"""Find groups of channels that can only be removed together, because layers add, normalise or convolve them
together.

The graph of `torch.export` is read once, from the inputs on. For each result it is recorded along which dimension
the channels of a layer are. An operation that is not in the lists below prevents the removal of all channels in its
inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from trainrun.export.served import suppress_output
from trainrun.transform.int8 import untied_layers

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.RMSNorm)
NORM_OPERATIONS = {"batch_norm", "layer_norm", "rms_norm"}
# Operations of a graph by what they do to channels.
ELEMENTWISE = {
    "relu", "relu_", "gelu", "silu", "silu_", "sigmoid", "tanh", "leaky_relu", "leaky_relu_", "elu", "elu_", "hardtanh",
    "hardtanh_", "hardswish", "hardswish_", "hardsigmoid", "dropout", "dropout_", "contiguous", "clone",
    "to", "_to_copy",
}  # fmt: skip
POOLS = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"}
BINARY = {"add", "add_", "sub", "mul", "mul_", "div"}
RESHAPES = {"flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"}
REARRANGES = {"permute", "transpose", "select", "slice", "mean", "sum", "amax"}


class ChannelGroup:
    """Channels that are kept or removed together.

    writers: the layers whose outputs they are. followers: norms and depthwise convolutions of these channels. readers:
        the layers that use them as inputs, with the number of inputs per channel. reason: why the channels cannot be
        removed, or "".
    """

    def __init__(self, writers: Sequence[str], reason: str = "") -> None:
        self.writers, self.reason = list(writers), reason
        self.followers: list[str] = []
        self.readers: list[tuple[str, int]] = []
        self._joined: ChannelGroup | None = None

    def root(self) -> ChannelGroup:
        """Return the group into which this one was merged, or the group itself."""
        return self if self._joined is None else self._joined.root()

    def join(self, other: ChannelGroup) -> None:
        """Merge two groups that have no readers yet, or the same readers."""
        root, added = self.root(), other.root()
        if root is added:
            return
        root.writers += added.writers
        root.followers += added.followers
        root.readers += added.readers
        root.reason = root.reason or added.reason
        added._joined = root


class ChannelAxis(NamedTuple):
    """The position of a group's channels in a result: along `dim`, where each channel has `width` neighbouring
    numbers.
    """

    group: ChannelGroup
    dim: int
    width: int


def find_channel_groups(
    model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor]
) -> list[ChannelGroup]:
    """Return the channel groups of all layers that can be narrowed. Raise ValueError if the network cannot be
    traced.
    """
    try:
        with suppress_output():
            program = torch.export.export(model, tuple(args), named or None)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"this model cannot be traced ({type(error).__name__}: {text})") from error
    reader = GraphReader(model, program)
    for node in program.graph.nodes:
        reader.read(node)
    return list(dict.fromkeys(group.root() for group in reader.groups))


class GraphReader:
    """A reader that follows channels through the operations of a graph, in order."""

    def __init__(self, model: nn.Module, program: Any) -> None:
        self._parameters = program.graph_signature.inputs_to_parameters
        self._layers, self._untied = dict(model.named_modules()), untied_layers(model)
        self._num_calls = Counter(self._layer_name(node) for node in program.graph.nodes)
        self._axes: dict[Node, ChannelAxis] = {}
        self.groups: list[ChannelGroup] = []

    def read(self, node: Node) -> None:
        """Record along which dimension the channels are in the result of an operation."""
        if node.op == "output":
            self._keep_channels(node, "is a model output")
        if node.op != "call_function":
            return
        kind, layer_name = operation_name(node), self._layer_name(node)
        if layer_name is not None and kind in ("linear", "conv2d"):
            self._read_layer(node, kind, layer_name)
            return
        axis = self._follow(node, kind, layer_name)
        if axis is None:
            self._keep_channels(node, f"goes into {kind}")
        else:
            self._axes[node] = axis

    def _read_layer(self, node: Node, kind: str, name: str) -> None:
        """Create the group of the outputs of a layer, and record the layer as a reader of the group of its inputs."""
        layer: Any = self._untied.get(name) if self._num_calls[name] == 1 else None
        reason = ""
        if layer is None:
            reason = "shares its weight with another layer"
        elif type(layer) not in (nn.Linear, nn.Conv2d):
            reason = f"is a {type(layer).__name__}"
        dim = num_dims(node) - (1 if kind == "linear" else 3)
        source = node.args[0]
        axis = self._axes.get(source) if isinstance(source, Node) else None
        can_read = not reason and axis is not None and axis.dim == dim
        if can_read and axis is not None and axis.width == 1 and is_depthwise(layer):
            axis.group.root().followers.append(name)
            self._axes[node] = axis
            return
        if not reason and getattr(layer, "groups", 1) != 1:
            reason, can_read = "is a convolution in groups", False
        if can_read and axis is not None:
            axis.group.root().readers.append((name, axis.width))
        else:
            self._keep_channels(node, f"goes into {name}")
        self.groups.append(ChannelGroup([name], reason))
        self._axes[node] = ChannelAxis(self.groups[-1], dim, 1)

    def _follow(self, node: Node, kind: str, layer_name: str | None) -> ChannelAxis | None:
        """Return where the channels of the inputs are in the result; None if unknown."""
        if kind in BINARY:
            return self._join_operands(node)
        source = node.args[0] if node.args else None
        axis = self._axes.get(source) if isinstance(source, Node) else None
        if axis is None or not isinstance(source, Node):
            return None
        if kind in NORM_OPERATIONS:
            dim = 1 if kind == "batch_norm" else num_dims(source) - 1
            return axis if axis.dim == dim and self._follow_norm(axis, layer_name or "") else None
        if len(node.all_input_nodes) > 1:
            return None
        if kind in ELEMENTWISE or (kind in POOLS and axis.dim == num_dims(source) - 3):
            return axis
        return find_moved_axis(node, kind, axis) if kind in RESHAPES | REARRANGES else None

    def _follow_norm(self, axis: ChannelAxis, name: str) -> bool:
        """Add a norm to the group of its channels. Return whether it has one weight per channel."""
        norm: Any = self._layers.get(name)
        is_usable = isinstance(norm, NORMS) and norm.weight.ndim == 1 and self._num_calls[name] == 1
        if is_usable and axis.width == 1:
            axis.group.root().followers.append(name)
            return True
        return False

    def _join_operands(self, node: Node) -> ChannelAxis | None:
        """Return the channel axis of an element-wise result, and merge the groups of its operands."""
        shape = node.meta["val"].shape
        operands = [(self._axes.get(operand), operand.meta["val"].shape) for operand in node.all_input_nodes]
        axes = [
            axis._replace(dim=axis.dim + len(shape) - len(own_shape))
            for axis, own_shape in operands
            if axis is not None
        ]
        if not axes or any(axis[1:] != axes[0][1:] for axis in axes):
            return None
        dim = axes[0].dim
        for axis, own_shape in operands:
            own_dim = dim - len(shape) + len(own_shape)
            size = own_shape[own_dim] if own_dim >= 0 else 1
            if size != (1 if axis is None else shape[dim]):
                return None
        for axis in axes[1:]:
            axes[0].group.join(axis.group)
        return axes[0]

    def _keep_channels(self, node: Node, reason: str) -> None:
        """Mark all channels in the inputs of an operation as not removable."""
        for source in node.all_input_nodes:
            if source in self._axes:
                group = self._axes[source].group.root()
                group.reason = group.reason or reason

    def _layer_name(self, node: Node) -> str | None:
        """Return the name of the layer to which the weight of an operation belongs."""
        if node.op != "call_function":
            return None
        for argument in node.args[1:3]:
            if isinstance(argument, Node) and (path := self._parameters.get(argument.name, "")):
                name, _, ending = path.rpartition(".")
                return name if ending == "weight" else None
        return None


def find_moved_axis(node: Node, kind: str, axis: ChannelAxis) -> ChannelAxis | None:
    """Return where channels are after a reshape, a transposition, a selection or a sum.

    The operation is applied to a tensor of channel numbers. Return None if the channels are no longer along one
    dimension, or if some are missing.
    """
    source: Any = node.args[0]
    shape, operation = source.meta["val"].shape, node.target
    num_channels = shape[axis.dim] // axis.width
    line = torch.arange(num_channels, dtype=torch.float64).repeat_interleave(axis.width)
    numbers = line.reshape([-1 if dim == axis.dim else 1 for dim in range(len(shape))]).expand(shape)
    if kind in RESHAPES:
        numbers = numbers.reshape(node.meta["val"].shape)
    elif callable(operation):
        numbers = operation(numbers, *node.args[1:], **node.kwargs)
    dims = [dim for dim in range(numbers.ndim) if numbers.diff(dim=dim).any()]
    if len(dims) != 1:
        return None
    line = numbers.movedim(dims[0], 0).flatten(1)[:, 0]
    order = (line.diff() != 0).cumsum(0)
    width = len(line) // num_channels
    is_complete = torch.equal(order, torch.arange(num_channels).repeat_interleave(width)[1:])
    return ChannelAxis(axis.group, dims[0], width) if is_complete else None


def is_depthwise(layer: Any) -> bool:
    """Return whether a layer is a convolution that treats each channel separately."""
    return getattr(layer, "groups", 1) == len(layer.weight) > 1 and layer.weight.shape[1] == 1


def operation_name(node: Node) -> str:
    """Return `conv2d` for `aten.conv2d.default`."""
    text = str(node.target)
    return text.split(".")[1] if "." in text else text


def num_dims(node: Node) -> int:
    return int(node.meta["val"].ndim)


def format_reasons(left: dict[str, str]) -> str:
    """Return a text with each reason and at most four names of the layers to which it applies."""
    lines = []
    for reason in dict.fromkeys(left.values()):
        names = [name or "the model" for name, each in left.items() if each == reason]
        rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"{', '.join(names[:4])}{rest} ({reason})")
    return "; ".join(lines)
