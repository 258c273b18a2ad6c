"""A variational autoencoder (Kingma and Welling, 2013, arXiv:1312.6114), of convolutions or dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainrun.limits import Count
from trainrun.model.choices import Body, Scheme
from trainrun.model.layers import initialize
from trainrun.tensors import HALF_TYPES

SMALLEST_SIDE = 8  # of pictures for which `auto` takes convolutions
FIRST_CODE = 0.1  # how large the code is at the start, against what `init` makes of it


class VaeOutput(NamedTuple):
    """The output that the task `vae` expects. A custom network may return a plain tuple of the three tensors.

    reconstruction: of the shape of the inputs. mean, log_var: of the code of each sample, (B, latent_dim).
    """

    reconstruction: Tensor
    mean: Tensor
    log_var: Tensor


class Vae(nn.Module):
    """A network from inputs (B, *in_shape) through a random code (B, latent_dim) to their reconstruction.

    body: `conv` halves images (C, H, W) twice. `mlp` accepts any shape. `auto` is `conv` for images of at least 8 x
        8. width: channels of the first convolution. hidden: widths of the encoder's dense layers, which the decoder
        has in reverse order.

    Raises ValueError without a hidden layer, or if `conv` gets inputs that are not images.
    """

    def __init__(
        self,
        in_shape: Sequence[Count],
        latent_dim: Count = 16,
        body: Body = "auto",
        width: Count = 32,
        hidden: Sequence[Count] = (256,),
        init: Scheme = "he",
    ) -> None:
        shape = tuple(in_shape)
        if body == "conv" and (len(shape) != 3 or min(shape[1:]) < 4):
            raise ValueError(
                f"body=conv: in_shape={list(shape)} is not a picture of 4 x 4 or more; use body=mlp"
            )
        convolves = body == "conv" or (body == "auto" and len(shape) == 3 and min(shape[1:]) >= SMALLEST_SIDE)
        if not hidden:
            raise ValueError("hidden=[] needs one or more sizes")
        super().__init__()
        self.in_shape = shape
        if convolves:
            self.encoder, self.decoder = build_conv_layers(shape, latent_dim, width, tuple(hidden))
        else:
            self.encoder, self.decoder = build_dense_layers(shape, latent_dim, tuple(hidden))
        initialize(self, init)
        with torch.no_grad():  # codes begin near their prior; at full size exp(log_var) explodes
            self.encoder[-1].get_parameter("weight").mul_(FIRST_CODE)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as in the Cnn

    def forward(self, x: Tensor, noise: Tensor | None = None) -> VaeOutput:
        """Return reconstruction, mean and log_var.

        noise: (B, latent_dim), standard normal. If it is None, training draws it from torch's generator, and
            evaluation decodes the mean.
        """
        mean, log_var, drawn = draw_code(self.encoder(x), noise, self.training)
        if x.dtype in HALF_TYPES:  # then the weights are too
            drawn = drawn.to(x.dtype)
        return VaeOutput(self.decoder(drawn), mean, log_var)


def draw_code(code: Tensor, noise: Tensor | None, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, log_var and the sampled code, (B, latent_dim) each. code: (B, 2 latent_dim), the encoder's
    output.
    """
    if code.dtype in HALF_TYPES:
        code = code.float()  # the variance is an exponential
    mean, log_var = code.chunk(2, dim=1)
    if noise is None and training:
        noise = torch.randn_like(mean)
    if noise is not None and noise.shape != mean.shape:
        drawn, code_size = noise.shape[-1], mean.shape[-1]
        raise ValueError(f"data.augment.noise.size={drawn}: must be model.latent_dim={code_size}")
    return mean, log_var, mean if noise is None else mean + (0.5 * log_var).exp() * noise


def build_dense_layers(
    shape: tuple[int, ...], code: int, hidden: tuple[int, ...]
) -> tuple[nn.Sequential, nn.Sequential]:
    encoder = [nn.Flatten(), *build_hidden_layers([prod(shape), *hidden]), nn.Linear(hidden[-1], 2 * code)]
    decoder = [
        *build_hidden_layers([code, *hidden[::-1]]),
        nn.Linear(hidden[0], prod(shape)),
        nn.Unflatten(1, shape),
    ]
    return nn.Sequential(*encoder), nn.Sequential(*decoder)


def build_conv_layers(
    shape: tuple[int, ...], code: int, width: int, hidden: tuple[int, ...]
) -> tuple[nn.Sequential, nn.Sequential]:
    """Return encoder and decoder. The decoder repeats pixels before each convolution, which works for any image
    size.
    """
    channels, rows, columns = shape
    half = ((rows + 1) // 2, (columns + 1) // 2)
    middle = (2 * width, (half[0] + 1) // 2, (half[1] + 1) // 2)
    encoder = [
        nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(inplace=True),
        nn.Flatten(), *build_hidden_layers([prod(middle), *hidden]), nn.Linear(hidden[-1], 2 * code),
    ]  # fmt: skip
    decoder = [
        *build_hidden_layers([code, *hidden[::-1], prod(middle)]), nn.Unflatten(1, middle),
        nn.Upsample(half), nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(inplace=True),
        nn.Upsample((rows, columns)), nn.Conv2d(width, channels, 3, padding=1),
    ]  # fmt: skip
    return nn.Sequential(*encoder), nn.Sequential(*decoder)


def build_hidden_layers(sizes: Sequence[int]) -> list[nn.Module]:
    return [
        layer for now, after in pairwise(sizes) for layer in (nn.Linear(now, after), nn.ReLU(inplace=True))
    ]
