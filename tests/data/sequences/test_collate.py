"""Samples into a batch: whole columns at once give what torch's own collate gives part by part."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from trainrun.data.sequences.collate import PadCollate, list_plain_columns, stack_samples
from trainrun.interfaces import IGNORED

Pair = namedtuple("Pair", "x y")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.ones(3), 1), (torch.zeros(3), 2)],
        [(torch.ones(2, 2), 0.5, "a", True), (torch.zeros(2, 2), 1.5, "b", False)],
        [(torch.ones(3), 1), (torch.zeros(3), 2.5)],
        [(1,), (2,)],
        [(torch.ones(()),)],
    ],
)
def test_columns_of_plain_tuples_are_collated_as_torch_does(samples: list[Any]) -> None:
    assert list_plain_columns(samples)
    batch = stack_samples(samples)
    assert type(batch) is tuple
    assert same(batch, default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(3), torch.zeros(3)],
        [[torch.ones(3), 1], [torch.zeros(3), 2]],
        [Pair(torch.ones(3), 1), Pair(torch.zeros(3), 2)],
        [(torch.ones(3), np.float32(1)), (torch.zeros(3), np.float32(2))],
        [(torch.ones(3), (1, 2)), (torch.zeros(3), (3, 4))],
        [(torch.ones(3), torch.nn.Parameter(torch.ones(1))), (torch.ones(3), torch.ones(1))],
        [{"x": 1}, {"x": 2}],
        [(), ()],
    ],
)
def test_other_samples_have_no_plain_columns(samples: list[Any]) -> None:
    assert list_plain_columns(samples) == []
    assert type(stack_samples(samples)) is type(samples[0]) or isinstance(samples[0], torch.Tensor)


def test_tuples_of_unlike_lengths_form_no_batch() -> None:
    with pytest.raises(RuntimeError):
        stack_samples([(torch.ones(3), 1), (torch.ones(3),)])


def test_a_sequence_that_a_few_samples_did_not_show_is_padded() -> None:
    samples = [{"x": torch.ones(2), "y": torch.tensor([1])}, {"x": torch.ones(3), "y": torch.tensor([1, 2])}]
    batch = PadCollate(("x",))(samples)
    assert batch["x"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["y"].tolist() == [[1, IGNORED], [1, 2]]
    with pytest.raises(RuntimeError, match="equal size"):
        PadCollate(("x",))(
            [{"x": torch.ones(2), "y": torch.ones(1, 2)}, {"x": torch.ones(3), "y": torch.ones(1, 3)}]
        )
