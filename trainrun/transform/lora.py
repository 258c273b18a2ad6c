"""LoRA: a frozen linear layer plus a trained product of two thin matrices, W x + (alpha / rank) B A x.

When: fine-tuning a pretrained network (`init_from`) with less memory. Only the thin matrices have gradients and
    optimizer state: `2 * rank / width` of those of a square layer. When not: training from scratch, or if the new
    data is very different. At the start the network computes the same as before, because B is zero. Source: Hu et
    al. 2021, arXiv 2106.09685; A is initialised as in their code.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as dropped
from torch.nn.functional import linear

from trainrun.limits import BelowOne, Count, Positive
from trainrun.patterns import Patterns, match_names


class LoraLinear(nn.Module):
    """A frozen linear layer `base` with a trained correction. lora_a: (rank, in). lora_b: (out, rank)."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        empty = base.weight.new_empty
        self.base = base.requires_grad_(False)
        self.scale, self.dropout = alpha / rank, dropout
        self.lora_a = nn.Parameter(empty(rank, base.in_features))
        self.lora_b = nn.Parameter(empty(base.out_features, rank).zero_())
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if self.dropout:
            x = dropped(x, self.dropout, self.training)
        return out + self.scale * linear(linear(x, self.lora_a), self.lora_b)

    @property
    def weight(self) -> Tensor:
        """The weight with the correction; torch.nn.TransformerEncoderLayer reads it in evaluation."""
        return self.base.weight + self.scale * (self.lora_b @ self.lora_a)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    @torch.no_grad()
    def merge_weights(self) -> nn.Linear:
        """Return the linear layer with the correction added to its weight."""
        weight = self.base.weight
        wide = torch.promote_types(weight.dtype, torch.float32)  # 16 bits are rounded once
        weight.copy_(weight.to(wide) + self.scale * (self.lora_b.to(wide) @ self.lora_a.to(wide)))
        return self.base.requires_grad_(True)


def lora(
    model: nn.Module,
    rank: Count = 8,
    alpha: Positive = 16.0,
    target: Patterns = "*",
    train: Patterns = (),
    dropout: BelowOne = 0.0,
) -> nn.Module:
    """Replace the linear layers whose names match `target`. Of all other parameters only those that match `train`
    are trained.

    train: patterns of parameters, such as `head.*` for a new last layer. dropout: on the inputs of the thin
        matrices. Raises ValueError for a pattern that matches no name.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    model.requires_grad_(False)
    others = [named[name] for name in match_names(named, train, "train")]
    # Subclasses are left alone: that of nn.MultiheadAttention is never called, its weights are read. So are layers
    # whose weight is another's too, as that of an embedding: merged, the other would change with it.
    used = Counter(map(id, named.values()))
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and used[id(layer.weight)] == 1
    }
    for name in match_names(layers, target, "target", "linear layer with its own weights"):
        model = _replace_layer(model, name, LoraLinear(layers[name], rank, alpha, dropout))
    for param in others:  # a bias beside its layer's matrices too
        param.requires_grad_(True)
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Return the network with LoRA's layers merged into its weights, for export or for another `init_from`."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLinear):
            model = _replace_layer(model, name, layer.merge_weights())
    return model


def _replace_layer(model: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    if not name:  # the model is a single layer
        return layer
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
    return model
