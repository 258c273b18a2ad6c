"""How often samples come: balanced classes, weights, mixtures and folds, in every engine, on ranks, from any place."""

from collections import Counter
from functools import partial

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from approved import refused
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from trainrun.data.augment.augmented import NamedAugmentation
from trainrun.data.facts import describe_source
from trainrun.data.map_style import copy_shallow, describe_location, is_thread_safe
from trainrun.data.order.drawn import draw_by_shares, draw_by_weights, draw_classes_equally
from trainrun.data.order.training_set import (
    TrainingSetOptions,
    build_training_set,
    divide_into_fold,
    join_sources,
)
from trainrun.data.pipeline import open_batches
from trainrun.data.readers.tables import csv_files, huggingface
from trainrun.data.readers.tables import parquet as parquet_files
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError

pytestmark = pytest.mark.usefixtures("read_here")

LABELS = torch.tensor([0] * 60 + [1] * 25 + [2] * 3)
N = len(LABELS)
WEIGHTS = torch.arange(N) % 4 * 0.5
ENGINES = {
    "resident": {"engine": "resident"},
    "workers=0": {"engine": "workers", "num_workers": 0},
    "workers=1": {"engine": "workers", "num_workers": 1},
    "workers=4": {"engine": "workers", "num_workers": 4},
    "threads=2": {"engine": "threads", "num_threads": 2},
}
WAYS = {
    "balanced": lambda: draw_classes_equally((torch.arange(N), LABELS)),
    "weighted": lambda: draw_by_weights(None, WEIGHTS.tolist(), N),
    "mixed": lambda: draw_by_shares({"b": 3, "a": 1}, {"a": 60, "b": 28}),
}


class Said(Dataset):
    """Labels it tells, and samples it reads one by one."""

    targets, num_classes, class_names = LABELS.tolist(), 3, ("a", "b", "c")
    scores = WEIGHTS

    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor([float(index)]), LABELS[index]


def opened(drawn, source=None, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 5, "seed": 1, "drawn": drawn}
    source = (torch.arange(N), LABELS) if source is None else source
    return open_batches(source, StreamOptions(**fields | changes))[0]


def batches(stream, epoch=0, start=0):
    found = [(batch.data[0].tolist(), batch.real) for batch in stream.epoch(epoch, start)]
    stream.close()
    return found


def seen(drawn, epoch=0, **changes):
    return [index for rows, _ in batches(opened(drawn, **changes), epoch) for index in rows]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_counts_of_classes_and_samples_are_exact_to_one(seed):
    drawn, expected = draw_classes_equally(Said()), N / 3
    total = Counter()
    for epoch in range(12):
        order = seen(drawn, epoch, seed=seed)
        assert len(order) == N
        classes = Counter(LABELS[order].tolist())
        assert all(abs(classes[c] - expected) < 1 for c in range(3))
        counts = Counter(order)
        for label, size in enumerate((60, 25, 3)):
            members = [counts[i] for i in range(N) if LABELS[i] == label]
            assert {int(expected / size), int(expected / size) + 1} >= set(members)
        total.update(order)
    assert max(abs(total[i] - 12 * expected / 60) for i in range(60)) < 2  # over epochs none is left behind


@pytest.mark.parametrize(
    ("drawn", "share"),
    [
        (WAYS["weighted"], WEIGHTS.double() / WEIGHTS.sum()),
        (WAYS["mixed"], torch.tensor([0.25 / 60] * 60 + [0.75 / 28] * 28)),
        (lambda: draw_by_weights(None, [1] * N, N), torch.full((N,), 1 / N)),
    ],
)
def test_a_sample_comes_as_often_as_its_share_says(drawn, share):
    counts = Counter(seen(drawn(), 3))
    assert all(abs(counts[i] - N * float(share[i])) < 1 for i in range(N))


def test_equal_weights_are_each_sample_once_and_no_epoch_is_another():
    orders = [seen(draw_by_weights(None, [2.0] * N, N), epoch) for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(N))
    assert orders[0] != orders[1] != seen(draw_by_weights(None, [2.0] * N, N), 1, seed=9)


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_every_engine_rank_and_place_gives_the_same(way):
    drawn = WAYS[way]()
    whole = batches(opened(drawn, engine="resident"), 2)
    for options in ENGINES.values():
        assert batches(opened(drawn, **options), 2) == whole
        assert batches(opened(drawn, **options), 2, 7) == whole[7:]
    one = batches(opened(drawn, batch_size=6))
    ranks = [batches(opened(drawn, batch_size=2, rank=r, world_size=3)) for r in range(3)]
    joined_ranks = [[i for rows, real in row if real for i in rows] for row in zip(*ranks, strict=True)]
    assert joined_ranks == [rows for rows, _ in one]


class Noisy(Said):
    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(())]), LABELS[index]


def noise(batch, draws):
    return (*batch, draws.uniform("x")[:, 0], draws.numbers())


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_a_sample_that_comes_again_has_random_numbers_of_its_own(way):
    changes = {"augment": (NamedAugmentation("noise", noise),), "drawn": WAYS[way](), "source": Noisy()}
    found = {}
    for name, options in {k: v for k, v in ENGINES.items() if k not in ("resident", "threads=2")}.items():
        stream = opened(**changes, **options)
        found[name] = [
            torch.cat(parts) for parts in zip(*((*b.data, b.indices) for b in stream.epoch(2)), strict=True)
        ]
        stream.close()
    (x, _, drawn, numbers, indices), *others = found.values()
    assert all(torch.equal(a, b) for other in others for a, b in zip(found["workers=0"], other, strict=True))
    assert torch.equal(x[:, 0].long(), indices)
    assert torch.equal(numbers, indices)
    assert len(indices.unique()) < len(x[:, 1].unique()) == len(drawn.unique()) == N
    assert (
        len(opened(**changes | {"source": None}, engine="resident").epoch(2).__next__().data[2].unique()) == 5
    )


def test_buckets_hold_what_was_drawn():
    rows = [{"input_ids": torch.full((1 + i % 7,), i)} for i in range(N)]
    drawn = WAYS["mixed"]()
    order = [int(i) for part in opened(drawn, rows, padding="bucket").epoch(1) for i in part.indices]
    assert Counter(order) == Counter(seen(drawn, 1))


def test_validation_is_never_resampled():
    assert seen(WAYS["balanced"](), training=False) == list(range(N))


@pytest.mark.parametrize("stratified", [False, True])
def test_folds_are_parts_of_equal_size(stratified):
    held = []
    for fold in range(4):
        train, val, told = divide_into_fold((torch.arange(N), LABELS), 4, fold, stratified)
        assert sorted([*train.tolist(), *val.tolist()]) == list(range(N))
        assert len(val) == 22
        assert f"data.fold={fold} of 4" in told
        if stratified:
            counts = torch.bincount(LABELS[val], minlength=3).tolist()
            assert all(abs(count - size / 4) < 1 for count, size in zip(counts, (60, 25, 3), strict=True))
        held += val.tolist()
    assert sorted(held) == list(range(N))


@pytest.mark.parametrize("source", [Said(), TensorDataset(torch.arange(N), LABELS),
                                    Arrays((torch.arange(N), LABELS), ("a", "b", "c"), 3)])  # fmt: skip
def test_a_fold_knows_its_classes_and_can_be_balanced(source):
    parts, drawn = build_training_set({"": source}, TrainingSetOptions("balanced", folds=4, fold=1), [])
    facts = describe_source(parts["train"])
    assert (facts.num_classes, sum(facts.class_counts)) == (3, 66)
    labels = [y for batch in opened(drawn, parts["train"]).epoch(0) for y in batch.data[1].tolist()]
    assert set(Counter(labels).values()) == {22}


def test_sets_by_name_are_one():
    both = join_sources(
        {"a": (torch.arange(4), LABELS[:4]), "b": (torch.arange(3), LABELS[:3])}, "data.train"
    )
    assert both[0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    other = join_sources({"a": Said(), "b": (torch.zeros(3, 1), LABELS[-3:])}, "data.train")
    assert isinstance(other, ConcatDataset)
    assert (len(other), describe_source(other).num_classes) == (N + 3, None)
    more = join_sources({"a": Said(), "b": Subset(Said(), [0, 87])}, "data.train")
    assert (describe_source(more).class_counts, describe_source(more).class_names) == (
        (61, 25, 4),
        ("a", "b", "c"),
    )
    unlike = Arrays((torch.arange(2), LABELS[:2]), ("x", "y"))
    with refused(DataError, "data.train.b", "data.train.a"):
        join_sources({"a": Said(), "b": unlike}, "data.train")


def test_a_joined_set_says_of_its_parts_what_reading_asks():
    class Placed(Said):
        thread_safe = True

        def describe(self, index):
            return f"line {index}"

    both = join_sources({"a": Placed(), "b": Subset(Placed(), [7, 5])}, "data.train")
    assert [describe_location(both, index) for index in (0, N - 1, N, N + 1)] == [
        f" (line {line})" for line in (0, N - 1, 7, 5)
    ]
    assert is_thread_safe(both)
    assert not is_thread_safe(join_sources({"a": Placed(), "b": Said()}, "data.train"))
    assert copy_shallow(both).datasets[0] is not both.datasets[0]


@pytest.mark.parametrize("given", ["column", "scores", "w.npy", "w.txt", "list"])
def test_weights_are_a_column_an_attribute_a_file_or_a_list(given, tmp_path):
    np.save(tmp_path / "w.npy", WEIGHTS.numpy())
    np.savetxt(tmp_path / "w.txt", WEIGHTS.numpy())
    source = {"x": torch.arange(N), "column": WEIGHTS} if given == "column" else Said()
    value = WEIGHTS.tolist() if given == "list" else str(tmp_path / given) if given[:2] == "w." else given
    assert seen(draw_by_weights({"": source}, value, N), 2) == seen(WAYS["weighted"](), 2)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The same rows in every format, 160 of them; `w` goes round 0, 1, 2, 3; the others are wrong."""
    folder = tmp_path_factory.mktemp("tables")
    columns = {"x": np.arange(160.0), "label": np.arange(160) % 2, "w": np.arange(160) % 4}
    columns |= {
        "bad": np.where(np.arange(160) % 8 == 7, -1.0, 1.0),
        "zero": np.zeros(160),
        "word": ["a"] * 160,
    }
    table = pyarrow.table(columns | {"list": [[i, i] for i in range(160)]})
    parquet.write_table(table, folder / "t.parquet", row_group_size=50)
    rows = zip(*columns.values(), strict=True)
    (folder / "t.csv").write_text("\n".join(",".join(map(str, row)) for row in [list(columns), *rows]))
    return folder


FORMATS = {
    "csv": lambda folder: csv_files.load(str(folder / "t.csv"), ["x"], "label")["train"],
    "parquet": lambda folder: parquet_files.load(str(folder / "t.parquet"), ["x"], "label")["train"],
    "datasets": lambda folder: huggingface.load(str(folder / "t.parquet"), ["x", "label"])["train"],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_a_column_of_a_table_weighs_its_rows(form, tables):
    source = FORMATS[form](tables)
    samples = source.tensors[0] if isinstance(source, Arrays) else [source[i][0] for i in range(len(source))]
    x = np.array([float(np.ravel(sample)[0]) for sample in samples])
    for fold in (None, 1):  # of the training part alone, and of a fold of it
        asked = TrainingSetOptions("weighted", "w", folds=fold and 3, fold=fold)
        parts, drawn = build_training_set({"": source}, asked, [])
        rows = np.arange(len(x)) if fold is None else divide_into_fold(source, 3, 1, False)[0].numpy()
        counts = Counter(i for part in opened(drawn, parts["train"]).epoch(1) for i in part.indices.tolist())
        share = (x[rows] % 4) / (x[rows] % 4).sum() * len(rows)
        assert all(abs(counts[i] - one) < 1 for i, one in enumerate(share))
    for name in ("bad", "zero", "word", "nope"):
        with refused(DataError):
            draw_by_weights({"": source}, name, len(x))


def test_weights_of_named_sets_are_one_behind_the_other(tables):
    both = {"a": FORMATS["csv"](tables), "b": FORMATS["parquet"](tables)}
    _, drawn = build_training_set(both, TrainingSetOptions("weighted", "w"), [])
    (a,), (b,) = (draw_by_weights({"": one}, "w", 144).ends[-1:] for one in both.values())
    assert drawn.ends[-1] == a + b
    with refused(DataError, "data.weights", "data.train.c", "data.train.a"):
        draw_by_weights({"a": both["a"], "c": Said()}, "w", 144 + N)


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (partial(draw_classes_equally, torch.arange(5)), "data.sampling=balanced"),
        (partial(draw_classes_equally, (torch.zeros(2, 3), torch.zeros(2, 3).long())), ""),
        (partial(draw_classes_equally, (torch.zeros(2), torch.tensor([-1, 0]))), ""),
        (partial(draw_by_weights, {"": Said()}, [1.0, 2.0], N), "data.weights"),
        (partial(draw_by_weights, {"": Said()}, [0.0] * N, N), ""),
        (partial(draw_by_weights, {"": Said()}, [1.0, float("nan")], 2), ""),
        (partial(draw_by_weights, {"": Said()}, "nope.npy", N), "data.weights=nope.npy"),
        (partial(draw_by_weights, {"": Said()}, "class_names", N), "data.weights=class_names"),
        (partial(draw_by_shares, {"a": 1, "b": 2}, {"a": 5, "b": 0}), "data.mix"),
        (partial(divide_into_fold, Said(), 100, 0, False), "data.folds=100"),
        (partial(divide_into_fold, (torch.zeros(9),), 2, 0, True), "data.stratified=true"),
        (partial(build_training_set, {"": Streamed()}, TrainingSetOptions("balanced"), []), "data.sampling=balanced"),
        (partial(build_training_set, {"a": Streamed()}, TrainingSetOptions(), []), "data.train.a"),
    ],
)  # fmt: skip
def test_refusals(make, key):
    with refused(DataError, key):
        make()
