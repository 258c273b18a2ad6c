"""The sum, its gradients and the accuracy are the plain ones, piece by piece, and the logits are never whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from approved import refused
from things import supports_lstm
from torch import Tensor, nn

from trainrun.errors import ConfigError, PluginError
from trainrun.interfaces import StepOutput
from trainrun.model.gpt import Gpt
from trainrun.model.lstm import Lstm
from trainrun.task import chunked_loss as chunked_module
from trainrun.task.chunked_loss import choose_num_chunks
from trainrun.task.language_modeling import LanguageModeling
from trainrun.transform.lora import lora

VOCABULARY = 60


def gpt(**keywords: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, 16, layers=1, width=16, heads=2, **keywords)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def lstm() -> nn.Module:
    torch.manual_seed(0)
    return Lstm(VOCABULARY, width=16)


MODELS = {"tied": gpt, "untied": lambda: gpt(tied=False), "lstm with a bias": lstm}
BATCH = torch.randint(VOCABULARY, (5, 16), generator=torch.Generator().manual_seed(3))
IGNORED = torch.where(torch.arange(16) < 9, torch.roll(BATCH, -1, 1), -100)


def trained(
    model: nn.Module, chunks: int | str, mode: torch.dtype | None = None
) -> tuple[StepOutput, nn.Module]:
    task = LanguageModeling(bytes_per_token=3.0, loss_chunks=chunks)
    task.check_model(model)
    with torch.autocast("cpu", mode, enabled=mode is not None):
        out = task.step(model, (BATCH, IGNORED))
    out.loss_sum.backward(torch.tensor(0.125, dtype=out.loss_sum.dtype))
    return out, model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("chunks", [2, 7, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_plain_in_float64(name: str, chunks: int) -> None:
    plain, on = MODELS[name]().double(), MODELS[name]().double()
    wanted, _ = trained(plain, 1)
    found, _ = trained(on, chunks)
    torch.testing.assert_close(found.loss_sum, wanted.loss_sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(on), gradients(plain), rtol=1e-10, atol=1e-12)
    for key in ("acc", "bpb"):
        torch.testing.assert_close(found.sums[key](), wanted.sums[key](), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast_and_with_bf16_weights(name: str) -> None:
    """Where the plain gradient of the last layer is rounded as a whole, this one is as close to the true one."""
    if "lstm" in name and not supports_lstm(torch.bfloat16):
        pytest.skip("this build of torch has no LSTM in bfloat16 for this CPU")
    true = gradients(trained(MODELS[name]().double(), 1)[1])
    for half in (False, True):
        pair = []
        for chunks in (1, 4):
            model = MODELS[name]().bfloat16() if half else MODELS[name]()
            out, _ = trained(model, chunks, None if half else torch.bfloat16)
            pair.append((out.loss_sum, gradients(model)))
        torch.testing.assert_close(pair[1][0], pair[0][0], rtol=1e-5, atol=0)
        for key, value in true.items():
            assert pair[1][1][key].dtype is pair[0][1][key].dtype
            errors = [(grads[key].double() - value).norm() for _, grads in pair]
            assert errors[1] <= 1.3 * errors[0]


def test_one_piece_is_the_plain_path() -> None:
    a, b = gpt(), gpt()
    assert torch.equal(trained(a, 1)[0].loss_sum, trained(b, "auto")[0].loss_sum)
    for key, value in gradients(a).items():
        assert torch.equal(value, gradients(b)[key])


GIB = 2**30


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "limit", "expected"),
    [
        (4096, 50257, 4 * GIB, 1),
        (32 * 1024, 50257, 38 * GIB, 1),  # the GPT of 124 million weights on a card of 80 GB
        (32 * 1024, 50257, 10 * GIB, 5),  # on one of 24 GB: 25 GiB in pieces of 5
        (64 * 1024, 50257, 38 * GIB, 3),
        (1000, 100, 10**6, 1),  # 1.6 MB do not fit, and are less than the smallest piece
        (3, 10**9, 0, 3),  # never more pieces than tokens
        (10**6, 10**6, None, 1),  # nobody said a limit
    ],
)
def test_auto_makes_pieces_only_where_memory_needs_them(
    tokens: int, vocabulary: int, limit: int | None, expected: int
) -> None:
    pieces = choose_num_chunks("auto", tokens, vocabulary, limit)
    assert pieces == expected
    if limit is not None and 1 < pieces < tokens:  # they fit
        assert 16 * -(-tokens // pieces) * vocabulary <= 1.01 * limit / 2


def test_number_of_pieces_that_is_named_is_taken() -> None:
    assert choose_num_chunks(8, 4096, 50257, 10**15) == 8
    assert choose_num_chunks(8, 3, 50257, 0) == 3


@pytest.mark.parametrize(("limit", "expected"), [(16 * 80 * VOCABULARY, 0), (16 * 80 * VOCABULARY - 1, 1)])
def test_step_takes_one_piece_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    monkeypatch.setattr(chunked_module, "SMALLEST_PIECE", 1)
    task, calls = LanguageModeling(), 0

    def counted(*arguments: Any) -> StepOutput:
        nonlocal calls
        calls += 1
        return LanguageModeling.step_in_chunks(task, *arguments)

    monkeypatch.setattr(task, "step_in_chunks", counted)
    task.limit_memory(limit)
    out = task.step(gpt(), (BATCH, IGNORED))
    assert calls == expected
    torch.testing.assert_close(
        out.loss_sum, LanguageModeling(loss_chunks=1).step(gpt(), (BATCH, IGNORED)).loss_sum
    )


def test_the_logits_are_not_kept() -> None:
    def kept(chunks: int) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        model = gpt()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = LanguageModeling(loss_chunks=chunks).step(model, (BATCH, IGNORED))
        assert out.loss_sum.requires_grad
        return sum(sizes.values())

    assert kept(1) - kept(4) >= 4 * BATCH.numel() * VOCABULARY


def test_a_frozen_last_layer_gets_no_gradient() -> None:
    model = gpt(tied=False)
    model.head.weight.requires_grad_(False)
    other = copy.deepcopy(model)
    trained(model, 4)
    trained(other, 1)
    assert model.head.weight.grad is None
    torch.testing.assert_close(model.tokens.weight.grad, other.tokens.weight.grad, rtol=1e-4, atol=1e-6)


class Users(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(tokens[..., None].float().expand(-1, -1, 4))


class Wrong(Users):
    def forward(self, tokens: Tensor, return_states: bool = False) -> Tensor:
        return self.head(tokens[..., None].float().expand(-1, -1, 4))


def test_a_model_that_cannot_is_refused_and_auto_leaves_it_alone() -> None:
    with refused(ConfigError, "task.loss_chunks"):
        LanguageModeling(loss_chunks=4).check_model(Users())
    changed = lora(Gpt(20, 12, layers=1, width=16, heads=2, tied=False), target="head")
    with refused(ConfigError):
        LanguageModeling(loss_chunks=4).check_model(changed)
    LanguageModeling().check_model(Users())
    assert LanguageModeling().step(Users(), (BATCH, IGNORED)).loss_sum > 0
    with refused(PluginError):
        LanguageModeling(loss_chunks=4).step(Wrong(), (BATCH, IGNORED))
