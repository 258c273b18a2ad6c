import numpy as np
import pytest
import torch
from approved import refused
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainrun.data.engines import choice, in_memory
from trainrun.data.engines.stream import StreamEngine
from trainrun.data.facts import Labels, check_labels, describe_source
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError

X, Y = torch.zeros(10, 3), torch.arange(10) % 4


class Samples(Dataset):
    class_names = ["a", "b"]

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.rand(2, 5), index


class OfPandas(Samples):
    """What `DataFrame` says of itself."""

    __module__ = "pandas.core.frame"


class Stream(IterableDataset):
    num_classes = 6

    def __iter__(self):
        raise AssertionError("must not be read")


def opened(source, **changes):
    """The stream that reads, and the line about it."""
    fields = {"key": "data.train", "training": True, "batch_size": 2, "seed": 0}
    return open_batches(source, StreamOptions(**fields | changes))


RESIDENT, MAIN = StreamEngine("resident", 0), StreamEngine("workers", 0)


@pytest.mark.parametrize(
    ("source", "changes", "read_by", "line"),
    [
        ((X, Y), {}, RESIDENT, "resident on cpu (in memory, 0.0 MB)"),
        ((X, Y), {"num_workers": 0}, RESIDENT, "resident on cpu (in memory, 0.0 MB)"),
        ((X, Y), {"num_workers": 2}, StreamEngine("workers", 2), "2 loader workers (asked for)"),
        ((X, Y), {"engine": "workers"}, MAIN, "read in the main process (in memory, 0.0 MB; data.engine=workers)"),
        ((X, Y), {"engine": "resident", "num_workers": 2}, RESIDENT,
         "resident on cpu (asked for; data.num_workers=2 is not used)"),
        (Samples(), {"engine": "workers"}, StreamEngine("workers", 3), "3 loader workers (4 cores for 1 rank)"),
        (Samples(), {"engine": "workers", "world_size": 2, "local_world_size": 2}, MAIN,
         "read in the main process (4 cores for 2 ranks)"),
        (Samples(), {"num_workers": 0}, MAIN, "read in the main process (asked for)"),
        (Stream(), {}, MAIN, "read in the main process (an IterableDataset)"),
        (Stream(), {"num_workers": 1}, StreamEngine("workers", 1), "1 loader worker (asked for)"),
    ],
)  # fmt: skip
def test_choices_and_their_reasons(monkeypatch, source, changes, read_by, line):
    monkeypatch.setattr(choice, "count_usable_cores", lambda: 4)
    stream, note = opened(source, **changes)
    assert stream.read_by == read_by
    assert note == f"data.train: {line}"


@pytest.mark.parametrize(("free", "here", "read_by"), [(320, 1, RESIDENT), (319, 1, MAIN), (639, 2, MAIN)])
def test_resident_up_to_half_of_the_free_memory(monkeypatch, free, here, read_by):
    monkeypatch.setattr(in_memory, "read_free_bytes", lambda device: free)
    source = np.zeros((10, 2)), torch.zeros(10, dtype=torch.int64)  # 80 bytes as float32, and 80
    stream, note = opened(source, world_size=2, local_world_size=here)
    assert stream.read_by == read_by
    assert ("too much to be resident on cpu" in note) is (read_by == MAIN)


@pytest.mark.parametrize(
    ("source", "changes", "key"),
    [
        ((X[:0], Y[:0]), {}, "data.train"),
        ([], {}, "data.train"),
        ({}, {}, "data.train"),
        ((X, Y[:9]), {}, "data.train"),
        ((X, [1, 2]), {}, "data.train"),
        ({"x": X, "y": "no"}, {}, "data.train"),
        ((X, torch.tensor(3)), {}, "data.train"),
        ((np.array([None] * 10), Y), {}, "data.train"),
        ((np.array(["a"] * 10), Y), {}, "data.train"),
        ((X, Y.numpy().astype(np.uint64)), {}, "data.train"),
        (7, {}, "data.train"),
        ("digits", {}, "data.train"),
        (OfPandas(), {}, "data.train"),
        (iter([1]), {}, "data.train"),
        (Samples, {}, "data.train"),
        (DataLoader(Samples()), {}, "data.train"),
        ((X, Y), {"batch_size": 11},
         "data.batch_size=11"),
        ((X, Y), {"batch_size": 6, "world_size": 2, "drop_last": True},
         "data.batch_size"),
        ((X, Y), {"batch_size": 1, "world_size": 11}, ""),
        (Samples(), {"engine": "resident"}, "data.engine=resident"),
        ((X, Y), {"engine": "resident", "collate_fn": list}, "data.engine=resident"),
        ((X, Y), {"limit": 0}, "trainer.limit_train_batches"),
        ((X, Y), {"limit": 1.5, "training": False}, "trainer.limit_val_batches=1.5"),
        ((X, Y), {"limit": True}, "trainer.limit_train_batches=True"),
    ],
)  # fmt: skip
def test_faults(source, changes, key):
    with refused(DataError, key) as caught:
        opened(source, **changes)
    assert "\n" not in str(caught.value)


def test_evaluation_reads_all_in_order_whatever_the_batch_size():
    stream, _ = opened((X, Y), training=False, batch_size=64, shuffle=True, drop_last=True)
    assert [batch.data[1].tolist() for batch in stream.epoch(4)] == [Y.tolist()]
    short, _ = opened((X, Y), training=False, batch_size=4, drop_last=True)
    assert [len(batch.data[1]) for batch in short.epoch(0)] == [4, 4, 2]
    ranks = [opened((X, Y), training=False, batch_size=64, rank=rank, world_size=3)[0] for rank in range(3)]
    assert torch.cat([batch.data[1] for rank in ranks for batch in rank.epoch(0)]).equal(Y)


def test_facts():
    state = torch.get_rng_state()
    facts = describe_source((X, Y))
    assert (facts.shape, facts.num_classes, facts.class_names) == ((3,), 4, ())
    assert describe_source(TensorDataset(X, X)).num_classes == 3  # outputs: real numbers of a sample
    assert describe_source((X, Y > 1)).num_classes is None
    assert describe_source({"ids": Y, "mask": Y, "label": Y.to(torch.uint8)}).num_classes == 4
    assert describe_source({"ids": Y, "mask": Y}).num_classes is None
    named = describe_source(Arrays((X, Y), ("a", "b", "c", "d", "e"), 5))
    assert (named.num_classes, named.class_names) == (5, ("a", "b", "c", "d", "e"))
    samples = describe_source(Samples())
    assert (samples.shape, samples.num_classes, samples.class_names) == ((2, 5), 2, ("a", "b"))
    assert (describe_source(Stream()).shape, describe_source(Stream()).num_classes) == (None, 6)
    assert describe_source([{"image": np.zeros((1, 4))}] * 2).shape == (1, 4)
    assert describe_source([{"label": 3, "image": np.zeros((1, 4))}] * 2).shape == (1, 4)
    assert describe_source(["text", "more"]).shape is None
    assert torch.equal(torch.get_rng_state(), state)
    with refused(DataError):
        describe_source([])


def test_labels_are_checked():
    check_labels((X, Y), "data.val", Labels(4, "data.num_classes"))
    check_labels((X, torch.tensor([0, -100] * 5)), "data.val", Labels(2, "data.num_classes"))
    check_labels((X, X), "data.val", Labels(2, "data.num_classes"))
    check_labels(Samples(), "data.val", Labels(2, "data.num_classes"))
    with pytest.raises(DataError) as caught:
        check_labels((X, Y), "data.val", Labels(3, "data.num_classes"))
    assert str(caught.value).startswith(
        "data.val: sample 3 has label 3, but data.num_classes=3 allows 0 to 2; correct"
    )
    with refused(DataError):
        check_labels((X, np.array([0] * 4 + [-1] + [0] * 5)), "data.train", Labels(3, "data.num_classes"))
    with refused(DataError):
        check_labels((X[:2], torch.tensor([[0, 1], [1, 9]])), "data.train", Labels(3, "data.num_classes"))
