"""ResNet: known sizes, stems, any picture, blocks that begin as their shortcut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainrun.model import choices as names
from trainrun.model.layers import Residual
from trainrun.model.resnet import SIZES, ResNet


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("size", "parameters"), [(18, 11_689_512), ("34", 21_797_672), (50, 25_557_032)])
def test_the_sizes_are_those_of_the_paper(size: int | str, parameters: int) -> None:
    with torch.device("meta"):  # ImageNet, as torchvision counts them
        assert count(ResNet([3, 224, 224], 1000, size=size)) == parameters


def test_the_names_of_the_sizes_are_known_without_torch() -> None:
    assert tuple(SIZES) == names.RESNET_SIZES


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 9, 30), (3, 96, 128)])
@pytest.mark.parametrize("size", [18, 50])
def test_pictures_of_any_size_become_logits(shape: tuple[int, ...], size: int) -> None:
    model = ResNet(shape, 5, size=size, width=8).eval()
    assert model(torch.zeros(2, *shape)).shape == (2, 5)


def test_the_stem_fits_the_picture() -> None:
    def first(side: int, stem: str = "auto") -> tuple[int, int]:
        layers = ResNet([3, side, side], 2, width=8, blocks=[1], stem=stem).layers
        return layers[0].kernel_size[0], sum(isinstance(layer, nn.MaxPool2d) for layer in layers)

    assert first(28) == first(64) == first(224, "small") == (3, 0)
    assert first(96) == first(224) == first(32, "large") == (7, 1)


@pytest.mark.parametrize("size", [18, 50])
def test_every_parameter_changes_within_two_steps(size: int) -> None:
    torch.manual_seed(0)
    model, x, y = ResNet([1, 8, 8], 3, size=size, width=8), torch.randn(12, 1, 8, 8), torch.arange(12) % 3
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert [name for name, value in model.named_parameters() if torch.equal(before[name], value)] == []


def test_a_block_begins_as_its_shortcut() -> None:
    for size in (18, 50):
        for block in ResNet([1, 8, 8], 3, size=size, width=8).modules():
            if isinstance(block, Residual):
                assert not block.branch(torch.randn(2, block.branch[0].in_channels, 8, 8)).any()
    plain = ResNet([1, 8, 8], 3, width=8, zero_init_residual=False)
    assert all(block.branch[-1].weight.all() for block in plain.modules() if isinstance(block, Residual))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"size": 19}, "size=19 is not known; choose 18, 34, 50"),
        ({"stem": "tiny"}, "stem=tiny is not known"),
        ({"blocks": [1, 0]}, r"blocks=\[1, 0\]"),
        ({"width": 0}, "width=0"),
        ({"norm": "group"}, "norm=group"),
    ],
)
def test_wrong_values_are_refused_in_words(words: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ResNet([1, 8, 8], 3, **words)  # type: ignore[arg-type]
