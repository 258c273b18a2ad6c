"""Freeze parameters by the patterns of their names: they get no gradient, and the optimizer never sees them.

When: the first layers of a pretrained network (`init_from`), with little data. When not: parameters that are to be
trained later: `trainrun.hook.unfreeze`. A frozen batch norm still updates its running statistics, as in torch.
Gain: no gradients, no optimizer state, and no backward below the first trained layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainrun.patterns import matching


def freeze(model: nn.Module, patterns: str | Sequence[str], keep: str | Sequence[str] = ()) -> nn.Module:
    """patterns: of the names of parameters, as `layers.0.*`; keep: of those among them that are trained all the same.

    Raises ValueError for a pattern that fits no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    kept = set(matching(names, keep, "keep"))
    for name in matching(names, patterns, "patterns"):
        model.get_parameter(name).requires_grad_(name in kept)
    return model
