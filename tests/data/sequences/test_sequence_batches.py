"""The batches themselves: forms, fills, masks, cuts, and what a model is given."""

from collections import OrderedDict, namedtuple
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from approved import refused
from torch import nn

from trainrun.data.batch import attach_fields, detach_fields, map_leaves, reattach_fields
from trainrun.data.sequences.collate import PackCollate, PadCollate, stack_samples
from trainrun.data.sequences.fields import PiecesDataset, SequenceCutter
from trainrun.data.split_batch import repeat_rows, select_rows
from trainrun.interfaces import batch_fields
from trainrun.task.batches import run_model, split_inputs_and_target
from trainrun.tensors import segment_mask

pytestmark = pytest.mark.usefixtures("read_here")

A, B, C = torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])


Pair = namedtuple("Pair", "x y")


def structure(batch):
    """The containers of a batch, and the shape of each tensor in them."""
    if isinstance(batch, dict):
        return type(batch), {key: structure(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and not isinstance(batch[0], str):
        return type(batch), [structure(part) for part in batch]
    return tuple(batch.shape) if isinstance(batch, torch.Tensor) else list(batch)


def test_pairs_stay_pairs_with_a_mask_beside_them():
    batch = PadCollate(("inputs", "target"))([(A, A + 10), (B, B + 10)])
    inputs, target = batch
    assert type(batch) is tuple
    assert inputs.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert target.tolist() == [[11, 12, 13], [14, -100, -100]]
    fields = batch_fields(batch)
    assert fields["attention_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert list(fields) == ["attention_mask"]
    assert split_inputs_and_target(batch) == (inputs, target)


def test_labels_stay_labels_and_equal_lengths_keep_the_form():
    padder = PadCollate(("inputs",))
    batch = padder([(A, 1), (B, 0)])
    assert batch[1].tolist() == [1, 0]
    equal = padder([(A, 1), (A, 0)])
    assert structure(equal) == structure(batch)
    assert bool(batch_fields(equal)["attention_mask"].all())


@pytest.mark.parametrize(
    "sample",
    [
        lambda x: x,
        lambda x: (x, x + 1),
        lambda x: [x, x + 1],
        lambda x: Pair(x, x + 1),
        lambda x: (x,),
        lambda x: (x, 3, x.float()),
        lambda x: ((x, x.float()), 1),
        lambda x: ({"input_ids": x, "kind": 2}, {"labels": x, "boxes": [x[:, None].float()]}),
        lambda x: {"input_ids": x, "more": {"y": x, "size": (3, 4)}},
        lambda x: OrderedDict(x=x, y=(x, "name")),
        lambda x: (x.tolist(), 0.5),
    ],
)
def test_a_batch_has_the_structure_of_its_samples_whatever_their_lengths(sample):
    equal, unequal = PadCollate()([sample(A), sample(A)]), PadCollate()([sample(A), sample(B)])
    if isinstance(unequal, dict):
        unequal.pop("attention_mask")
    assert structure(equal) == structure(unequal)


def test_parts_that_lie_deeper_are_filled_by_their_role():
    batch = PadCollate()(
        [({"ids": a, "size": 1}, {"labels": a, "boxes": a[:, None].float()}) for a in (A, B)]
    )
    assert batch[0]["ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch[1]["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    assert batch_fields(batch)["attention_mask"].sum(1).tolist() == [3, 1]
    assert batch_fields(batch)["size"].tolist() == [1, 1]


@pytest.mark.parametrize("collate", [PadCollate(), stack_samples])
@pytest.mark.parametrize(
    "nest", [lambda sample: sample, lambda sample: (sample, 1), lambda sample: {"a": [sample]}]
)
def test_a_key_that_only_later_samples_have_is_not_lost(collate, nest):
    with pytest.raises(ValueError, match="its samples have different structures: w is not in every sample"):
        collate([nest({"x": A}), nest({"x": A, "w": 1.0})])


def test_samples_of_unlike_structure_are_a_fault():
    with refused(ValueError):
        PadCollate()([{"x": A}, {"x": B, "y": A}])


def with_doubled(batch):
    return map_leaves(batch, lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf)


def pickled(batch):
    return reattach_fields(ForkingPickler.loads(ForkingPickler.dumps(detach_fields(batch))))


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "way", [with_doubled, pickled, lambda batch: repeat_rows(select_rows(batch, 0, 2, 2), 2)]
)
def test_what_lies_beside_a_batch_goes_its_ways_with_it(way, bare):
    batch = PadCollate()([A, B] if bare else [(A, 1), (B, 2)])
    found = way(batch)
    assert type(found) is type(batch)
    rows = (found if bare else found[0]).shape[0]
    assert (batch_fields(found)["attention_mask"] > 0).sum(1).tolist() == [3, 1] * (rows // 2)


def test_fields_come_to_a_batch_and_leave_the_tensors_of_a_data_set_alone():
    batch = attach_fields((A, B), {"noise": C})
    assert batch_fields(batch)["noise"] is C
    assert batch[0].data_ptr() == A.data_ptr()
    assert not batch_fields((A, B))
    assert attach_fields({"x": A, "noise": B}, {"noise": C})["noise"] is B


def test_dicts_lists_and_arrays():
    samples = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0], "labels": np.array([1, 2, 3], np.uint8), "name": "a"},
        {"input_ids": [4], "attention_mask": [1], "labels": np.array([7], np.uint8), "name": "b"},
    ]  # fmt: skip
    batch = PadCollate(("input_ids", "attention_mask", "labels"))(samples)
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [7, -100, -100]]
    assert batch["name"] == ["a", "b"]
    nested = PadCollate(("inputs.ids",))([({"ids": A, "kind": 0}, 2), ({"ids": B, "kind": 1}, 3)])
    assert nested[0]["kind"].tolist() == [0, 1]
    assert nested[1].tolist() == [2, 3]


def test_sequences_of_their_own_length_and_of_floats():
    batch = PadCollate(("x", "y"))(
        [{"x": torch.ones(3, 2), "y": A}, {"x": torch.ones(1, 2), "y": torch.arange(4)}]
    )
    assert batch["x"].sum((1, 2)).tolist() == [6, 2]
    assert batch["y"].shape == (2, 4)
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, False, False]]
    labelled = PadCollate(("inputs",))([(torch.ones(2, 3), 1.0), (torch.ones(1, 3), 2.0)])
    assert "target_weight" not in batch_fields(labelled)


@pytest.mark.parametrize("collate", [PadCollate(), PadCollate(("x",)), PackCollate(("x",), 4)])
def test_whole_numbers_and_floats_get_one_type(collate):
    batch = collate([{"x": x, "n": torch.tensor(n)} for x, n in (([], 1), ([2, 1], 0.5), ([0.5], 2))])
    assert (batch["x"].dtype, batch["x"].sum(), batch["n"].sum()) == (torch.float64, 3.5, 3.5)


@pytest.mark.parametrize(
    "names", [("labels", "input_ids"), ("labels", "words", "input_ids"), ("labels", "words")]
)
@pytest.mark.parametrize("padder", [PadCollate(), PadCollate(width=9)])
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
    assert PadCollate(("inputs",), width, multiple)([A, B]).shape == (2, found)
    assert PadCollate((), width, multiple)([A, B]).shape == (2, found)
    same = PadCollate((), width, multiple)([A, A])
    assert same.shape == (2, found)
    assert bool(batch_fields(same)) == (found != 3)


def test_shapes_that_cannot_be_padded_are_still_a_fault():
    with pytest.raises(RuntimeError, match="equal size"):
        PadCollate()([torch.zeros(2, 3), torch.zeros(2, 4)])


def test_cuts():
    assert SequenceCutter(2)((A, A))[0].tolist() == [1, 2]
    assert SequenceCutter(2, left=True)({"ids": A, "x": torch.zeros(3)})["ids"].tolist() == [2, 3]
    assert SequenceCutter(1, names=("x",))({"ids": A, "x": torch.zeros(3, 2)})["x"].shape == (1, 2)
    assert SequenceCutter(1, names=("x",))({"ids": A, "x": torch.zeros(3, 2)})["ids"].tolist() == [1, 2, 3]
    assert [len(part) for part in SequenceCutter(2)((A, B, A))] == [2, 1, 2]


def test_pieces_of_pairs_stay_pairs():
    source = [(A, A + 10), (B, B + 10)]
    pieces = PiecesDataset(source, np.array([3, 1]), 2, ("inputs", "target"))
    found = [tuple(part.tolist() for part in pieces[index]) for index in range(len(pieces))]
    assert found == [([1, 2], [11, 12]), ([3], [13]), ([4], [14])]
    assert pieces.lengths.tolist() == [2, 1, 1]
    assert pieces.describe(1) == "positions 2 and on of sample 0"


def test_a_pack():
    batch = PackCollate(("inputs", "target"), 4)([(A, A + 10), (B, B + 10), (C, C + 10)])
    assert type(batch) is tuple
    assert batch[0].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch[1].tolist() == [[11, 12, 13, 14], [15, 16, -100, -100]]
    assert batch_fields(batch)["segment_ids"].tolist() == [[1, 1, 1, 2], [1, 1, 0, 0]]
    assert batch_fields(batch)["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    labelled = PackCollate(("inputs",), 4)([(A, 7), (B, 8), (C, 9)])
    assert labelled[1].tolist() == [[7, 8], [9, -100]]
    assert PackCollate(("ids",), 4)([{"ids": A, "n": "a"}, {"ids": B, "n": "b"}])["n"] == [["a", "b"]]
    bare = PackCollate(("inputs",), 4)([A, torch.arange(0), B])
    assert batch_fields(bare)["segment_ids"].tolist() == [[1, 1, 1, 3]]


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


class TakesIds(nn.Module):
    def forward(self, input_ids, kind, attention_mask=None):
        return input_ids, kind, attention_mask


def test_a_model_gets_what_its_forward_names():
    padded = PadCollate(("inputs",))([(A, 1), (B, 2)])
    packed = PackCollate(("inputs",), 4)([(A, 1), (B, 2)])
    assert run_model(Takes(), padded[0], padded) is batch_fields(padded)["attention_mask"]
    assert list(run_model(TakesAll(), padded[0], padded)) == ["attention_mask"]
    assert run_model(nn.Identity(), padded[0], padded) is padded[0]
    assert run_model(Takes(), A, (A, B)) is None
    found = run_model(TakesSegments(), packed[0], packed)
    assert found[1] is batch_fields(packed)["position_ids"]
    named = PadCollate()([({"input_ids": A, "kind": 0}, 2), ({"input_ids": B, "kind": 1}, 3)])
    ids, kind, mask = run_model(TakesIds(), named[0], named)
    assert (ids.shape, kind.tolist(), mask.sum(1).tolist()) == ((2, 3), [0, 1], [3, 1])
    assert run_model(nn.Identity(), named[0], named) is named[0]
