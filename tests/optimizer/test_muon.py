"""Muon's matrices against torch's own and against the decomposition, and AdamW's part bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from trainrun.errors import PluginError
from trainrun.model.cnn import Cnn
from trainrun.model.gpt import Gpt
from trainrun.model.mlp import Mlp
from trainrun.optimizer.build_optimizer import build_optimizer, named_optimizer_state
from trainrun.optimizer.load_named_state import load_named_optimizer_state
from trainrun.optimizer.muon import Muon, hidden_matrices, orthogonalize
from trainrun.precision.update import skips_on_device


def network() -> nn.Module:
    torch.manual_seed(0)
    return Mlp([6], 3, hidden=[8, 5])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (2, 64)])
def test_the_direction_has_singular_values_near_one_and_the_same_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = orthogonalize(matrix, 10)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ found @ right.T
    assert (inside - inside.diagonal().diag()).abs().max() < 1e-6
    assert 0.65 < inside.diagonal().min() <= inside.diagonal().max() < 1.25


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9")
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_move_as_with_torchs_muon(rule: str, nesterov: bool) -> None:
    """Whose iteration rounds to bfloat16 on every device."""
    ours, theirs = (nn.Parameter(torch.randn(9, 5, generator=torch.Generator().manual_seed(2))) for _ in "ab")
    start = ours.detach().clone()
    words: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": rule}
    pair = (
        (ours, Muon([{"params": [ours], "muon": True}], **words)),
        (theirs, torch.optim.Muon([theirs], **words)),
    )
    for step in range(4):
        for param, optimizer in pair:
            param.grad = torch.randn(9, 5, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    assert (ours - theirs).norm() < 0.02 * (ours - start).norm()


def test_the_other_parameters_move_as_with_adamw_bit_for_bit() -> None:
    model = network()
    words: dict[str, Any] = {
        "lr": 0.01,
        "weight_decay": 0.1,
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "fused": True,
    }
    optimizer = Muon(Muon.parameter_groups(model), **words)
    others = optimizer.param_groups[1]["params"]
    twins = [nn.Parameter(param.detach().clone()) for param in others]
    plain = AdamW(twins, **words)
    for step in range(3):
        trained(model, optimizer, range(step, step + 1))
        for twin, param in zip(twins, others, strict=True):
            twin.grad = param.grad
        plain.step()
    for twin, param in zip(twins, others, strict=True):
        assert torch.equal(twin, param)


def names_of(model: nn.Module) -> list[str]:
    found = {id(param) for param in hidden_matrices(model)}
    return [name for name, param in model.named_parameters() if id(param) in found]


def test_embeddings_heads_and_vectors_are_left_to_adamw() -> None:
    model = Gpt(vocab_size=11, context=8, layers=1, width=8, heads=2, tied=True)
    kinds = ("attention.into", "attention.out", "widen", "narrow")
    assert names_of(model) == [f"blocks.0.{kind}.weight" for kind in kinds]
    assert all("conv" in name or "weight" in name for name in names_of(Cnn([1, 8, 8], 3)))
    groups = Muon.parameter_groups(model)
    held = [param for group in groups for param in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len(list(model.parameters()))


def test_a_filter_is_the_matrix_of_its_outputs() -> None:
    filters = nn.Parameter(torch.randn(4, 3, 2, 2))
    matrix = nn.Parameter(filters.detach().flatten(1).clone())
    for param in (filters, matrix):
        param.grad = torch.linspace(-1, 2, 48).view(param.shape)
        Muon([{"params": [param], "muon": True}], lr=0.1).step()
    assert torch.equal(filters.flatten(1), matrix)
    wide = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    wide.grad = torch.ones_like(wide)
    Muon([{"params": [wide], "muon": True}], lr=0.1).step()
    assert wide.is_contiguous(memory_format=torch.channels_last)


def test_the_state_is_saved_and_loaded_bit_for_bit() -> None:
    whole, first, second = network(), network(), network()
    trained(whole, build_optimizer(Muon, {"lr": 0.01}, whole)[0], range(6))
    optimizer, note = build_optimizer(Muon, {"lr": 0.01}, first)
    assert note.endswith("; 2 matrices by Muon, 4 other parameters by AdamW")
    trained(first, optimizer, range(3))
    tree = copy.deepcopy(named_optimizer_state(optimizer, first))
    second.load_state_dict(first.state_dict())
    again, _ = build_optimizer(Muon, {"lr": 0.01}, second)
    load_named_optimizer_state(again, second, tree)
    trained(second, again, range(3, 6))
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_without_a_hidden_matrix_is_refused() -> None:
    with refused(PluginError):
        build_optimizer(Muon, {}, nn.Linear(3, 2))


def test_a_step_whose_gradients_are_marked_changes_nothing_and_others_are_the_usual_ones() -> None:
    plain, marked = network(), network()
    words: dict[str, Any] = {"lr": 0.02, "fused": True}
    pairs = [(model, Muon(Muon.parameter_groups(model), **words)) for model in (plain, marked)]
    assert skips_on_device(pairs[1][1])
    found = torch.zeros(())
    pairs[1][1].found_inf, pairs[1][1].grad_scale = found, None  # type: ignore[attr-defined]
    before = [trained(*pair, range(3)) for pair in pairs]
    assert all(torch.equal(one, other) for one, other in zip(*before, strict=True))
    found.fill_(1)
    for param in marked.parameters():
        param.grad = torch.full_like(param, torch.nan)
    pairs[1][1].step()
    assert all(torch.equal(one, other) for one, other in zip(before[1], marked.parameters(), strict=True))
    found.fill_(0)
    after = [trained(*pair, range(3, 6)) for pair in pairs]
    assert all(torch.equal(one, other) for one, other in zip(*after, strict=True))


def test_complex_matrices_are_left_to_adamw() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model.register_parameter("waves", nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)))
    assert hidden_matrices(model) == [model[0].weight]
