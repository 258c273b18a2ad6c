"""FP8 layers: where they are refused, which layers are chosen, and on a GPU that has them, that they train."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from approved import refused
from torch import nn

import trainrun as package
from trainrun.errors import ConfigError
from trainrun.transform.fp8 import find_swappable_layers, fp8_linear, swap_layers

CUDA = torch.device("cuda")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 24), nn.Linear(24, 32), nn.Linear(32, 16)
    )


def test_sizes_choose_the_layers_and_the_last_is_left_alone() -> None:
    assert find_swappable_layers(network()) == {"0"}
    assert find_swappable_layers(nn.Linear(32, 32)) == set()


@pytest.mark.parametrize("words", [["precision=bf16-mixed"], ["precision=16-mixed"], []])
def test_a_run_that_cannot_have_it_is_refused(workdir: Any, words: list[str]) -> None:
    with refused(ConfigError):
        package.train("precision.fp8=true", "parallel.accelerator=cpu", "trainer.max_steps=1", *words)


def test_an_older_gpu_is_refused_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0, and products .* need 8\.9 or more"):
        fp8_linear(network(), CUDA)


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(RuntimeError, match=r"needs torchao; pip install 'trainrun\[fp8\]'"):
        fp8_linear(network(), CUDA)


def test_torchao_is_asked_for_the_chosen_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def convert(model: nn.Module, *, module_filter_fn: Any, config: Any) -> None:
        asked.extend(name for name, module in model.named_modules() if module_filter_fn(module, name))

    torchao = ModuleType("torchao.float8")
    torchao.Float8LinearConfig = dict  # type: ignore[attr-defined]
    torchao.convert_to_float8_training = convert  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
    told = "precision.fp8=true: linear layers that compute their products in float8: 1"
    assert fp8_linear(network(), CUDA, compiled=True) == told
    assert fp8_linear(network(), CUDA).startswith(f"{told}; without trainer.compile=model this is slower")
    assert asked == ["0", "0"]
    with pytest.raises(RuntimeError, match="no linear layer but the last"):
        fp8_linear(nn.Linear(32, 32), CUDA)


# torchao says this of itself, and of torch, when it is imported
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torchao", "ignore:Failed to load")
def test_a_ragged_batch_is_computed_as_without_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes these products on a CPU too, where any size will do; a GPU takes multiples of 16 alone."""
    pytest.importorskip("torchao.float8", reason="torchao is not installed (28 MB, the extra fp8)")
    sizes: list[int] = []

    def product(a: torch.Tensor, b: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        sizes.append(a.shape[1])
        if a.shape[1] % 16:
            raise RuntimeError("Expected trailing dimension of mat1 to be divisible by 16")
        return scaled_mm(a, b, *more, **options)

    scaled_mm = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", product)
    torch.manual_seed(0)
    plain = network().to(torch.bfloat16)
    on = copy.deepcopy(plain)
    swap_layers(on, find_swappable_layers(on))
    x = torch.randn(29, 32, dtype=torch.bfloat16)
    losses = [model(x).float().square().sum() for model in (plain, on)]
    for loss in losses:
        loss.backward()
    assert len(sizes) >= 2  # forward and the weight's gradient
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.1)
    gradients = [model[0].weight.grad.float() for model in (plain, on)]
    assert (gradients[1] - gradients[0]).norm() < 0.2 * gradients[0].norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_trains_near_the_plain_layers_and_its_state_loads_both_ways() -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products of 8-bit floats")
    torch.manual_seed(0)
    plain = network().to(CUDA, torch.bfloat16)
    on = network().to(CUDA, torch.bfloat16)
    fp8_linear(on, CUDA)
    on.load_state_dict(plain.state_dict())
    x = torch.randn(29, 32, device=CUDA, dtype=torch.bfloat16)  # as the last batch of an epoch
    losses = [model(x).float().square().mean() for model in (plain, on)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.1)
    losses[1].backward()
    assert all(param.grad is not None for param in on.parameters())
    plain.load_state_dict(on.state_dict())
