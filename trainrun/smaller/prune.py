"""Prune a model: set the smallest weights to zero (`mask_weights`), or remove whole channels (`remove_channels`).

what: `mask_weights` saves a mask beside each weight. Size and time stay the same; the zeros are for other kernels and
    packers. `remove_channels` makes layers smaller, so file and time shrink. torch-pruning finds the channels that go
    together, as those that are added to each other. Each group of them is removed on trial first.
when: after a training, followed by a short one (`--finetune`).
source: Han et al. 2015, arXiv 1506.02626 (magnitudes); Li et al. 2017, arXiv 1608.08710 (filters by their L1 norm);
    Fang et al. 2023, arXiv 2301.12900 (torch-pruning). Not torch.nn.utils.prune for masks: it saves them in float32,
    2x the weights in place of 1.25x.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainrun.errors import ConfigError
from trainrun.export.served import output_tensors, suppress_output
from trainrun.transform.int8 import explain_float_layers, has_computed_weight, untied_layers

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)
NARROWED = (nn.Linear, nn.Conv1d, nn.Conv2d, *NORMS)  # the layers that `narrow_layer` knows
CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip


class Mask(nn.Module):
    """A parametrization that keeps masked weights at zero, whatever the optimizer does. mask: bool, False is zero."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def mask_weights(model: nn.Module, amount: float = 0.5) -> nn.Module:
    """Mask the smallest weights. amount: the fraction of all weights of linear layers and convolutions together."""
    layers = maskable_layers(model)
    if not layers:
        raise ValueError("the model has no torch.nn.Linear or convolution with weights of its own")
    sizes = torch.cat([layer.weight.detach().abs().flatten().float() for layer in layers.values()])
    if not (count := int(amount * len(sizes))):
        raise ValueError(f"is none of {len(sizes)} weights")
    limit = sizes.kthvalue(count).values
    for layer in layers.values():
        parametrize.register_parametrization(
            layer, "weight", Mask(layer.weight.detach().abs().float() > limit)
        )
    return model


def maskable_layers(model: nn.Module) -> dict[str, Any]:
    """Return linear layers and convolutions with weights of their own, by name."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    return {
        name: layer
        for name, layer in untied_layers(model).items()
        if type(layer) in kinds and not has_computed_weight(layer)
    }


def explain_unmasked(model: nn.Module) -> dict[str, str]:
    """Return the layers with matrices that `mask_weights` leaves out, each with the reason."""
    able = maskable_layers(model)
    return {name: why for name, why in explain_float_layers(model, "mask").items() if name not in able}


def narrow_layers(model: nn.Module, sizes: Sequence[Sequence[Any]]) -> nn.Module:
    """Shorten layers to their first channels. sizes: (name, outputs, inputs) of each; a norm has outputs alone."""
    for name, outputs, inputs in sizes:
        narrow_layer(model.get_submodule(name), outputs, inputs)
    return model


@torch.no_grad()
def narrow_layer(layer: Any, outputs: int, inputs: int) -> None:
    """Shorten the tensors of a layer to their first outputs and inputs."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        if (old := getattr(layer, name, None)) is None:
            continue
        new = (old[:outputs, :inputs] if old.ndim > 1 else old[:outputs]).clone()
        setattr(layer, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
    if isinstance(layer, nn.LayerNorm):
        layer.normalized_shape = (outputs,)
    elif isinstance(layer, NORMS):
        layer.num_features = outputs
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = outputs, inputs
    else:
        layer.groups = outputs if layer.groups > 1 else 1  # a convolution of each channel alone
        layer.out_channels, layer.in_channels = outputs, inputs * layer.groups


def remove_channels(
    model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor], amount: float
) -> tuple[nn.Module, list[list[Any]], dict[str, str]]:
    """Return a copy without a part of its channels, the new sizes, and the layers that are kept, with reasons.

    amount: the fraction of channels to remove from each group. Raise ValueError if no channel can be removed.
    """
    roots = {name: layer for name, layer in model.named_modules() if type(layer) in (nn.Linear, nn.Conv2d)}
    if not roots:
        raise ValueError("the model has no torch.nn.Linear or Conv2d with weights of its own")
    untied = set(untied_layers(model))
    pruned, reasons, done = copy.deepcopy(model), dict[str, str](), set[str]()
    for name in roots:
        if name in done:
            continue
        trial = copy.deepcopy(pruned).requires_grad_()  # or the graph would have no edges
        try:
            done |= remove_group(trial, name, args, named, amount, untied)
            pruned = trial
        except ValueError as error:
            reasons[name] = str(error)
    old = dict(model.named_parameters())
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(old[name].requires_grad)
    sizes = changed_sizes(model, pruned)
    reasons = {name: why for name, why in reasons.items() if name not in done}
    if not sizes:
        listed = f": {format_reasons(reasons)}" if reasons else ""
        raise ValueError(f"no channel can be removed{listed}; without --structured single weights are pruned")
    return pruned, sizes, reasons


def remove_group(
    model: nn.Module, root: str, args: Sequence[Tensor], named: dict[str, Tensor], amount: float, untied: set[str]
) -> set[str]:  # fmt: skip
    """Remove the weakest channels of a layer, and of all that are added to them. Return the names of these layers.

    untied: the layers that share no weight. Raise ValueError if the model does not compute the same without the
    channels as with zeros in their place. A layer norm counts them, so beside one only the shapes are compared.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise ConfigError("--structured: needs torch-pruning; pip install 'trainrun[prune]'") from error

    def compute() -> list[Tensor]:
        output = output_tensors(model(*args, **named))
        return [output] if isinstance(output, Tensor) else list(output)

    names = {layer: name for name, layer in model.named_modules()}
    layer = model.get_submodule(root)
    try:
        with suppress_output(), torch.enable_grad():
            graph = torch_pruning.DependencyGraph()
            graph.build_dependency(model, (), lambda *_: compute(), verbose=False)
    except Exception as error:
        raise ValueError(f"the model cannot be traced: {' '.join(str(error).split())[:200]}") from error
    if layer not in graph.module2node:
        raise ValueError("is not used by the model itself")
    remove = graph.get_pruner_of_module(layer).prune_out_channels
    all_channels = graph.get_pruning_group(layer, remove, list(range(len(layer.weight))))  # type: ignore[arg-type]
    members = [item.dep.target.module for item in all_channels]
    for member in members:
        if names.get(member, root) not in untied and not isinstance(member, NORMS) and has_matrix(member):
            raise ValueError("shares its weight with another layer")
        if isinstance(member, nn.Parameter) or (has_matrix(member) and not isinstance(member, NARROWED)):
            raise ValueError(f"its channels are those of a {type(member).__name__}")
    worth = torch_pruning.importance.MagnitudeImportance(p=1)(all_channels)
    number = len(worth) - max(1, round((1 - amount) * len(worth)))
    weakest = worth.topk(number, largest=False).indices.sort().values.tolist()
    if not weakest:
        raise ValueError("has too few channels")
    group = graph.get_pruning_group(layer, remove, weakest)
    with torch.no_grad():
        shapes = [output.shape for output in compute()]
        mask_group(graph, group)
        expected = compute()
        try:
            group.prune()
            outputs = compute()
        except Exception as error:  # of the model's own code, which knows some size
            raise ValueError("has a size that the code of the model fixes") from error
    if [output.shape for output in outputs] != shapes:
        raise ValueError("is a model output")
    is_counted = any(isinstance(member, nn.LayerNorm) for member in members)
    pairs = zip(outputs, expected, strict=True)
    if not is_counted and not all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in pairs):
        raise ValueError("the code of the model mixes its channels")
    writers = [
        item.dep.target.module for item in all_channels if graph.is_out_channel_pruning_fn(item.dep.handler)
    ]
    return {names[layer] for layer in writers if layer in names}


def has_matrix(module: Any) -> bool:
    """Return whether a module has a matrix of its own."""
    is_layer = isinstance(module, nn.Module)
    return is_layer and any(value.ndim > 1 for value in module.parameters(recurse=False))


def mask_group(graph: Any, group: Any) -> None:
    """Set to zero what the removal of a group would remove: outputs of some layers, inputs of others."""
    for item in group:
        layer = item.dep.target.module
        if not isinstance(layer, NARROWED):
            continue
        if graph.is_out_channel_pruning_fn(item.dep.handler):
            layer.weight[item.idxs] = 0.0
            if layer.bias is not None:
                layer.bias[item.idxs] = 0.0
        else:
            layer.weight[:, item.idxs] = 0.0


def changed_sizes(model: nn.Module, pruned: nn.Module) -> list[list[Any]]:
    """Return name, number of outputs and of inputs of each layer that became smaller; a norm has no inputs."""
    sizes: list[list[Any]] = []
    for name, layer in pruned.named_modules():
        weight, old = getattr(layer, "weight", None), getattr(model.get_submodule(name), "weight", None)
        if isinstance(weight, Tensor) and isinstance(old, Tensor) and weight.shape != old.shape:
            sizes.append([name, *(*weight.shape, 0)[:2]])
    return sizes


def format_reasons(reasons: dict[str, str]) -> str:
    """Return the names of layers beside each reason, at most four names of each."""
    lines = []
    for reason in dict.fromkeys(reasons.values()):
        names = [name or "the model" for name, other in reasons.items() if other == reason]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        lines.append(f"{', '.join(names[:4])}{more} ({reason})")
    return "; ".join(lines)
