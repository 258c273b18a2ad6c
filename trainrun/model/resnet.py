"""Residual networks for images of any size (He et al., 2015, arXiv:1512.03385)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainrun.limits import BelowOne, Count
from trainrun.model.choices import Norm, ResnetSize, Scheme, Stem
from trainrun.model.cnn import check_picture_shape
from trainrun.model.layers import Residual, dropout_layers, initialize, norm_layers

# blocks of the four stages, and whether a block is a bottleneck
SIZES: dict[int, tuple[tuple[int, ...], bool]] = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
}
BOTTLENECK = 4  # how many times wider than its middle a bottleneck ends
LARGE_SIDE = 96  # from here on `auto` takes the stem that leaves a sixteenth of the places


class ResNet(nn.Module):
    """A network from images (B, *in_shape), with in_shape (C, H, W), to logits (B, num_classes).

    size: 18, 34 or 50 layers. blocks: the number of blocks per stage, in place of the numbers that `size` sets. Every
        stage after the first halves the sides of the image and doubles the channels. width: channels of the first
        stage.
    stem: `small` keeps the size (3 x 3, for CIFAR). `large` divides each side by 4 (7 x 7 and pooling, for ImageNet).
        `auto` is `large` for images of at least 96 x 96. Bottleneck blocks have their stride in the 3 x 3 convolution.
    zero_init_residual: every block starts as the identity (Goyal et al., 2017, arXiv:1706.02677).
    """

    def __init__(
        self,
        in_shape: Sequence[Count],
        num_classes: Count,
        size: ResnetSize = 18,
        blocks: Sequence[Count] | None = None,
        width: Count = 64,
        stem: Stem = "auto",
        norm: Norm = "batch",
        dropout: BelowOne = 0.0,
        zero_init_residual: bool = True,
        init: Scheme = "he",
    ) -> None:
        channels, rows, columns = shape = check_picture_shape(in_shape)
        usual, bottleneck = SIZES[size]
        large = stem == "large" or (stem == "auto" and min(rows, columns) >= LARGE_SIDE)
        super().__init__()
        self.in_shape = shape
        layers = stem_layers(channels, width, norm, large)
        outside = width
        for stage, count in enumerate(blocks or usual):
            for number in range(count):
                stride = 2 if stage and not number else 1
                layers += residual_block(outside, width << stage, stride, norm, bottleneck)
                outside = (width << stage) * (BOTTLENECK if bottleneck else 1)
        self.layers = nn.Sequential(*layers)
        self.drop = nn.Sequential(*dropout_layers(dropout))
        self.head = nn.Linear(outside, num_classes)
        initialize(self, init, zero_init_residual)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as in the Cnn

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.layers(x).mean((2, 3))))  # type: ignore[no-any-return]


def stem_layers(channels: int, width: int, norm: str, large: bool) -> list[nn.Module]:
    layers = [
        *conv_with_norm(channels, width, 7 if large else 3, 2 if large else 1, norm),
        nn.ReLU(inplace=True),
    ]
    return [*layers, nn.MaxPool2d(3, stride=2, padding=1)] if large else layers


def residual_block(channels: int, width: int, stride: int, norm: str, bottleneck: bool) -> list[nn.Module]:
    """Return a residual block of two 3 x 3 convolutions. With `bottleneck`: of 1 x 1, 3 x 3 and 1 x 1 convolutions."""
    wide = width * BOTTLENECK if bottleneck else width
    if bottleneck:
        branch = [*conv_with_norm(channels, width, 1, 1, norm), nn.ReLU(inplace=True)]
        branch += [
            *conv_with_norm(width, width, 3, stride, norm),
            nn.ReLU(inplace=True),
            *conv_with_norm(width, wide, 1, 1, norm),
        ]
    else:
        branch = [*conv_with_norm(channels, width, 3, stride, norm), nn.ReLU(inplace=True)]
        branch += conv_with_norm(width, wide, 3, 1, norm)
    same = stride == 1 and channels == wide
    shortcut = None if same else nn.Sequential(*conv_with_norm(channels, wide, 1, stride, norm))
    return [Residual(nn.Sequential(*branch), shortcut), nn.ReLU(inplace=True)]


def conv_with_norm(channels: int, next_channels: int, kernel: int, stride: int, norm: str) -> list[nn.Module]:
    """Return a convolution and its norm. It has a bias only without a norm."""
    layer = nn.Conv2d(channels, next_channels, kernel, stride, kernel // 2, bias=norm == "none")
    return [layer, *norm_layers(norm, next_channels, images=True)]
