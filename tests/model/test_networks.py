"""Mlp and Cnn: shapes, options, and that everything in them trains."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainrun.model.cnn import Cnn
from trainrun.model.mlp import Mlp

BUILDS: list[Callable[[], nn.Module]] = [
    lambda: Mlp([1, 8, 8], 10),
    lambda: Mlp([1, 8, 8], 10, hidden=[], init="xavier"),
    lambda: Mlp([1, 8, 8], 10, hidden=[16], activation="gelu", dropout=0.1, norm="batch"),
    lambda: Mlp([1, 8, 8], 10, hidden=(16, 8), activation="tanh", norm="layer", init="default"),
    lambda: Cnn([1, 8, 8], 10),
    lambda: Cnn([1, 8, 8], 10, width=4, dropout=0.1, norm="layer", residual=False),
    lambda: Cnn([1, 8, 8], 10, width=4, norm="none", init="xavier"),
]


@pytest.mark.parametrize("build", BUILDS)
def test_every_parameter_changes_within_two_steps(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)  # two, because a branch behind a zero weight learns from the second on
    model, x, y = build(), torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    still = [name for name, value in model.named_parameters() if torch.equal(before[name], value)]
    assert still == []
    assert model(x).shape == (32, 10)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 4), (1, 28, 28), (2, 9, 30), (3, 64, 96), (3, 224, 224)])
def test_the_cnn_takes_any_size_of_picture(shape: tuple[int, int, int]) -> None:
    model = Cnn(shape, 5, width=2).eval()
    assert model(torch.zeros(2, *shape)).shape == (2, 5)
    assert model.layers[-1].weight.shape[1] <= 4 * 13 * 20  # the head stays small, whatever the picture


def test_the_maps_of_the_cnn_lie_channels_last_whatever_the_input() -> None:
    model = Cnn([1, 8, 8], 10, width=4).eval()
    layouts = []
    for layer in model.layers[:8]:
        layer.register_forward_hook(lambda *call: layouts.append(call[-1].stride(1)))
    model(torch.zeros(2, 1, 8, 8))
    assert layouts == [1] * 8


def test_the_mlp_takes_vectors_and_flattens_the_rest() -> None:
    torch.manual_seed(0)
    vectors, pictures = Mlp([64], 3), Mlp([1, 8, 8], 3)
    vectors.load_state_dict(dict(zip(vectors.state_dict(), pictures.state_dict().values(), strict=True)))
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(vectors(x.flatten(1)), pictures(x))


def test_dropout_is_really_there() -> None:
    for model in (Mlp([64], 3, dropout=0.5), Cnn([1, 8, 8], 3, dropout=0.5, width=2)):
        assert [layer.p for layer in model.layers if isinstance(layer, nn.Dropout)][:1] == [0.5]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Mlp(None, 10), "in_shape is not known"),  # type: ignore[arg-type]
        (lambda: Mlp([0], 10), r"in_shape=\[0\]"),
        (lambda: Mlp([4], None), "num_classes is not known"),  # type: ignore[arg-type]
        (lambda: Mlp([4], 0), "num_classes=0 must be at least 1"),
        (lambda: Mlp([4], 2, hidden=[8, 0]), r"hidden=\[8, 0\]"),
        (lambda: Mlp([4], 2, activation="relux"), "activation=relux is not known; choose relu, gelu"),
        (lambda: Mlp([4], 2, norm="bacht"), "norm=bacht is not known; choose none, batch, layer"),
        (lambda: Mlp([4], 2, dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (lambda: Mlp([4], 2, init="x"), "init=x is no scheme"),
        (lambda: Cnn([28, 28], 10), r"in_shape=\[28, 28\] must be \[channels, height, width\]"),
        (lambda: Cnn([1, 3, 8], 10), "too small: pictures of 4 x 4"),
        (lambda: Cnn([1, 8, 8], 10, width=0), "width=0 must be at least 1"),
    ],
)
def test_wrong_values_are_refused_in_words(build: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()
