"""Vae: both bodies, any shape, noise that is given or drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainrun.model.vae import Vae

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 9, 30), (1, 5, 5), (7,), (2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reconstruction_has_the_shape_of_its_input(shape: tuple[int, ...]) -> None:
    model = Vae(shape, latent_dim=5, width=4, hidden=[12])
    rebuilt, mean, log_var = model(torch.randn(3, *shape))
    assert (rebuilt.shape, mean.shape, log_var.shape) == ((3, *shape), (3, 5), (3, 5))


def test_pictures_from_eight_on_are_convolved() -> None:
    def convolves(shape: tuple[int, ...], body: str = "auto") -> bool:
        return any(isinstance(layer, nn.Conv2d) for layer in Vae(shape, body=body).modules())

    assert convolves((1, 8, 8))
    assert convolves((1, 5, 5), "conv")
    assert not convolves((1, 5, 5))
    assert not convolves((64,))
    assert not convolves((1, 28, 28), "mlp")


@pytest.mark.parametrize("shape", [(1, 8, 8), (7,)])
def test_every_parameter_changes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Vae(shape, 3, width=4, hidden=[12, 8]), torch.randn(16, *shape)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        rebuilt, mean, log_var = model(x)
        ((rebuilt - x).square().sum() + (mean.square() + log_var.exp() - log_var).sum()).backward()
        optimizer.step()
    assert [name for name, value in model.named_parameters() if torch.equal(before[name], value)] == []


def test_noise_that_is_given_is_the_only_chance() -> None:
    torch.manual_seed(0)
    model, x, noise = Vae((7,), 3), torch.randn(4, 7), torch.randn(4, 3)
    assert torch.equal(model(x, noise).reconstruction, model(x, noise).reconstruction)
    with pytest.raises(ValueError, match=r"noise\.size=1: must be model\.latent_dim=3"):
        model(x, noise[:, :1])  # would be the same in every dimension
    assert not torch.equal(model(x, noise).reconstruction, model(x, -noise).reconstruction)
    assert not torch.equal(model(x).reconstruction, model(x).reconstruction)
    model.eval()
    assert torch.equal(model(x).reconstruction, model(x, torch.zeros(4, 3)).reconstruction)


def test_the_code_is_float32_under_autocast() -> None:
    model = Vae((1, 8, 8), 3, width=4)
    with torch.autocast("cpu", torch.bfloat16):
        rebuilt, mean, log_var = model(torch.randn(2, 1, 8, 8))
    assert (rebuilt.dtype, mean.dtype, log_var.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("shape", "words", "text"),
    [
        ((7,), {"body": "conv"}, "body=conv: .* is no picture"),
        ((1, 8, 8), {"body": "dense"}, "body=dense is not known; choose auto, conv, mlp"),
        ((7,), {"latent_dim": 0}, "latent_dim=0"),
        ((7,), {"hidden": []}, "hidden"),
        (None, {}, "in_shape is not known"),
    ],
)
def test_wrong_values_are_refused_in_words(shape: object, words: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Vae(shape, **words)  # type: ignore[arg-type]
