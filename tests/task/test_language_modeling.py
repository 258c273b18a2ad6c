"""The next token: sums, shifts, ignored places, mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.errors import DataError, PluginError
from trainrun.task.language_modeling import LanguageModeling, shift_targets


class Table(nn.Module):
    """Logits of the next token from the token alone."""

    def __init__(self, vocabulary: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocabulary, vocabulary, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


TOKENS = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
TARGET = torch.tensor([[2, 3, 4, -100], [3, 2, -100, -100]])


def test_the_loss_is_a_sum_over_the_tokens_that_count() -> None:
    task, model = LanguageModeling(bytes_per_token=4), Table()
    assert task.count((TOKENS, TARGET)) == 5
    out = task.step(model, (TOKENS, TARGET))
    mean = cross_entropy(model(TOKENS).flatten(0, 1), TARGET.flatten())
    torch.testing.assert_close(out.loss_sum, 5 * mean)
    torch.testing.assert_close(out.sums["bpb"](), 5 * mean.detach() / math.log(2) / 4)  # type: ignore[operator]
    right = (model(TOKENS).argmax(-1) == TARGET).sum()
    assert out.sums["acc"]() == right  # type: ignore[operator]


def test_without_targets_the_tokens_are_moved_by_one() -> None:
    wanted = torch.tensor([[2, 3, 4, -100], [3, 2, 1, -100]])
    assert shift_targets(TOKENS, None).tolist() == wanted.tolist()
    assert LanguageModeling().count(TOKENS) == 6
    assert LanguageModeling().count({"input_ids": TOKENS}) == 6


@pytest.mark.parametrize(
    ("key", "marks", "wanted"),
    [
        ("attention_mask", [[True, True, True, False]], [2, 3, -100, -100]),
        ("segment_ids", [[1, 1, 2, 2]], [2, -100, 4, -100]),
        ("segment_ids", [[1, 1, 0, 0]], [2, -100, -100, -100]),
    ],
)
def test_no_target_crosses_a_border(key: str, marks: list[Any], wanted: list[int]) -> None:
    assert shift_targets(TOKENS[:1], torch.tensor(marks)).tolist() == [wanted]
    batch = {"input_ids": TOKENS[:1], key: torch.tensor(marks)}
    assert LanguageModeling().count(batch) == sum(one >= 0 for one in wanted)


def test_what_does_not_fit_is_said() -> None:
    with refused(DataError):
        LanguageModeling().count(torch.zeros(2, 3, 4))
    with refused(DataError):
        LanguageModeling().step(Table(), (TOKENS, TARGET[:, 0]))
    with refused(DataError):
        LanguageModeling().step(Table(4), (TOKENS % 4, TARGET))
    with refused(PluginError):
        LanguageModeling().step(nn.Sequential(Table(), nn.Flatten(0, 1)), (TOKENS, TARGET))


def test_labels_of_transformers_are_shifted_where_it_is_said() -> None:
    labels = TOKENS.clone()
    labels[0, :1] = -100  # a prompt
    batch = {"input_ids": TOKENS, "labels": labels}
    plain = {"input_ids": TOKENS}
    task = LanguageModeling(shift_labels=True)
    assert task.step(Table(), batch).loss_sum == LanguageModeling().step(Table(), plain).loss_sum
    assert task.count(batch) == LanguageModeling().count(plain)
    labels[0, :3] = -100
    assert task.split_batch(batch)[1].tolist()[0] == [-100, -100, *TOKENS[0, 3:].tolist(), -100]
    padded = batch | {
        "attention_mask": torch.ones_like(TOKENS).index_fill(1, torch.tensor([TOKENS.shape[1] - 1]), 0)
    }
    assert (task.split_batch(padded)[1][:, -2:] == -100).all()


@pytest.mark.parametrize("ignored", [0, 2])
def test_a_copy_as_target_is_refused(ignored: int) -> None:
    labels = TOKENS.clone()
    labels[:, :ignored] = -100
    with refused(DataError, "task.shift_labels=true"):
        LanguageModeling().step(Table(), {"input_ids": TOKENS, "labels": labels})
    assert LanguageModeling(shift_labels=False).step(Table(), (TOKENS, labels)).loss_sum > 0
    same = torch.ones_like(TOKENS)
    assert LanguageModeling().step(Table(), (same, same)).loss_sum > 0  # the next token is the same one
