from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from trainrun.model.cnn import Cnn
from trainrun.model.layers import Residual, initialize
from trainrun.transform.residual_ends import last_norms, zero_gammas


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


class Block(nn.Module):
    """As torchvision writes it; plain: without the shortcut, where zeros would end all learning."""

    def __init__(self, plain: bool = False, grows: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) if grows else None
        self.plain = plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.plain:
            return out
        out += x if self.downsample is None else self.downsample(x)
        return out.relu()


class Positions(nn.Module):
    """Adds to a norm what is no shortcut around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.positions = nn.LayerNorm(4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.positions if x.sum() > 0 else self.norm(x) + self.positions[: len(x)]


def test_zero_gamma_is_for_norms_at_the_end_of_a_residual_branch_alone() -> None:
    model = nn.Sequential(Block(), Block(grows=True), Block(plain=True), Positions())
    assert last_norms(model) == {"0.bn2", "1.bn2"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero_gammas(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.bn2.weight", "1.bn2.weight"}
    assert not model.state_dict()["0.bn2.weight"].any()
    with pytest.raises(ValueError, match="model.init=zero-gamma: Block has no residual branch"):
        zero_gammas(Block(plain=True))
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
