"""The same parameter groups twice: by the settings, and as torch's own written down by hand."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD

LR, DECAY, LAYER_DECAY = 0.05, 0.1, 0.5
USUAL = (f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}")
HEAD = "{params: 'layers.2.*', lr: 0.02, momentum: 0.5}"
BY_SETTINGS = (
    *USUAL, f"optimizer.groups=[{HEAD}]", "optimizer.no_decay=auto", f"optimizer.layer_decay={LAYER_DECAY}",
)  # fmt: skip
BY_HAND = (
    "optimizer=custom", "optimizer._target_=exact_groups.ByHand", f"optimizer.lr={LR}",
    f"optimizer.weight_decay={DECAY}", "optimizer.momentum=0.9",
)  # fmt: skip


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Of `exact_parts.Net`, whose two layers are two depths."""
    first, last = (model.get_submodule(f"layers.{number}") for number in (0, 2))
    head = {"lr": 0.02, "momentum": 0.5}
    return [
        {"params": [first.weight], "lr": LR * LAYER_DECAY},
        {"params": [first.bias], "lr": LR * LAYER_DECAY, "weight_decay": 0.0},
        {"params": [last.weight], **head},
        {"params": [last.bias], "weight_decay": 0.0, **head},
    ]


class ByHand(SGD):
    """SGD with these groups."""

    parameter_groups = staticmethod(groups_of)
