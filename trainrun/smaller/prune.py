"""Pruning: the weights of least magnitude are zero and stay so (`masked`), or whole channels are gone (`narrowed`).

what: `masked` keeps a mask beside each weight: the size and the time stay as they were, the zeros are for kernels and
    packers of others. `narrowed` makes layers smaller: file and time shrink.
when: after a training, with a short one behind it (`--finetune`). Channels are only taken where all that reads them is
    known: convolutions and linear layers behind one another, with activations, pooling and batch norm between them.
source: Han et al. 2015, arXiv 1506.02626 (magnitudes); Li et al. 2017, arXiv 1608.08710 (filters by their L1 norm).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainrun.smaller.int8 import fitting

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
# operations of a graph that keep every channel by itself
KEEPS = {
    "relu", "relu_", "gelu", "silu", "silu_", "sigmoid", "tanh", "leaky_relu", "leaky_relu_", "elu", "elu_", "hardtanh",
    "hardtanh_", "hardswish", "hardswish_", "dropout", "dropout_", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
    "contiguous", "clone", "to", "_to_copy",
}  # fmt: skip


class Mask(nn.Module):
    """A parametrization: what is masked is zero, whatever the optimizer does. mask: bool."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def masked(model: nn.Module, amount: float = 0.5) -> nn.Module:
    """Mask this part of all weights of linear layers and 2-D convolutions together, the smallest."""
    layers = fitting(model)
    if not layers:
        raise ValueError("the model has no torch.nn.Linear or torch.nn.Conv2d with weights of its own")
    sizes = torch.cat([layer.weight.detach().abs().flatten().float() for layer in layers.values()])
    count = int(amount * len(sizes))
    limit = sizes.kthvalue(count).values if count else sizes.new_tensor(-1.0)
    for layer in layers.values():
        parametrize.register_parametrization(
            layer, "weight", Mask(layer.weight.detach().abs().float() > limit)
        )
    return model


def narrowed(model: nn.Module, sizes: Sequence[Sequence[Any]]) -> nn.Module:
    """Cut layers to their first channels. sizes: (name, outputs, inputs) of each; a norm has outputs alone."""
    for name, outputs, inputs in sizes:
        cut(model.get_submodule(name), torch.arange(outputs), torch.arange(inputs))
    return model


@torch.no_grad()
def cut(layer: Any, outputs: Tensor, inputs: Tensor) -> None:
    """Keep these outputs and inputs of a layer."""
    if isinstance(layer, NORMS):
        for name in ("weight", "bias"):
            if getattr(layer, name) is not None:
                setattr(layer, name, nn.Parameter(getattr(layer, name)[outputs].clone()))
        for name in ("running_mean", "running_var"):
            if getattr(layer, name) is not None:
                setattr(layer, name, getattr(layer, name)[outputs].clone())
        layer.num_features = len(outputs)
        return
    trained = layer.weight.requires_grad
    kept = layer.weight[outputs][:, inputs]
    if kept.ndim == 4 and layer.weight.is_contiguous(memory_format=torch.channels_last):
        kept = kept.contiguous(memory_format=torch.channels_last)
    layer.weight = nn.Parameter(kept.clone(), requires_grad=trained)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[outputs].clone(), requires_grad=trained)
    names = (
        ("out_features", "in_features") if isinstance(layer, nn.Linear) else ("out_channels", "in_channels")
    )
    for name, kept_ones in zip(names, (outputs, inputs), strict=True):
        setattr(layer, name, len(kept_ones))


def without_channels(
    model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor], amount: float
) -> list[list[Any]]:
    """Take this part of the outputs of every layer whose readers are known; the sizes of what changed.

    Raises ValueError where no layer can be cut.
    """
    keep: dict[str, list[Tensor]] = {}
    layers = dict(model.named_modules())

    def kept(name: str) -> list[Tensor]:
        layer: Any = layers[name]
        if isinstance(layer, NORMS):
            return keep.setdefault(name, [torch.arange(layer.num_features), torch.arange(0)])
        return keep.setdefault(name, [torch.arange(size) for size in layer.weight.shape[:2]])

    for name, readers in chains(model, args, named).items():
        weight = layers[name].weight.detach().float().flatten(1)
        number = max(1, round((1 - amount) * len(weight)))
        if number == len(weight):
            continue
        chosen = weight.abs().sum(1).topk(number).indices.sort().values.cpu()
        kept(name)[0] = chosen
        for reader, block in readers:
            if isinstance(layers[reader], NORMS):
                kept(reader)[0] = chosen
            else:
                kept(reader)[1] = (chosen[:, None] * block + torch.arange(block)).flatten()
    if not keep:
        raise ValueError(
            "no channel can be taken: no torch.nn.Conv2d or torch.nn.Linear whose outputs go through activations, "
            "pooling and batch norm into other such layers alone; without --structured single weights are pruned"
        )
    for name, (outputs, inputs) in keep.items():
        cut(layers[name], outputs, inputs)
    return [[name, len(outputs), len(inputs)] for name, (outputs, inputs) in keep.items()]


def chains(
    model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor]
) -> dict[str, list[tuple[str, int]]]:
    """The layers whose outputs are read by others alone that can be cut too: by name, the readers.

    A reader is a norm or a layer, with its inputs for each channel (several where a map was flattened).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own tracing
        try:
            program = torch.export.export(model, tuple(args), named or None)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise ValueError(f"this model cannot be traced ({type(error).__name__}: {text})") from error
    parameters = program.graph_signature.inputs_to_parameters
    able, layers = fitting(model), dict(model.named_modules())

    def owner(node: Any) -> str:
        """The layer of an operation, by its weight."""
        weight = next((one for one in node.args[1:2] if isinstance(one, torch.fx.Node)), None)
        return parameters.get(weight.name, "").rpartition(".")[0] if weight is not None else ""

    def readers(node: Any, block: int) -> list[tuple[str, int]] | None:
        """What reads the outputs of an operation; None where somebody mixes channels, or gives them out."""
        found: list[tuple[str, int]] = []
        for user in node.users:
            kind = str(user.target).split(".")[1] if "." in str(user.target) else str(user.target)
            name = owner(user)
            if kind in ("linear", "conv2d"):
                layer: Any = able.get(name)
                fits = layer is not None and user.args[0] is node and getattr(layer, "groups", 1) == 1
                dim = user.args[0].meta["val"].ndim
                if not fits or (kind == "linear" and dim != 2 and node_is_map(node)):
                    return None
                found.append((name, block))
                continue
            if kind == "batch_norm":
                if block != 1 or user.args[0] is not node or not isinstance(layers.get(name), NORMS):
                    return None
                found.append((name, 1))
            elif kind in ("flatten", "view", "reshape"):
                before, after = node.meta["val"].shape, user.meta["val"].shape
                if len(after) != 2 or after[0] != before[0] or len(before) < 3:
                    return None
                more = readers(user, int(after[1] // before[1]))
                if more is None:
                    return None
                found += more
                continue
            elif kind == "mean":
                if sorted(dim % node.meta["val"].ndim for dim in user.args[1]) != [2, 3]:
                    return None
            elif kind not in KEEPS or user.args[0] is not node:
                return None
            more = readers(user, block)
            if more is None:
                return None
            found += more
        return found or None

    def node_is_map(node: Any) -> bool:
        """Whether channels are in dimension 1 of more than two: a linear layer reads the last."""
        return bool(node.meta["val"].ndim == 4)

    found = {}
    for node in program.graph.nodes:
        kind = str(node.target)
        name = owner(node) if kind.startswith(("aten.linear.", "aten.conv2d.")) else ""
        if name in able and getattr(able[name], "groups", 1) == 1 and name not in found:
            known = readers(node, 1)
            uses = sum(owner(other) == name for other in program.graph.nodes)
            if known is not None and uses == 1:
                found[name] = known
    return found
