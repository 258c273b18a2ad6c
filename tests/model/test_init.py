from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from trainrun.model.cnn import Cnn
from trainrun.model.layers import Residual, initialize


def wide_layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(16, 64, 3), nn.Linear(256, 64))


def test_he_keeps_the_variance_by_fan_out_of_convolutions_and_fan_in_of_linear_layers() -> None:
    torch.manual_seed(0)
    model = wide_layers()
    initialize(model, "he")
    assert model[0].weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)
    assert model[1].weight.std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.05)
    assert model[0].bias.abs().max() == 0
    assert model[1].bias.abs().max() == 0


def test_xavier_is_uniform_within_its_bound() -> None:
    torch.manual_seed(0)
    model = wide_layers()
    initialize(model, "xavier")
    bound = (6 / (256 + 64)) ** 0.5
    assert model[1].weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert model[1].weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.mark.parametrize("scheme", ["he", "xavier"])
def test_the_global_seed_decides_the_weights(scheme: str) -> None:
    weights = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model = wide_layers()
        initialize(model, scheme)
        weights.append(model[0].weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@pytest.mark.parametrize("scheme", ["default", "he"])
def test_zero_init_makes_every_residual_block_the_identity(norm: str, scheme: str) -> None:
    model = Cnn([1, 8, 8], 10, width=4, norm=norm, init=scheme, zero_init_residual=True)
    (block,) = [module for module in model.layers if isinstance(module, Residual)]
    x = torch.randn(2, 8, 2, 2)
    assert torch.equal(block(x), x)
    plain = Cnn([1, 8, 8], 10, width=4, norm=norm, init=scheme, zero_init_residual=False)
    (block,) = [module for module in plain.layers if isinstance(module, Residual)]
    assert not torch.equal(block(x), x)


def test_he_counts_the_outputs_of_a_transposed_convolution() -> None:
    transposed = nn.ConvTranspose2d(16, 64, 3)
    initialize(transposed, "he")
    assert transposed.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_computed_weights_are_drawn_too(norm: Any) -> None:
    layer = nn.Linear(40, 30)
    torch.manual_seed(1)
    initialize(layer, "he")
    wanted = layer.weight.detach().clone()
    computed = norm(nn.Linear(40, 30))
    torch.manual_seed(1)
    initialize(computed, "he")
    own = (
        computed.weight if norm is parametrizations.weight_norm else computed.parametrizations.weight.original
    )
    assert torch.allclose(own, wanted, atol=1e-6)
