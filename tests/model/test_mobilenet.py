"""The light network: depthwise, of any size of picture, lighter than the Cnn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainrun.model.cnn import Cnn
from trainrun.model.mobilenet import Mobilenet


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 5, 7), (1, 28, 28)])
def test_pictures_become_logits_and_every_weight_gets_a_gradient(shape: tuple[int, ...]) -> None:
    model = Mobilenet(shape, 5, width=4)
    logits = model(torch.rand(6, *shape))
    assert logits.shape == (6, 5)
    logits.square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_it_is_light_and_its_wide_convolutions_are_depthwise() -> None:
    def weights(model: nn.Module) -> int:
        return sum(weight.numel() for weight in model.parameters())

    light = Mobilenet((1, 28, 28), 10)
    assert 7 * weights(light) < weights(Cnn((1, 28, 28), 10))
    convolutions = [layer for layer in light.modules() if isinstance(layer, nn.Conv2d)]
    assert all(layer.groups == layer.in_channels for layer in convolutions[1:] if layer.kernel_size == (3, 3))


def test_what_is_no_picture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[channels, height, width\]"):
        Mobilenet((28, 28), 10)
