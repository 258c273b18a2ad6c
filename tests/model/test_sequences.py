"""Gpt and Lstm: what a position may see, packs, kernels, sizes."""

from __future__ import annotations

import pytest
import torch
from approved import refused
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainrun.model.attention import causal_attention, fastest_kernel
from trainrun.model.choices import KERNELS
from trainrun.model.gpt import Gpt
from trainrun.model.lstm import Lstm

SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 24}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed))


def gpt(**words: object) -> Gpt:
    torch.manual_seed(0)
    return Gpt(11, **(SMALL | words)).double().eval()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model", [lambda: gpt(), lambda: gpt(positions="learned"), lambda: Lstm(11, width=8)]
)
def test_every_parameter_changes(model) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    network, given = model().double(), tokens(4, 24)  # all 24 learned positions
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        logits = network(given)
        assert logits.shape == (4, 24, 11)
        cross_entropy(logits.flatten(0, 1), given.flatten()).backward()
        optimizer.step()
    assert [name for name, value in network.named_parameters() if torch.equal(before[name], value)] == []


@pytest.mark.parametrize(
    "model", [gpt, lambda: gpt(positions="learned", tied=False), lambda: Lstm(11, width=8)]
)
def test_no_position_sees_a_later_one(model) -> None:  # type: ignore[no-untyped-def]
    network, given = model(), tokens(2, 12)
    changed = given.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    one, other = network(given), network(changed)
    torch.testing.assert_close(one[:, :7], other[:, :7])
    assert not torch.allclose(one[:, 7:], other[:, 7:])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_pack_is_its_sequences(kernel: str, positions: str) -> None:
    network = gpt(attention=kernel, positions=positions)
    first, second = tokens(1, 9), tokens(1, 6, seed=1)
    row = torch.cat([first, second, torch.full((1, 5), 10)], 1)
    segments = torch.tensor([[1] * 9 + [2] * 6 + [0] * 5])
    places = torch.cat([torch.arange(9), torch.arange(6), torch.arange(5)])[None]
    together = network(row, segments, places)
    torch.testing.assert_close(together[:, :9], network(first))
    torch.testing.assert_close(together[:, 9:15], network(second))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 64])
def test_all_kernels_agree(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 10, width, dtype=torch.float64) for _ in range(3))
    exact = causal_attention(query, key, value, None, 0.0, "math")
    slack = 1e-12 if dtype is torch.float64 else 0.05
    for kernel in KERNELS:
        found = causal_attention(query.to(dtype), key.to(dtype), value.to(dtype), None, 0.0, kernel)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=slack, atol=slack)


@pytest.mark.parametrize(
    ("dtype", "length", "kernel"),
    [
        (torch.float32, 64, "flash"),
        (torch.bfloat16, 256, "plain"),
        (torch.bfloat16, 1024, "flash"),
        (torch.float16, 64, "plain"),
        (torch.float16, 4096, "flash"),
    ],
)
def test_auto_is_a_rule(dtype: torch.dtype, length: int, kernel: str) -> None:
    query = torch.randn(1, 1, length, 16, dtype=dtype)
    assert fastest_kernel("cpu", dtype, length) == kernel
    assert fastest_kernel("cuda", dtype, length) == "flash"
    found = causal_attention(query, query, query, None, 0.0, "auto")
    assert torch.equal(found, causal_attention(query, query, query, None, 0.0, kernel))


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    network = gpt()
    given = tokens(1, 8)
    places = torch.arange(8)[None]
    one = network(given, torch.ones_like(given), places)
    other = network(given, torch.ones_like(given), places + 9)
    torch.testing.assert_close(one, other)
    stretched = network(given, torch.ones_like(given), places * 2)
    assert not torch.allclose(one, stretched)


@pytest.mark.parametrize("outputs", ["each", "last"])
def test_padding_behind_the_tokens_changes_nothing(outputs: str) -> None:
    torch.manual_seed(0)
    network = Lstm(5, vocab_size=11, width=8, outputs=outputs).double()
    given = tokens(1, 6)
    padded = torch.cat([given, torch.full((1, 3), 10)], 1)
    mask = torch.arange(9)[None] < 6
    alone, behind = network(given), network(padded, mask)
    torch.testing.assert_close(alone, behind if outputs == "last" else behind[:, :6])


def test_heads_that_do_not_fit_and_a_sequence_beyond_the_context_are_refused() -> None:
    for words in ({"width": 18, "heads": 4}, {"width": 6, "heads": 2}):
        with refused(ValueError):
            Gpt(11, **words)  # type: ignore[arg-type]
    with refused(ValueError, "context=24"):
        gpt()(tokens(1, 25))
