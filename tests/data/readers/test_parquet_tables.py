"""Parquet tables: columns in memory or mapped from the column store, and the same samples both ways."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from approved import refused
from PIL import Image

from trainrun.data.look import hash_samples
from trainrun.data.pipeline import open_batches
from trainrun.data.readers import column_store, mapped_rows
from trainrun.data.readers.tables.parquet import load
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError

N = 60
TOKENS = [list(range(i % 7)) for i in range(N)]


def png(i: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (6, 4), (i, 2 * i, 255 - i)).save(content, "PNG")
    return content.getvalue()


def table() -> pa.Table:
    return pa.table(
        {
            "a": pa.array(np.arange(N) / 4, pa.float64()),
            "b": pa.array(np.arange(N), pa.int16()),
            "flag": pa.array([i % 2 == 0 for i in range(N)]),
            "kind": pa.array(["cat" if i % 3 else "dog" for i in range(N)]).dictionary_encode(),
            "tokens": pa.array(TOKENS, pa.list_(pa.int32())),
            "waves": pa.array([[i / 2] * (i % 3) for i in range(N)], pa.large_list(pa.float64())),
            "vector": pa.array([[i, i + 1, i + 2] for i in range(N)], pa.list_(pa.float32(), 3)),
            "picture": pa.array([{"bytes": png(i), "path": f"{i}.png"} for i in range(N)]),
            "raw": pa.array([png(i) for i in range(N)]),
        }
    )


@pytest.fixture
def store(tmp_path, monkeypatch) -> None:
    """Stored columns for tables of any size, mapped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(column_store, "STORED_FROM", 0)
    monkeypatch.setattr(mapped_rows, "COPIED_BYTES", 0)


@pytest.fixture
def path(tmp_path) -> str:
    pq.write_table(table(), tmp_path / "t.parquet", row_group_size=16)
    return str(tmp_path / "t.parquet")


def whole(path: str, **arguments):
    """All rows: with validation data of its own nothing is held out."""
    return load(path, val_path=path, **arguments)["train"]


def read(source) -> list:
    return source.__getitems__(range(len(source)))


def fault(path: str, split: str = "train", **arguments) -> str:
    with pytest.raises(DataError) as caught:
        read(load(path, **arguments)[split])
    return str(caught.value)


def test_numbers_are_columns_in_memory(path):
    source = whole(path, inputs=["a", "b", "flag"], target="kind")
    assert isinstance(source, Arrays)
    inputs, target = source.tensors
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, torch.tensor([[i / 4, i, i % 2 == 0] for i in range(N)]))
    assert target.tolist() == [0 if i % 3 else 1 for i in range(N)]
    assert (source.class_names, source.num_classes) == (("cat", "dog"), 2)
    reordered = whole(path, inputs=["b", "a"], target="kind").tensors[0]
    assert torch.equal(reordered, inputs[:, [1, 0]])


@pytest.mark.parametrize("inputs", [["a", "b"], ["vector"]])
@pytest.mark.parametrize("val_fraction", [0.3, None])
@pytest.mark.parametrize("split", ["train", "val"])
def test_mapped_columns_give_the_samples_of_memory(path, inputs, val_fraction, split, request):
    arguments = {"inputs": inputs, "target": "kind"}
    arguments |= {"val_path": path} if val_fraction is None else {"val_fraction": val_fraction}
    memory = load(path, **arguments)[split].tensors
    request.getfixturevalue("store")
    stored = load(path, **arguments)[split]
    order = [*np.random.default_rng(0).permutation(len(stored)).tolist(), 0, 0]
    for i, (x, y) in zip(order, stored.__getitems__(order), strict=True):
        assert torch.equal(x, memory[0][i])
        assert x.dtype == torch.float32
        assert torch.equal(y, memory[1][i])
        assert torch.equal(stored[i][0], x)
    shaped = load(path, **arguments, shape=[len(memory[0][0]), 1])[split]
    assert shaped[0][0].shape == (len(memory[0][0]), 1)


def test_the_two_parts_make_the_whole_with_every_class_in_proportion(path):
    train, val = (load(path, inputs="tokens", target="kind", val_fraction=0.25)[s] for s in ("train", "val"))
    rows = [int(source.describe(i).rpartition(" ")[2]) for source in (train, val) for i in range(len(source))]
    assert sorted(rows) == [*range(N)]
    assert sorted(int(val[i][1]) for i in range(len(val))) == [0] * 10 + [1] * 5


def test_lists_are_arrays_of_their_own_length(path):
    source = whole(path, inputs="tokens", target="kind")
    for i in range(N):
        tokens, label = source[i]
        assert tokens.tolist() == TOKENS[i]
        assert tokens.dtype == np.int64
        assert int(label) == (0 if i % 3 else 1)
    assert source.lengths.tolist() == [len(tokens) for tokens in TOKENS]
    assert source.lengths.dtype == np.int64
    val = load(path, inputs="tokens", target="kind")["val"]
    assert val.lengths.tolist() == [len(val[i][0]) for i in range(len(val))]
    waves = whole(path, inputs="waves", target="none")
    assert [w.tolist() for w in waves.__getitems__([5, 1])] == [[2.5, 2.5], [0.5]]
    assert waves[5].dtype == np.float32
    assert not hasattr(whole(path, inputs="picture", target="kind"), "lengths")


@pytest.mark.parametrize("inputs", ["tokens", "vector", "waves"])
def test_a_sample_that_is_written_to_changes_no_other(path, inputs, store):
    source = whole(path, inputs=inputs, target="kind")
    before = source[5][0].tolist()
    source[5][0][:] = 99
    assert source[5][0].tolist() == before


def test_row_numbers_of_pandas_are_no_input(tmp_path):
    path = str(tmp_path / "t.parquet")
    pq.write_table(pa.table({"x": [5, 6], "y": [0, 1], "__index_level_0__": [1, 0]}), path)
    assert whole(path).tensors[0].tolist() == [[5], [6]]


def test_a_list_as_target_and_several_inputs(path):
    inputs, target = whole(path, inputs=["tokens", "b"], target="waves")[5]
    assert inputs["tokens"].tolist() == TOKENS[5]
    assert inputs["b"] == 5
    assert target.tolist() == [2.5, 2.5]


@pytest.mark.parametrize("column", ["picture", "raw"])
def test_pictures_are_decoded(path, column):
    image, label = whole(path, inputs=column, target="kind", dtype="uint8")[7]
    assert (image.dtype, image.shape) == (torch.uint8, (3, 4, 6))
    assert image[:, 0, 0].tolist() == [7, 14, 248]
    assert int(label) == 0
    image = whole(path, inputs=column, target="kind", shape=[1, 2, 2])[7][0]
    assert image.shape == (1, 2, 2)
    assert 0 < image.max() < 1


def test_several_files_and_a_row_in_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for i, name in enumerate(["b", "a"]):
        part = pa.table({"x": pa.array([i, None if i == 0 else 9, i], pa.int64()), "y": [0, 1, 0]})
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=1)
    assert fault(str(tmp_path)).startswith(f"{tmp_path}/b.parquet row 1: column 'x' is missing; correct it")
    assert "data.train.fill=0" in fault(str(tmp_path), val_path=str(tmp_path))
    for stored_from in (2**20, 0):
        monkeypatch.setattr(column_store, "STORED_FROM", stored_from)
        source = whole(str(tmp_path), fill=-1)
        assert source.tensors[0].flatten().tolist() == [1, 9, 1, 0, -1, 0]
    (tmp_path / "c.parquet").write_bytes((tmp_path / "b.parquet").read_bytes())
    pq.write_table(pa.table({"x": [1.5], "y": [0]}), tmp_path / "c.parquet")
    assert "c.parquet: column 'x' is double, but int64 in" in fault(str(tmp_path))
    pq.write_table(pa.table({"x": [1], "z": [0]}), tmp_path / "c.parquet")
    assert "c.parquet: has no column 'y', which" in fault(str(tmp_path))
    pq.write_table(pa.table({"x": [1], "y": [0], "z": [0]}), tmp_path / "c.parquet")
    assert "c.parquet: has the column 'z', which" in fault(str(tmp_path))
    named = whole(str(tmp_path), inputs="x", fill=-1)
    assert len(named.tensors[0]) == 7
    with refused(DataError, "c.parquet", "'z'"):
        named.column("z")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1], None, [2]], pa.list_(pa.int64())), "row 1: column 'x' is missing"),
        (
            pa.array([[1], [2], [3, None]], pa.list_(pa.int64())),
            "row 2: column 'x', a number of the list is missing",
        ),
        (pa.array([1.0, 2.0, float("nan")]), "row 2: column 'x' is missing"),
        (
            pa.array([1.0, 1e300, 2.0]),
            "row 1: column 'x' is 1e+300, which data.train.dtype=float32 cannot hold",
        ),
        (pa.array([{"bytes": png(1)}, None, {"bytes": png(1)}]), "row 1: column 'x' is missing"),
        (pa.array([png(1), png(2), png(1)[:45]]), "row 2: column 'x': damaged or cut short"),
        (pa.array(["a", "b", "c"]), "data.train.inputs: column 'x' is string, which no model can take"),
        (pa.array([[[1]], [[2]], [[3]]]), "column 'x' is list<"),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_cells_that_cannot_be_used(tmp_path, column, message, stored, request):
    if stored:
        request.getfixturevalue("store")
    path = str(tmp_path / "t.parquet")
    pq.write_table(pa.table({"x": column, "y": [0, 1, 0]}), path)
    assert message in fault(path, val_path=path)


@pytest.mark.parametrize("column", ["tokens", "waves", "picture", "raw"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_missing_cell_leaves_the_other_rows_readable(path, tmp_path, column, stored, request):
    if stored:
        request.getfixturevalue("store")
    cells, other = table()[column], str(tmp_path / "other.parquet")
    gap = pa.concat_arrays([cells.chunk(0)[:5], pa.nulls(1, cells.type), cells.chunk(0)[6:]])
    pq.write_table(pa.table({column: gap}), other)
    source, intact = (whole(file, inputs=column, target="none") for file in (other, path))
    for i in (4, 6, N - 1):
        np.testing.assert_array_equal(source[i], intact[i])
    with refused(DataError, "other.parquet row 5", f"'{column}'"):
        source[5]
    if column == "tokens":
        assert source.lengths.tolist() == [0 if i == 5 else len(tokens) for i, tokens in enumerate(TOKENS)]


def test_missing_and_unfit_targets(path, tmp_path):
    other = str(tmp_path / "other.parquet")
    pq.write_table(pa.table({"x": [1, 2], "y": ["a", None]}), other)
    assert f"{other} row 1: column 'y' is missing" in fault(other)
    assert "data.train.target=picture: is struct" in fault(path, inputs="a", target="picture")
    pq.write_table(pa.table({"a": [1.0], "kind": ["cow"]}), other)
    message = fault(path, "val", inputs="a", target="kind", val_path=other)
    assert f"{other} row 0: column 'kind' is 'cow', which is no class of the training data" in message
    pq.write_table(pa.table({"a": ["1"], "kind": ["cat"]}), other)
    assert "column 'a' is string, but double" in fault(path, "val", inputs="a", target="kind", val_path=other)


def test_a_filled_column_keeps_its_large_numbers(tmp_path):
    path = str(tmp_path / "t.parquet")
    large = pa.table({"x": pa.array([2**60 + 1, None], pa.int64()), "y": [0, 1]})
    pq.write_table(large, path)
    assert whole(path, fill=-1, dtype="int64").tensors[0].tolist() == [[2**60 + 1], [-1]]
    assert whole(path, fill=0.5, dtype="float64").tensors[0].tolist() == [[2.0**60], [0.5]]


def test_whole_numbers_above_those_of_int64_stay_what_they_are(tmp_path):
    path = str(tmp_path / "t.parquet")
    pq.write_table(pa.table({"x": [1, 2], "y": pa.array([2**63, 2**63 + 2**41], pa.uint64())}), path)
    assert whole(path).tensors[1].tolist() == [[2.0**63], [2.0**63 + 2**41]]
    assert whole(path, target_dtype="class").class_names == (str(2**63), str(2**63 + 2**41))
    message = fault(path, val_path=path, target_dtype="int64")
    assert "row 0: column 'y' is '9223372036854775808', not a whole number" in message


def test_wrong_words(path):
    assert "data.train.target: name the column to predict" in fault(path)
    assert "data.train.target=kin: no such column; did you mean kind?" in fault(path, target="kin")
    assert "data.shape=[3]: needs 3 numbers a row" in fault(path, inputs=["a", "b"], target="kind", shape=[3])


def test_damaged_files(path, tmp_path):
    content = Path(path).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"PAR1 and nothing else", content[:-6] + b"\0" * 6):
        (tmp_path / "cut.parquet").write_bytes(damaged)
        message = fault(str(tmp_path / "cut.parquet"))
        assert message.startswith(
            f"{tmp_path}/cut.parquet: it cannot be read as Parquet: is it damaged or cut"
        )
    wrong = bytearray(content)
    wrong[4:2000] = bytes(1996)
    (tmp_path / "cut.parquet").write_bytes(wrong)
    assert "row group 0 cannot be read as Parquet" in fault(
        f"{tmp_path}/cut.parquet", inputs="a", target="none"
    )
    pq.write_table(table()[:0], tmp_path / "empty.parquet")
    assert "empty.parquet: no rows" in fault(str(tmp_path / "empty.parquet"))


@pytest.mark.parametrize("row_group_size", [1, 7, 1000])
@pytest.mark.parametrize("inputs", [["a", "b"], ["tokens"], ["vector", "waves"], ["picture", "b"]])
def test_row_groups_change_no_sample(path, tmp_path, row_group_size, inputs, store):
    other = str(tmp_path / "other.parquet")
    pq.write_table(table(), other, row_group_size=row_group_size)
    sources = [load(file, inputs=inputs, target="kind")["train"] for file in (path, other)]
    for i in range(len(sources[0])):
        assert hash_samples(sources[0][i]) == hash_samples(sources[1][i])
    with pytest.raises(IndexError):
        sources[0][N]


def test_lists_of_one_length_are_gathered_as_columns(tmp_path, store):
    path = str(tmp_path / "t.parquet")
    tokens = np.arange(400).reshape(40, 10)
    pq.write_table(pa.table({"tokens": list(tokens), "y": np.arange(40) % 2}), path, row_group_size=3)
    source = load(path, inputs="tokens", target="y")["train"]
    columns = source.find_row_columns()
    assert len(columns) == len(source) == 36
    assert columns[5][0].tolist() == source[5][0].tolist()
    options = StreamOptions("data.train", True, 4, 1)
    opened, line = open_batches(source, options)
    assert "mapped files" in line
    for batch in opened.epoch(0):
        expected = [source[i] for i in batch.indices.tolist()]
        assert batch.data[0].tolist() == [sample[0].tolist() for sample in expected]
        assert batch.data[1].tolist() == [int(sample[1]) for sample in expected]


def test_two_columns_of_one_name_are_named(tmp_path):
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.table([[1, 2], [3, 4], [0, 1]], names=["a", "a", "y"]), path)
    with refused(DataError, "'a'"):
        load(str(path), val_fraction=0.5)["train"]


def test_a_part_may_have_no_row_in_a_row_group(tmp_path):
    columns = {"x": np.arange(40.0), "y": np.arange(40) % 2}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
    file = str(tmp_path / "t.parquet")
    parts = [load(file, inputs="x", target="y")[split].tensors[0] for split in ("train", "val")]
    assert [len(part) for part in parts] == [36, 4]
    assert torch.cat(parts).flatten().sort().values.tolist() == list(range(40))
