"""Where lengths come from, what needs nothing, what is refused, and the verdict against brute force."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from approved import refused
from torch.utils.data import IterableDataset, Subset

from trainrun.data.facts import describe_source
from trainrun.data.order.sampler import Plan
from trainrun.data.pipeline import open_batches
from trainrun.data.sequences.choose import plan_sequences
from trainrun.data.sequences.collate import PadCollate
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Columns
from trainrun.errors import DataError
from trainrun.interfaces import batch_fields

LENGTHS = [5, 3, 9, 1, 7, 7, 2, 8, 4, 6, 3, 12]


class Text:
    """Counts what was read."""

    def __init__(self, make=lambda length, index: torch.arange(length), lengths=LENGTHS):
        self.make, self.own, self.read = make, lengths, 0

    def __len__(self):
        return len(self.own)

    def __getitem__(self, index):
        self.read += 1
        return self.make(self.own[index], index)


class Knowing(Text):
    @property
    def lengths(self):
        return np.array(self.own)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.arange(3)])


def chosen(source, batch_size=2, **options):
    base = Plan(len(source) if hasattr(source, "__len__") else 0, batch_size)
    return plan_sequences(source, base, StreamOptions("data.train", True, 1, 1, **options))


def refuses(source, key, **options):
    with refused(DataError, key):
        chosen(source, **options)


def test_lengths_are_read_only_where_they_are_unknown():
    knowing, plain = Knowing(), Text()
    assert "reading" not in chosen(knowing, padding="bucket").line
    assert knowing.read < 12
    assert "measured by reading 12 samples in" in chosen(plain, padding="bucket").line
    assert plain.read == 0  # a child process reads them
    part = chosen(Subset(Knowing(), [0, 2, 4]), padding="bucket")
    assert "lengths: 5 to 9, median 7" in part.line
    assert "reading" not in part.line


def test_lengths_that_do_not_fit_the_samples_are_not_believed():
    def pair(length, index):
        return torch.arange(length + 2), torch.arange(length + 2)

    line = chosen(Knowing(pair), padding="bucket").line
    assert "lengths: 3 to 14, median 7.5" in line
    assert "measured by reading" in line


def test_reading_leaves_the_generators_alone():
    def noisy(length, index):
        random.random()
        torch.rand(3)
        return torch.arange(length)

    before = torch.get_rng_state(), random.getstate()
    chosen(Text(noisy), padding="pack")
    chosen(Text(noisy))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_rows_in_memory_are_cut_on_the_left_and_stay_columns():
    source = {"ids": torch.arange(10).view(2, 5), "y": np.arange(2), "x": torch.zeros(2, 5)}
    found = chosen(source, truncate="left", max_sequence_length=3)
    assert isinstance(found.source, Columns)
    assert found.collate is None
    assert found.source[1]["ids"].tolist() == [7, 8, 9]
    assert found.source[1]["x"].shape == (5,)
    assert chosen(source, padding="bucket").collate is None
    packed = chosen(source, 1, padding="pack", max_sequence_length=10)
    batch = packed.collate([packed.source[0], packed.source[1]])
    assert batch["segment_ids"].tolist() == [[1] * 5 + [2] * 5]


@pytest.mark.parametrize("truncate", ["left", "right"])
@pytest.mark.parametrize("memory", [True, False])
def test_targets_that_are_no_sequences_are_not_cut(truncate, memory):
    columns = {"ids": torch.arange(40).view(4, 10), "target": torch.ones(4, 7, dtype=torch.int64)}
    rows = [{name: value[i] for name, value in columns.items()} for i in range(4)]
    source = columns if memory else Text(lambda length, index: rows[index], [10] * 4)
    for padding in ("longest", "max"):
        batches, _ = open_batches(
            source,
            StreamOptions(
                "data.train", True, 4, 1, padding=padding, truncate=truncate, max_sequence_length=3
            ),
        )
        batch = next(iter(batches.epoch(0))).data
        assert (batch["ids"].shape, batch["target"].shape) == ((4, 3), (4, 7))


@pytest.mark.parametrize("numbers", [[1, 2, 3], [0.5, 1.0, 2.0]])
def test_lists_of_numbers_are_rows_where_they_are_equally_long_too(numbers):
    equal = Text(lambda length, index: {"x": numbers, "label": index})
    batches, _ = open_batches(equal, StreamOptions("data.train", True, 4, 1))
    first = next(iter(batches.epoch(0))).data
    assert first["x"].tolist() == [numbers] * 4
    assert describe_source(equal).shape == (3,)
    assert PadCollate()([(numbers, 1), (numbers, 0)])[0].tolist() == [numbers] * 2


def test_a_sample_that_is_a_list_of_numbers_has_as_many_fields():
    rating = Text(lambda length, index: [index, 2, 0.5])
    batches, _ = open_batches(rating, StreamOptions("data.train", False, 4, 1))
    user, item, value = next(iter(batches.epoch(0))).data
    assert (user.tolist(), item.tolist(), value.tolist()) == ([0, 1, 2, 3], [2] * 4, [0.5] * 4)


def test_all_samples_of_one_length_stay_in_their_container():
    def pair(length, index):
        return torch.arange(4), torch.tensor(index)

    found = chosen(Text(pair))
    assert found.line == ""
    inputs, target = found.collate([pair(0, 1), pair(0, 2)])
    assert inputs.shape == (2, 4)
    assert target.tolist() == [1, 2]


def test_a_length_that_no_probe_showed_is_padded_all_the_same():
    lengths = [4] * 100
    lengths[50] = 2
    found = chosen(Text(lengths=lengths))
    assert not batch_fields(found.collate([torch.arange(4)] * 2))
    mixed = batch_fields(found.collate([torch.arange(4), torch.arange(2)]))
    assert mixed["attention_mask"].tolist() == [[True] * 4, [True, True, False, False]]


def test_waves_of_unequal_length_are_padded_in_validation_too():
    source = Text(lambda length, index: (torch.ones(length), index % 2))
    training = StreamOptions("data.train", True, 1, 1, padding="bucket")
    for options in (replace(training, padding="longest"), training, replace(training, training=False)):
        found = plan_sequences(source, Plan(12, 2), options)
        batch = found.collate([source[1], source[3]])
        assert batch[0].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert batch_fields(batch)["attention_mask"].tolist() == [[True] * 3, [True, False, False]]


@pytest.mark.parametrize("padding", ["longest", "bucket", "pack", "token_budget"])
@pytest.mark.parametrize(
    ("size", "truncate", "multiple"),
    [(None, "right", None), (6, "right", 4), (6, "drop", None), (5, "split", None)],
)
def test_the_verdict_says_what_batches_hold(padding, size, truncate, multiple):
    lengths = np.random.default_rng(1).integers(1, 30, 300).tolist()
    tokens = 90 if padding == "token_budget" else None
    found = chosen(Knowing(lengths=lengths), 8, padding=padding, max_tokens=tokens, max_sequence_length=size,
                   truncate=truncate, pad_multiple=multiple)  # fmt: skip
    empty = total = 0
    for share in found.plan.iterate_rank_batches(0, 0):
        batch = batch_fields(found.collate([found.source[index] for index in share.indices.tolist()]))
        mask = batch["attention_mask"] if "attention_mask" in batch else batch["segment_ids"] > 0
        empty += int((~mask).sum())
        total += mask.numel()
    percent = 100 * empty / total
    words = f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.1f} %"
    assert f"{padding} {words}" in found.line.replace("under 0.1 %", "0.0 %")
    assert f"lengths: {min(lengths)} to {max(lengths)}, median {np.median(lengths):g}; padding " in found.line
    if size is not None:
        above = 100 * np.mean(np.array(lengths) > size)
        word = {"right": "truncated", "drop": "left out", "split": "split"}[truncate]
        assert f"{above:.0f} % {word}" in found.line


def test_what_does_not_go_together_is_refused():
    refuses(Text(), "data.padding=token_budget", padding="token_budget")
    refuses(Text(), "data.max_tokens", max_tokens=8)
    refuses(Text(), "data.truncate=left", truncate="left")
    refuses(Text(), "data.padding=pack", padding="pack", collate_fn=list)
    refuses(Text(), "data.pad_multiple", pad_multiple=8, collate_fn=list)
    refuses(Text(), "data.max_tokens", padding="token_budget", max_tokens=8)
    refuses(Text(), "data.train", truncate="drop", max_sequence_length=0)
    refuses(torch.zeros(4, 3), "data.padding=bucket", padding="bucket")
    refuses(torch.zeros(4, 3), "data.pad_multiple", pad_multiple=8)
    refuses(Stream(), "data.padding=bucket", padding="bucket")
    refuses(Stream(), "data.truncate=split", truncate="split", max_sequence_length=2)
    refuses(Stream(), "data.padding=max", padding="max")
    refuses(Text(lambda length, index: (1, 2, 3)), "data.padding=bucket", padding="bucket")
    refuses(Text(lengths=[]), "", padding="bucket")
    refuses(Text(), "data.train", padding="pack", batch_size=7)

    def two(length, index):
        return {"input_ids": torch.arange(length), "labels": torch.arange(length + 1)}

    refuses(Text(two), "data.train", padding="pack")
    refuses(Text(lambda length, index: (torch.arange(length), 0.5)), "data.train", padding="pack")


class Drawn(Text):
    def __getitem__(self, index, generator=None):
        return super().__getitem__(index)


def test_pieces_of_samples_that_are_drawn_anew_are_refused():
    refuses(Drawn(), "data.truncate=split", truncate="split", max_sequence_length=2)
    assert chosen(Drawn(), truncate="left", max_sequence_length=2) is not None


def test_a_sample_that_cannot_be_read_is_named_where_all_are_needed():
    def broken(length, index):
        if index == 3:
            raise KeyError("gone")
        return torch.arange(length)

    refuses(Text(broken), "", padding="bucket")
    assert "lengths: 2 to 12" in chosen(Text(broken)).line, "the others are sequences all the same"
    knowing = chosen(Knowing(broken), padding="bucket")
    assert "lengths: 1 to 12" in knowing.line
    assert "reading" not in knowing.line
    assert chosen(Text(lambda length, index: 1 / 0)) is None


def test_an_iterable_is_padded_batch_by_batch():
    found = chosen(Stream(), max_sequence_length=2, truncate="left")
    assert found.collate([torch.arange(3), torch.arange(1)]).tolist() == [[1, 2], [0, 0]]
    assert found.collate([(1, 2, 3)] * 2)[0].tolist() == [1, 1]


def test_the_user_s_collate_function_gets_cut_samples():
    found = chosen(Text(), truncate="left", max_sequence_length=2, collate_fn=list)
    assert [item.tolist() for item in found.collate([torch.arange(4), torch.arange(1)])] == [[2, 3], [0]]
