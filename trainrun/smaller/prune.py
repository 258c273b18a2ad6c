"""Prune a model: set the smallest weights to zero (`mask_weights`), or remove whole channels (`narrow_layers`).

what: `mask_weights` stores a mask beside each weight. Size and time stay the same; the zeros are useful for sparse
    kernels and compression. `narrow_layers` makes layers smaller, so that size and time shrink.
when: after a training, followed by a short one (`--finetune`). Channels are removed only if all operations on them
    are known (`channels.py`). Channels that are added to each other are removed together. torch-pruning 1.6 is not
    used: on a GPT of one layer its search for groups does not end, and it splits attention heads.
    torch.nn.utils.prune is not used: its masks are float32, so the size doubles instead of growing by a quarter.
source: Han et al. 2015, arXiv 1506.02626 (magnitudes); Li et al. 2017, arXiv 1608.08710 (filters by their L1 norm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainrun.export.served import output_tensors
from trainrun.runtime.network_copy import copy_network
from trainrun.smaller.channels import NORMS, ChannelGroup, find_channel_groups, format_reasons
from trainrun.transform.int8 import explain_float_layers, has_computed_weight, untied_layers

CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip


class Mask(nn.Module):
    """A parametrization that keeps masked weights at zero during training. mask: bool, False for zero."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def mask_weights(model: nn.Module, amount: float = 0.5) -> nn.Module:
    """Set the smallest weights to zero. amount: the fraction of the weights of all linear layers and convolutions
    together.
    """
    layers = maskable_layers(model)
    if not layers:
        raise ValueError("the model has no torch.nn.Linear or convolution with weights of its own")
    sizes = torch.cat([layer.weight.detach().abs().flatten().float() for layer in layers.values()])
    if not (count := int(amount * len(sizes))):
        raise ValueError(f"is less than one of {len(sizes)} weights")
    limit = sizes.kthvalue(count).values
    for layer in layers.values():
        parametrize.register_parametrization(
            layer, "weight", Mask(layer.weight.detach().abs().float() > limit)
        )
    return model


def maskable_layers(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers and convolutions whose weights are not shared, by name."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    return {
        name: layer
        for name, layer in untied_layers(model).items()
        if type(layer) in kinds and not has_computed_weight(layer)
    }


def explain_unmasked_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers with matrices that `mask_weights` does not change, each with the reason."""
    able = maskable_layers(model)
    return {name: why for name, why in explain_float_layers(model, "mask").items() if name not in able}


def narrow_layers(model: nn.Module, sizes: Sequence[Sequence[Any]]) -> nn.Module:
    """Reduce layers to their first channels. sizes: (name, outputs, inputs) of each layer; a norm has outputs only."""
    for name, outputs, inputs in sizes:
        narrow_layer(model.get_submodule(name), torch.arange(outputs), torch.arange(inputs))
    return model


@torch.no_grad()
def narrow_layer(layer: Any, outputs: Tensor, inputs: Tensor) -> None:
    """Keep the given outputs and inputs of a layer, by their indices."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        if (old := getattr(layer, name, None)) is None:
            continue
        new = old[outputs][:, inputs] if old.ndim > 1 else old[outputs]
        if new.ndim == 4 and old.is_contiguous(memory_format=torch.channels_last):
            new = new.contiguous(memory_format=torch.channels_last)
        new = new.clone()
        setattr(layer, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
    num_outputs, num_inputs = len(outputs), len(inputs)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        layer.normalized_shape = (num_outputs,)
    elif isinstance(layer, NORMS):
        layer.num_features = num_outputs
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = num_outputs, num_inputs
    elif layer.groups > 1:  # a convolution of each channel alone
        layer.groups = layer.out_channels = layer.in_channels = num_outputs
    else:
        layer.out_channels, layer.in_channels = num_outputs, num_inputs


def remove_channels(
    model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor], amount: float
) -> tuple[nn.Module, list[list[Any]], dict[str, str]]:
    """Return a narrowed copy, the new sizes of its layers, and the layers that were not narrowed, with reasons.

    amount: the fraction of channels to remove from each group. Raise ValueError if no channel can be removed.
    """
    groups = find_channel_groups(model, args, named)
    if not groups:
        raise ValueError("the model has no torch.nn.Linear or Conv2d with weights of its own")
    left = {name: group.reason for group in groups if group.reason for name in group.writers}
    able = [group for group in groups if not group.reason]
    shapes = output_shapes(model, args, named)

    def works(some: Sequence[ChannelGroup]) -> bool:
        try:
            return output_shapes(narrow_groups(model, some, amount)[0], args, named) == shapes
        except Exception:  # of the model's own code, which knows some size
            return False

    if not works(able):
        tried, able = able, []
        for group in tried:
            if works([*able, group]):
                able.append(group)
            else:
                left |= dict.fromkeys(group.writers, "has a size that the code of the model fixes")
    narrowed, sizes = narrow_groups(model, able, amount)
    if not sizes:
        reasons = f": {format_reasons(left)}" if left else ""
        raise ValueError(
            f"no channel can be removed{reasons}; without --structured single weights are pruned"
        )
    return narrowed, sizes, left


def narrow_groups(
    model: nn.Module, groups: Sequence[ChannelGroup], amount: float
) -> tuple[nn.Module, list[list[Any]]]:
    """Return a narrowed copy and its sizes. Each group keeps the channels with the largest L1 norm, relative to the
    layer's mean.
    """
    model = copy_network(model)
    layers: dict[str, Any] = dict(model.named_modules())
    keep: dict[str, list[Tensor]] = {}

    def kept_indices(name: str) -> list[Tensor]:
        shape = (*layers[name].weight.shape, 0)[:2]
        return keep.setdefault(name, [torch.arange(size) for size in shape])

    for group in groups:
        norms = [layers[name].weight.detach().float().abs().flatten(1).sum(1) for name in group.writers]
        importance = torch.stack([norm / norm.mean().clamp(min=1e-12) for norm in norms]).sum(0)
        number = max(1, round((1 - amount) * len(importance)))
        if number == len(importance):
            continue
        channels = importance.topk(number).indices.sort().values.cpu()
        for name in (*group.writers, *group.followers):
            kept_indices(name)[0] = channels
        for name, width in group.readers:
            kept_indices(name)[1] = (channels[:, None] * width + torch.arange(width)).flatten()
    for name, (outputs, inputs) in keep.items():
        narrow_layer(layers[name], outputs, inputs)
    return model, [[name, len(outputs), len(inputs)] for name, (outputs, inputs) in keep.items()]


@torch.no_grad()
def output_shapes(model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor]) -> list[torch.Size]:
    """Return the shapes of all output tensors of a forward."""
    output = output_tensors(model(*args, **named))
    tensors = [output] if isinstance(output, Tensor) else output
    return [tensor.shape for tensor in tensors]
