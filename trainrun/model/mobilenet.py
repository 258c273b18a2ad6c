"""A light network for small images: inverted residual blocks of depthwise convolutions.

Source: Sandler et al., 2018 (MobileNetV2, arXiv:1801.04381), with fewer and narrower blocks. When: few weights (a
    seventh of those of `cnn`) and few operations (a fifth) are needed. When not: speed on a CPU, where depthwise
    convolutions are slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainrun.limits import BelowOne, Count
from trainrun.model.choices import Scheme
from trainrun.model.cnn import check_picture_shape
from trainrun.model.layers import Residual, dropout_layers, initialize

BLOCKS = ((1, 2), (2, 1), (2, 1), (4, 2), (4, 1))  # channels of each in widths, and its stride


class Mobilenet(nn.Module):
    """A network from images (B, *in_shape), with in_shape (C, H, W) of at least 4 x 4, to logits (B, num_classes).

    width: channels of the first convolution. expansion: the factor by which a block widens its channels inside. For
        28 x 28 and width 8: 17k parameters.
    """

    def __init__(
        self,
        in_shape: Sequence[Count],
        num_classes: Count,
        width: Count = 8,
        expansion: Count = 3,
        dropout: BelowOne = 0.0,
        init: Scheme = "he",
    ) -> None:
        channels, _, _ = shape = check_picture_shape(in_shape)
        now = width
        super().__init__()
        self.in_shape = shape
        layers: list[nn.Module] = [*conv_norm(channels, now, 3), nn.ReLU6(inplace=True)]
        for times, stride in BLOCKS:
            layers.append(inverted_block(now, times * width, stride, expansion))
            now = times * width
        self.layers = nn.Sequential(
            *layers, *conv_norm(now, 2 * now, 1), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            *dropout_layers(dropout), nn.Linear(2 * now, num_classes),
        )  # fmt: skip
        initialize(self, init)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # as in the Cnn

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def conv_norm(channels: int, then: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(channels, then, size, stride, size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(then)]


def inverted_block(channels: int, then: int, stride: int, expansion: int) -> nn.Module:
    """Return a block that widens the channels, convolves each channel separately, and narrows them again.

    It has a shortcut if the shape stays the same.
    """
    wide = expansion * channels
    branch = nn.Sequential(
        *conv_norm(channels, wide, 1), nn.ReLU6(inplace=True),
        *conv_norm(wide, wide, 3, stride, groups=wide), nn.ReLU6(inplace=True), *conv_norm(wide, then, 1),
    )  # fmt: skip
    return Residual(branch) if stride == 1 and channels == then else branch
