"""Pruning: the weights of least magnitude are zero and stay so (`masked`), or whole channels are gone (`narrowed`).

what: `masked` keeps a mask beside each weight: the size and the time stay as they were, the zeros are for kernels and
    packers of others. `narrowed` makes layers smaller: file and time shrink.
when: after a training, with a short one behind it (`--finetune`). Channels are only taken where all that they go
    through is known (`channels.py`); those that are added to each other go together.
source: Han et al. 2015, arXiv 1506.02626 (magnitudes); Li et al. 2017, arXiv 1608.08710 (filters by their L1 norm).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainrun.export.served import outputs_of
from trainrun.smaller.channels import NORMS, Channels, by_reason, groups_of
from trainrun.smaller.int8 import computed, in_floats, owning

CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip


class Mask(nn.Module):
    """A parametrization: what is masked is zero, whatever the optimizer does. mask: bool."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def masked(model: nn.Module, amount: float = 0.5) -> nn.Module:
    """Mask this part of all weights of linear layers and convolutions together, the smallest."""
    layers = maskable(model)
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


def maskable(model: nn.Module) -> dict[str, Any]:
    kinds = (nn.Linear, *CONVOLUTIONS)
    return {name: one for name, one in owning(model).items() if type(one) in kinds and not computed(one)}


def unmasked(model: nn.Module) -> dict[str, str]:
    """The other layers with matrices, before `masked`, and why."""
    able = maskable(model)
    return {name: why for name, why in in_floats(model, "mask").items() if name not in able}


def narrowed(model: nn.Module, sizes: Sequence[Sequence[Any]]) -> nn.Module:
    """Cut layers to their first channels. sizes: (name, outputs, inputs) of each; a norm has outputs alone."""
    for name, outputs, inputs in sizes:
        cut(model.get_submodule(name), torch.arange(outputs), torch.arange(inputs))
    return model


@torch.no_grad()
def cut(layer: Any, outputs: Tensor, inputs: Tensor) -> None:
    """Keep these outputs and inputs of a layer."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        if (old := getattr(layer, name, None)) is None:
            continue
        kept = old[outputs][:, inputs] if old.ndim > 1 else old[outputs]
        if kept.ndim == 4 and old.is_contiguous(memory_format=torch.channels_last):
            kept = kept.contiguous(memory_format=torch.channels_last)
        one = isinstance(old, nn.Parameter)
        setattr(layer, name, nn.Parameter(kept.clone(), old.requires_grad) if one else kept.clone())
    number = len(outputs)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        layer.normalized_shape = (number,)
    elif isinstance(layer, NORMS):
        layer.num_features = number
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = number, len(inputs)
    else:
        alone = layer.groups > 1  # a convolution of each channel alone
        layer.out_channels, layer.in_channels = number, number if alone else len(inputs)
        layer.groups = number if alone else 1


def without_channels(
    model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor], amount: float
) -> tuple[nn.Module, list[list[Any]], dict[str, str]]:
    """A copy without this part of the channels of each group that may go, the sizes of what changed, and why other
    layers stayed. Raises ValueError where no channel can go.
    """
    groups = groups_of(model, args, named)
    if not groups:
        raise ValueError("the model has no torch.nn.Linear or Conv2d with weights of its own")
    left = {name: group.why for group in groups if group.why for name in group.writers}
    able = [group for group in groups if not group.why]
    shapes = shapes_of(model, args, named)

    def works(some: Sequence[Channels]) -> bool:
        try:
            return shapes_of(cut_groups(model, some, amount)[0], args, named) == shapes
        except Exception:  # of the model's own code, which knows some size
            return False

    if not works(able):
        tried, able = able, []
        for group in tried:
            if works([*able, group]):
                able.append(group)
            else:
                left |= dict.fromkeys(group.writers, "has a size that the code of the model fixes")
    found, sizes = cut_groups(model, able, amount)
    if not sizes:
        raise ValueError(f"no channel can be taken{': ' * bool(left)}{by_reason(left)}; without --structured single "
                         "weights are pruned")  # fmt: skip
    return found, sizes, left


def cut_groups(
    model: nn.Module, groups: Sequence[Channels], amount: float
) -> tuple[nn.Module, list[list[Any]]]:
    """A copy whose groups keep the channels with the largest weights, each layer's counted by its own mean."""
    model = copy.deepcopy(model)
    layers: dict[str, Any] = dict(model.named_modules())
    keep: dict[str, list[Tensor]] = {}

    def kept(name: str) -> list[Tensor]:
        shape = (*layers[name].weight.shape, 0)[:2]
        return keep.setdefault(name, [torch.arange(size) for size in shape])

    for group in groups:
        norms = [layers[name].weight.detach().float().abs().flatten(1).sum(1) for name in group.writers]
        worth = torch.stack([norm / norm.mean().clamp(min=1e-12) for norm in norms]).sum(0)
        number = max(1, round((1 - amount) * len(worth)))
        if number == len(worth):
            continue
        chosen = worth.topk(number).indices.sort().values.cpu()
        for name in (*group.writers, *group.along):
            kept(name)[0] = chosen
        for name, block in group.readers:
            kept(name)[1] = (chosen[:, None] * block + torch.arange(block)).flatten()
    for name, (outputs, inputs) in keep.items():
        cut(layers[name], outputs, inputs)
    return model, [[name, len(outputs), len(inputs)] for name, (outputs, inputs) in keep.items()]


@torch.no_grad()
def shapes_of(model: nn.Module, args: Sequence[Tensor], named: dict[str, Tensor]) -> list[torch.Size]:
    found = outputs_of(model(*args, **named))
    return [one.shape for one in ([found] if isinstance(found, Tensor) else found)]
