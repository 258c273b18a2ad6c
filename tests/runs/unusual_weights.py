"""Networks that do more with their weights than read them from a module in the forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from exact_parts import Net
from torch import Tensor, nn
from torch.nn.functional import linear


class Kept(Net):
    """A network whose forward reads a weight from where its constructor has put it."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        weight = self.layers[0].weight
        owners: dict[str, Any] = {
            "list": [[weight]],
            "object": SimpleNamespace(pair=(weight, 1)),
            "function": lambda: weight,
            "view": weight.detach()[1:3],
            "buffer": weight.detach(),
            "parameter": nn.Parameter(weight.data),
        }
        if owner == "buffer":
            self.register_buffer("kept", owners[owner])
        else:
            self.kept = owners[owner]

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept() if callable(self.kept) else self.kept
        while not isinstance(kept, Tensor):
            kept = kept[0] if isinstance(kept, list | tuple) else kept.pair
        return self.layers(x) * (1 + linear(x, kept).mean(-1, keepdim=True))


class Changed(Net):
    """A network whose forward changes a weight in place."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layers[2].weight
        with torch.no_grad():
            (weight.data if self.through_data else weight).clamp_(-0.1, 0.1)
        return self.layers(x)


class Marked(Net):
    """A network with a hook of a gradient, and with attributes of weights that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.layers[0].weight, self.layers[2].weight
        first.scale, last.scale = 0.5, 0.7
        first.register_hook(lambda gradient: 0.5 * gradient)
        last.register_hook(lambda gradient: 0.1 * gradient).remove()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.layers[0].weight.scale * self.layers[2].weight.scale


class Hooked(Net):
    """A network with a hook that runs when a gradient has been added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
