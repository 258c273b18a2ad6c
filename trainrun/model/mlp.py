"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from trainrun.limits import BelowOne, Count
from trainrun.model.choices import Activation, Norm, Scheme
from trainrun.model.layers import ACTIVATIONS, dropout_layers, initialize, norm_layers


class Mlp(nn.Module):
    """A network from inputs (B, *in_shape) to logits (B, num_classes), with dropout after every hidden layer."""

    def __init__(
        self,
        in_shape: Sequence[Count],
        num_classes: Count,
        hidden: Sequence[Count] | None = (256, 128),
        activation: Activation = "relu",
        dropout: BelowOne = 0.0,
        norm: Norm = "none",
        init: Scheme = "he",
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()] if len(in_shape) > 1 else []
        width = prod(in_shape)
        for next_width in hidden or ():
            layers += hidden_layer(width, next_width, activation, dropout, norm)
            width = next_width
        layers.append(nn.Linear(width, num_classes))
        super().__init__()
        self.in_shape = tuple(in_shape)
        self.layers = nn.Sequential(*layers)
        initialize(self, init)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def hidden_layer(width: int, next_width: int, act: str, dropout: float, norm: str) -> list[nn.Module]:
    """Return a linear layer, norm, activation and dropout. The linear layer has no bias if the norm would cancel it."""
    return [
        nn.Linear(width, next_width, bias=norm != "batch"),
        *norm_layers(norm, next_width, images=False),
        ACTIVATIONS[act](),
        *dropout_layers(dropout),
    ]
