"""The batches themselves: forms, fills, masks, cuts, and what a model is given."""

import numpy as np
import pytest
import torch
from torch import nn

from trainrun.data.sequences.collate import Packed, Padded, segment_mask
from trainrun.data.sequences.fields import Cut, Pieces
from trainrun.errors import PluginError
from trainrun.task.batches import inputs_and_target, run_model

A, B, C = torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])


def test_pairs_become_a_dict_with_a_mask():
    batch = Padded(("inputs", "target"))([(A, A + 10), (B, B + 10)])
    assert batch["inputs"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["target"].tolist() == [[11, 12, 13], [14, -100, -100]]
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert list(batch) == ["inputs", "target", "attention_mask"]
    inputs, target = inputs_and_target(batch)
    assert inputs is batch["inputs"]
    assert target is batch["target"]


def test_labels_stay_labels_and_equal_lengths_keep_the_form():
    padder = Padded(("inputs",))
    batch = padder([(A, 1), (B, 0)])
    assert batch["target"].tolist() == [1, 0]
    equal = padder([(A, 1), (A, 0)])
    assert equal.keys() == batch.keys()
    assert bool(equal["attention_mask"].all())


def test_dicts_lists_and_arrays():
    samples = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0], "labels": np.array([1, 2, 3], np.uint8), "name": "a"},
        {"input_ids": [4], "attention_mask": [1], "labels": np.array([7], np.uint8), "name": "b"},
    ]  # fmt: skip
    batch = Padded(("input_ids", "attention_mask", "labels"))(samples)
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [7, -100, -100]]
    assert batch["name"] == ["a", "b"]
    nested = Padded(("ids",))([({"ids": A, "kind": 0}, 2), ({"ids": B, "kind": 1}, 3)])
    assert nested["kind"].tolist() == [0, 1]
    assert nested["target"].tolist() == [2, 3]


def test_sequences_of_their_own_length_and_of_floats():
    batch = Padded(("x", "y"))(
        [{"x": torch.ones(3, 2), "y": A}, {"x": torch.ones(1, 2), "y": torch.arange(4)}]
    )
    assert batch["x"].sum((1, 2)).tolist() == [6, 2]
    assert batch["y"].shape == (2, 4)
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert "target_weight" not in Padded(("inputs",))([(torch.ones(2, 3), 1.0), (torch.ones(1, 3), 2.0)])


@pytest.mark.parametrize("collate", [Padded(), Padded(("x",)), Packed(("x",), 4)])
def test_whole_numbers_and_floats_get_one_type(collate):
    batch = collate([{"x": x, "n": torch.tensor(n)} for x, n in (([], 1), ([2, 1], 0.5), ([0.5], 2))])
    assert (batch["x"].dtype, batch["x"].sum(), batch["n"].sum()) == (torch.float32, 3.5, 3.5)


@pytest.mark.parametrize(
    "names", [("labels", "input_ids"), ("labels", "words", "input_ids"), ("labels", "words")]
)
@pytest.mark.parametrize("padder", [Padded(), Padded(width=9)])
def test_the_mask_is_of_the_inputs_whatever_comes_first(names, padder):
    longer = {"labels": [torch.arange(5), torch.arange(7)], "words": [A, C], "input_ids": [A, C]}
    batch = padder([{name: longer[name][row] for name in names} for row in range(2)])
    assert batch["attention_mask"].sum(1).tolist() == [3, 2]
    fixed = padder([{"labels": longer["labels"][row], "input_ids": A} for row in range(2)])
    assert fixed["attention_mask"].sum(1).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("width", "multiple", "found"), [(None, None, 3), (None, 4, 4), (5, None, 5), (5, 8, 8)]
)
def test_widths(width, multiple, found):
    assert Padded(("inputs",), width, multiple)([A, B])["inputs"].shape == (2, found)
    assert Padded((), width, multiple)([A, B])["inputs"].shape == (2, found)
    same = Padded((), width, multiple)([A, A])
    assert isinstance(same, torch.Tensor) == (found == 3)


def test_shapes_that_cannot_be_padded_are_still_a_fault():
    with pytest.raises(RuntimeError, match="equal size"):
        Padded()([torch.zeros(2, 3), torch.zeros(2, 4)])


def test_cuts():
    assert Cut(2)((A, A))[0].tolist() == [1, 2]
    assert Cut(2, left=True)({"ids": A, "x": torch.zeros(3)})["ids"].tolist() == [2, 3]
    assert Cut(1, names=("x",))({"ids": A, "x": torch.zeros(3, 2)})["x"].shape == (1, 2)
    assert Cut(1, names=("x",))({"ids": A, "x": torch.zeros(3, 2)})["ids"].tolist() == [1, 2, 3]
    assert [len(part) for part in Cut(2)((A, B, A))] == [2, 1, 2]


def test_pieces_of_pairs_stay_pairs():
    source = [(A, A + 10), (B, B + 10)]
    pieces = Pieces(source, np.array([3, 1]), 2, ("inputs", "target"))
    found = [tuple(part.tolist() for part in pieces[index]) for index in range(len(pieces))]
    assert found == [([1, 2], [11, 12]), ([3], [13]), ([4], [14])]
    assert pieces.lengths.tolist() == [2, 1, 1]
    assert pieces.describe(1) == "positions 2 and on of sample 0"


def test_a_pack():
    batch = Packed(("inputs", "target"), 4)([(A, A + 10), (B, B + 10), (C, C + 10)])
    assert batch["inputs"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch["target"].tolist() == [[11, 12, 13, 14], [15, 16, -100, -100]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2], [1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    labelled = Packed(("inputs",), 4)([(A, 7), (B, 8), (C, 9)])
    assert labelled["target"].tolist() == [[7, 8], [9, -100]]
    assert Packed(("ids",), 4)([{"ids": A, "n": "a"}, {"ids": B, "n": "b"}])["n"] == [["a", "b"]]
    assert Packed(("inputs",), 4)([A, torch.arange(0), B])["segment_ids"].tolist() == [[1, 1, 1, 3]]


def test_segment_masks_and_next_tokens():
    ids = torch.tensor([[1, 1, 2, 0]])
    assert segment_mask(ids).int()[0, 0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert segment_mask(ids, causal=True).int()[0, 0, 0].tolist() == [1, 0, 0, 0]


class Takes(nn.Module):
    def forward(self, inputs, attention_mask=None):
        return attention_mask


class TakesAll(nn.Module):
    def forward(self, inputs, **others):
        return others


class TakesSegments(nn.Module):
    def forward(self, inputs, segment_ids, position_ids):
        return segment_ids, position_ids


def test_a_model_gets_what_its_forward_names():
    padded = Padded(("inputs",))([(A, 1), (B, 2)])
    packed = Packed(("inputs",), 4)([(A, 1), (B, 2)])
    assert run_model(Takes(), padded["inputs"], padded) is padded["attention_mask"]
    assert list(run_model(TakesAll(), padded["inputs"], padded)) == ["attention_mask"]
    assert run_model(nn.Identity(), padded["inputs"], padded) is padded["inputs"]
    assert run_model(Takes(), A, (A, B)) is None
    assert run_model(TakesSegments(), packed["inputs"], packed)[1] is packed["position_ids"]
    for model in (Takes(), TakesAll()):
        with pytest.raises(
            PluginError, match="has no argument segment_ids .*; add one, or use data.padding=bucket"
        ):
            run_model(model, packed["inputs"], packed)
