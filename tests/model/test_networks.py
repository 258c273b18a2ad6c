"""Networks of pictures and vectors: shapes, sizes, that all of them trains, and where a block begins."""

from collections.abc import Callable

import pytest
import torch
from approved import refused
from torch import nn
from torch.nn.functional import cross_entropy

from trainrun.model.cnn import Cnn
from trainrun.model.layers import Residual
from trainrun.model.mlp import Mlp
from trainrun.model.mobilenet import Mobilenet
from trainrun.model.resnet import ResNet
from trainrun.model.vae import Vae, draw_code

BUILDS: list[Callable[[], nn.Module]] = [
    lambda: Mlp([1, 8, 8], 10),
    lambda: Mlp([1, 8, 8], 10, hidden=[], init="xavier"),
    lambda: Mlp([1, 8, 8], 10, hidden=[16], activation="gelu", dropout=0.1, norm="batch"),
    lambda: Mlp([1, 8, 8], 10, hidden=(16, 8), activation="tanh", norm="layer", init="default"),
    lambda: Cnn([1, 8, 8], 10),
    lambda: Cnn([1, 8, 8], 10, width=4, dropout=0.1, norm="layer", residual=False),
    lambda: Cnn([1, 8, 8], 10, width=4, norm="none", init="xavier"),
    lambda: ResNet([1, 8, 8], 10, width=8),
    lambda: ResNet([1, 8, 8], 10, size=50, width=8),
    lambda: Vae([1, 8, 8], 5, width=4, hidden=[12, 8]),
    lambda: Vae([1, 8, 8], 5, body="mlp", hidden=[12, 8]),
]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("build", BUILDS)
def test_every_parameter_changes_within_two_steps(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)  # two, because a branch behind a zero weight learns from the second on
    model, x, y = build(), torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        found = model(x)
        if isinstance(found, tuple):
            rebuilt, mean, log_var = found
            loss = (rebuilt - x).square().sum() + (mean.square() + log_var.exp() - log_var).sum()
        else:
            assert found.shape == (32, 10)
            loss = cross_entropy(found, y)
        loss.backward()
        optimizer.step()
    assert [name for name, value in model.named_parameters() if torch.equal(before[name], value)] == []


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 4), (1, 28, 28), (2, 9, 30), (3, 224, 224)])
def test_pictures_of_any_size_become_logits(shape: tuple[int, int, int]) -> None:
    cnn = Cnn(shape, 5, width=2)
    assert cnn.layers[-1].weight.shape[1] <= 4 * 13 * 20  # the head stays small, whatever the picture
    for model in (cnn, Mobilenet(shape, 5, width=4), ResNet(shape, 5, size=50, width=8)):
        assert model.eval()(torch.zeros(2, *shape)).shape == (2, 5)


def test_the_maps_of_the_cnn_lie_channels_last_whatever_the_input() -> None:
    model = Cnn([1, 8, 8], 10, width=4).eval()
    layouts = []
    for layer in model.layers[:8]:
        layer.register_forward_hook(lambda *call: layouts.append(call[-1].stride(1)))
    model(torch.zeros(2, 1, 8, 8))
    assert layouts == [1] * 8


def test_dropout_is_really_there() -> None:
    for model in (Mlp([64], 3, dropout=0.5), Cnn([1, 8, 8], 3, dropout=0.5, width=2)):
        assert [layer.p for layer in model.layers if isinstance(layer, nn.Dropout)][:1] == [0.5]


def test_the_light_network_is_light_and_its_wide_convolutions_are_depthwise() -> None:
    light = Mobilenet((1, 28, 28), 10)
    assert 7 * count(light) < count(Cnn((1, 28, 28), 10))
    convolutions = [layer for layer in light.modules() if isinstance(layer, nn.Conv2d)]
    assert all(layer.groups == layer.in_channels for layer in convolutions[1:] if layer.kernel_size == (3, 3))


@pytest.mark.parametrize(("size", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_the_sizes_of_the_resnet_are_those_of_the_paper(size: int, parameters: int) -> None:
    with torch.device("meta"):  # ImageNet, as torchvision counts them
        assert count(ResNet([3, 224, 224], 1000, size=size)) == parameters  # type: ignore[arg-type]


def test_the_stem_of_the_resnet_fits_the_picture() -> None:
    def first(side: int, stem: str = "auto") -> tuple[int, int]:
        layers = ResNet([3, side, side], 2, width=8, blocks=[1], stem=stem).layers  # type: ignore[arg-type]
        return layers[0].kernel_size[0], sum(isinstance(layer, nn.MaxPool2d) for layer in layers)

    assert first(28) == first(64) == first(224, "small") == (3, 0)
    assert first(96) == first(224) == first(32, "large") == (7, 1)


def test_a_block_of_the_resnet_begins_as_its_shortcut() -> None:
    for block in ResNet([1, 8, 8], 3, size=50, width=8).modules():
        if isinstance(block, Residual):
            assert not block.branch(torch.randn(2, block.branch[0].in_channels, 8, 8)).any()
    plain = ResNet([1, 8, 8], 3, width=8, zero_init_residual=False)
    assert all(block.branch[-1].weight.all() for block in plain.modules() if isinstance(block, Residual))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 9, 30), (1, 5, 5), (7,), (2, 3)])
def test_a_reconstruction_of_the_vae_has_the_shape_of_its_input(shape: tuple[int, ...]) -> None:
    model = Vae(shape, latent_dim=5, width=4, hidden=[12])
    rebuilt, mean, log_var = model(torch.randn(3, *shape))
    assert (rebuilt.shape, mean.shape, log_var.shape) == ((3, *shape), (3, 5), (3, 5))
    convolves = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    assert convolves == (len(shape) == 3 and min(shape[1:]) >= 8)


def test_code_of_the_vae_is_drawn_with_the_deviation_of_its_log_variance() -> None:
    code, noise = torch.randn(4, 6), torch.randn(4, 3)
    mean, log_var, drawn = draw_code(code, noise, training=False)
    torch.testing.assert_close(drawn, mean + log_var.exp().sqrt() * noise)


def test_noise_that_is_given_to_the_vae_is_the_only_chance() -> None:
    torch.manual_seed(0)
    model, x, noise = Vae((7,), 3), torch.randn(4, 7), torch.randn(4, 3)
    assert torch.equal(model(x, noise).reconstruction, model(x, noise).reconstruction)
    with refused(ValueError, "noise.size", "model.latent_dim"):
        model(x, noise[:, :1])  # would be the same in every dimension
    assert not torch.equal(model(x, noise).reconstruction, model(x, -noise).reconstruction)
    assert not torch.equal(model(x).reconstruction, model(x).reconstruction)
    model.eval()
    assert torch.equal(model(x).reconstruction, model(x, torch.zeros(4, 3)).reconstruction)
    with torch.autocast("cpu", torch.bfloat16):  # the variance is an exponential
        assert [part.dtype for part in model(x)] == [torch.bfloat16, torch.float32, torch.float32]


def test_what_is_no_picture_is_refused() -> None:
    with refused(ValueError):
        Cnn([28, 28], 10)
    with refused(ValueError):
        Mobilenet([1, 3, 8], 10)
    with refused(ValueError, "body=conv"):
        Vae([7], body="conv")
