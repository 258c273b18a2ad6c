"""Parts that the reference networks share: layers by name, and the residual block."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from trainrun.model.choices import SCHEMES

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class Residual(nn.Module):
    """`x + branch(x)`, or `shortcut(x) + branch(x)` if the branch changes the shape."""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        skipped = x if self.shortcut is None else self.shortcut(x)
        return skipped + self.branch(x)  # type: ignore[no-any-return]

    def last_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the last layer that has any. If all of them are zero, the block is the identity."""
        return [parameters for layer in self.branch if (parameters := list(layer.parameters()))][-1]


def norm_layers(name: str, num_features: int, images: bool) -> list[nn.Module]:
    """Return a list with one norm layer, or an empty list for `none`.

    images: whether inputs are (B, C, H, W). Then `layer` normalises over C, H and W together.
    """
    if name == "none":
        return []
    if name == "batch":
        return [nn.BatchNorm2d(num_features) if images else nn.BatchNorm1d(num_features)]
    return [nn.GroupNorm(1, num_features) if images else nn.LayerNorm(num_features)]


def dropout_layers(dropout: float) -> list[nn.Module]:
    """Return a list with one dropout layer; an empty list for a rate of 0."""
    return [nn.Dropout(dropout)] if dropout else []


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHTED = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


def initialize(model: nn.Module, scheme: str, zero_init_residual: bool = False) -> None:
    """Initialize the weights in place with torch's global random generator, and set biases to zero.

    zero_init_residual: set the last layer of each residual branch (its norm, or the convolution without a norm) to
        zero, so that every block starts as the identity. It helps deep networks (Goyal et al., 2017,
        arXiv:1706.02677, section 5.1).

    Raise ValueError for an unknown scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"init={scheme} is no scheme; choose {', '.join(SCHEMES)}")
    for module in model.modules():
        if scheme in ("he", "xavier") and isinstance(module, WEIGHTED):
            initialize_layer(module, scheme)
    if zero_init_residual:
        for module in model.modules():
            if isinstance(module, Residual):
                for parameter in module.last_parameters():
                    nn.init.zeros_(parameter)


def initialize_layer(layer: nn.Module, scheme: str) -> None:
    """Initialize the weight of one layer. Its class is in `WEIGHTED`."""
    assert isinstance(layer, WEIGHTED)
    is_computed = nn.utils.parametrize.is_parametrized(layer, "weight")  # as by weight_norm
    weight = layer.weight.detach().clone() if is_computed else layer.weight
    if scheme == "xavier":
        nn.init.xavier_uniform_(weight)
    else:
        mode: Literal["fan_in", "fan_out"] = (
            "fan_in" if isinstance(layer, (nn.Linear, *TRANSPOSED)) else "fan_out"
        )
        nn.init.kaiming_normal_(weight, mode=mode, nonlinearity="relu")
    if is_computed:
        layer.weight = weight
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
