import gzip
import io
import json
import pickle
import sys
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from approved import refused
from PIL import Image
from things import LateModule

from trainrun.data.pipeline import open_batches
from trainrun.data.readers import column_store
from trainrun.data.readers.tables import arrow_files
from trainrun.data.readers.tables.huggingface import load
from trainrun.data.same_samples import hash_samples
from trainrun.data.sequences.collate import PadCollate
from trainrun.data.sequences.fields import SequenceCutter, list_fields
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

datasets = LateModule("datasets")

pytestmark = [
    pytest.mark.skipif(find_spec("datasets") is None, reason="needs the extra datasets"),
    pytest.mark.usefixtures("quiet_datasets"),
]


@pytest.fixture
def quiet_datasets(tmp_path, monkeypatch):
    """The package that writes the sets shows no bars."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(params=["memory", "store"])
def place(request, monkeypatch):
    """Where the columns are."""
    if request.param == "store":
        monkeypatch.setattr(column_store, "STORED_FROM", 0)
    return request.param


def rows_of(number: int, start: int = 0) -> "datasets.Dataset":
    features = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("int64")),
            "label": datasets.ClassLabel(names=["even", "odd"]),
            "text": datasets.Value("string"),
        }
    )
    numbers = range(start, start + number)
    columns = {
        "tokens": [list(range(i % 4)) for i in numbers], "label": [i % 2 for i in numbers],
        "text": [f"row {i}" for i in numbers],
    }  # fmt: skip
    return datasets.Dataset.from_dict(columns, features=features)


def whole(path, **options):
    return load(str(path), val_fraction=0.0, **options)["train"]


def test_a_folder_of_save_to_disk(tmp_path, place):
    rows_of(10).save_to_disk(tmp_path / "set")
    data = whole(tmp_path / "set", columns=["tokens", "label"])
    tokens, label = data[3]
    assert (tokens.dtype, tokens.tolist(), label) == (np.int64, [0, 1, 2], 1)
    assert data[4][0].dtype == np.int64
    weights = [[0.5] * (i % 4) for i in range(10)]
    rows_of(10).add_column("weights", weights).save_to_disk(tmp_path / "weights")
    assert whole(tmp_path / "weights", columns=["weights"])[4].dtype == np.float32  # empty
    assert data.lengths.tolist() == [i % 4 for i in range(10)]
    assert (data.class_names, data.num_classes) == (("even", "odd"), 2)
    assert [sample[1] for sample in data.__getitems__([5, 2])] == [1, 0]
    assert data.describe(3).endswith(".arrow row 3")
    assert pickle.loads(pickle.dumps(data))[3][0].tolist() == [0, 1, 2]
    assert whole(tmp_path / "set")[9] == {"tokens": pytest.approx([0]), "label": 1, "text": "row 9"}
    with pytest.raises(IndexError):
        data[10]


def test_classes_are_held_out_in_proportion(tmp_path):
    rows_of(40).save_to_disk(tmp_path / "set")
    train, val = (
        load(str(tmp_path / "set"), columns=["tokens", "text", "label"], val_fraction=0.25)[split]
        for split in ("train", "val")
    )
    texts = [[part[i][1] for i in range(len(part))] for part in (train, val)]
    assert sorted(texts[0] + texts[1]) == sorted(f"row {i}" for i in range(40))
    assert sum(val[i][2] for i in range(len(val))) == 5
    assert val.lengths.tolist() == [len(val[i][0]) for i in range(10)]
    assert train.fingerprint() != val.fingerprint()


@pytest.mark.parametrize("kind", ["parquet", "json", "arrow"])
def test_files(tmp_path, kind, place):
    rows = rows_of(6).remove_columns("label")
    for number in range(2):
        if kind == "arrow":
            rows.save_to_disk(tmp_path / "set")
            (tmp_path / f"{number}.arrow").write_bytes(next((tmp_path / "set").glob("*.arrow")).read_bytes())
        else:
            getattr(rows, f"to_{kind}")(str(tmp_path / f"{number}.{kind}"))
    data = whole(tmp_path / f"{{0,1}}.{kind}", columns=["tokens", "text"])
    assert len(data) == 12
    assert [data[9][0].tolist(), data[9][1]] == [[0, 1, 2], "row 3"]
    assert data.lengths.tolist() == [0, 1, 2, 3, 0, 1] * 2


def test_pictures_are_decoded_from_their_bytes_alone(tmp_path):
    png = io.BytesIO()
    Image.new("RGB", (4, 2), (9, 0, 0)).save(png, "PNG")
    Image.new("RGB", (4, 2)).save(tmp_path / "secret.png")
    pictures = [
        {"bytes": png.getvalue(), "path": None},
        {"bytes": None, "path": str(tmp_path / "secret.png")},
    ]
    pictures.append({"bytes": b"no picture", "path": None})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"image": pictures, "label": [1, 2, 3]}, features=features)
    rows.cast_column("image", datasets.Image(decode=False)).to_parquet(str(tmp_path / "a.parquet"))
    data = whole(tmp_path / "a.parquet", columns=["image", "label"], dtype="float32", shape=[1, 2, 2])
    assert data[0][0].shape == (1, 2, 2)
    with refused(DataError, "a.parquet"):
        data[1]
    with refused(DataError):
        data.__getitems__([0, 2])


ROWS = {
    "tokens": [[*range(i % 5)] for i in range(12)], "labels": [[i] * (i % 7) for i in range(12)],
    "waves": [[i / 3] * (i % 3) for i in range(12)], "flags": [[True] * (i % 4) for i in range(12)],
    "pair": [[i, i + 1] for i in range(12)], "y": [*range(12)], "score": [i / 7 for i in range(12)],
}  # fmt: skip
PADDED = [
    (["tokens"], {}),
    (["tokens", "y"], {"multiple": 4}),
    (["tokens", "labels"], {"width": 9, "padding_value": 5}),
    (["waves", "score"], {}),
    (["pair", "waves"], {"padding_value": -1.0}),
    (["tokens", "flags"], {}),
    (["y", "tokens"], {"cut": (2, True)}),
    (None, {"cut": (3, False)}),
]


@pytest.mark.parametrize(("columns", "options"), PADDED)
def test_rows_padded_together_are_the_batch_of_their_samples(tmp_path, columns, options):
    pq.write_table(pa.table(ROWS), tmp_path / "set.parquet")
    source = whole(tmp_path / "set.parquet", columns=columns)
    ragged = {"tokens", "labels", "waves", "flags"}
    fields = list_fields(source[1])
    named = dict(zip(fields, columns or ROWS, strict=True))
    names = tuple(field for field, column in named.items() if column in ragged)
    cut = SequenceCutter(*options["cut"], names) if "cut" in options else None
    collate = PadCollate(names, **{**options, "cut": cut})
    for indices in ([7, 1, 4], [5], [0], [11, 11, 6, 0]):
        rows, samples = source.read_ragged_rows(indices), [source[index] for index in indices]
        assert hash_samples([collate.pad_rows(rows)]) == hash_samples([collate(samples)])


def test_floats_are_narrow_and_ragged_or_missing_values_are_named(tmp_path):
    lines = [{"x": [0.5, 1], "y": 1}, {"x": [2.5], "y": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = whole(tmp_path / "a.jsonl", columns=["x"])
    assert (data[0].dtype, data[1].tolist()) == (np.float32, [2.5])
    with refused(DataError, "a.jsonl"):
        whole(tmp_path / "a.jsonl")[1]
    (tmp_path / "b.jsonl").write_text('{"x": [[1], [1, 2]]}')
    with refused(DataError):
        whole(tmp_path / "b.jsonl")[0]
    (tmp_path / "c.jsonl").write_text('{"x": [1.0, null]}')
    with refused(DataError):
        whole(tmp_path / "c.jsonl")[0]


@pytest.mark.parametrize(
    ("name", "content"), [("a.arrow", b"no"), ("a.parquet", b"PAR1"), ("a.json", b"{bad")]
)
def test_damaged_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with refused(DataError, name):
        whole(tmp_path / name)


@pytest.mark.parametrize("content", ["[[0.5, 1], [2, 3]]", "[1, 2]", "[0.5, 1]\n[2, 3]\n", '"a"\n"b"\n'])
def test_an_array_of_numbers_is_told_what_rows_are(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with refused(DataError, "a.json", "data.train.columns=[x,y]"):
        whole(tmp_path / "a.json")


def test_mistakes(tmp_path, monkeypatch):
    rows_of(3).save_to_disk(tmp_path / "set")
    with refused(DataError):
        whole(tmp_path / "set", columns=["lable"])
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "b.json").write_bytes(b"")
    with refused(DataError):
        whole(tmp_path / "[ab].*")
    with refused(DataError, "data.path"):
        load(None)["train"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused(DataError):
        whole(tmp_path / "set")


def test_json_of_any_form(tmp_path, place, monkeypatch):
    """Types are those that fit all rows, whatever the blocks in which they are parsed."""
    monkeypatch.setattr(arrow_files, "JSON_BLOCK_BYTES", 40)
    rows = [
        {"tokens": [], "x": 1, "day": "2020-01-01"},
        {"tokens": [1, 2], "x": 2.5, "day": "no day", "more": None},
        {"tokens": [3], "x": -1, "day": "2021-01-01", "grid": [[1, 2], [3, 4]]},
    ]
    lines = "\n\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=1))
    for name in ("a.jsonl", "b.jsonl.gz", "c.json"):
        data = whole(tmp_path / name, columns=["tokens", "x", "day"])
        samples = [(tokens.tolist(), x, day) for tokens, x, day in data]
        assert samples == [([], 1.0, "2020-01-01"), ([1, 2], 2.5, "no day"), ([3], -1.0, "2021-01-01")]
        assert [type(value) for value in data[0]] == [np.ndarray, float, str]
    grid = whole(tmp_path / "a.jsonl", columns=["grid"])
    assert grid[2].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(DataError):
        grid[0]


def test_lists_of_one_shape_are_gathered_as_columns(tmp_path, place):
    images = np.arange(24).reshape(4, 2, 3)
    rows = datasets.Dataset.from_dict({"image": images.tolist(), "y": [0, 1, 0, 1], "on": [True, False] * 2})
    rows.save_to_disk(tmp_path / "set")
    data = whole(tmp_path / "set")
    assert [type(value) for value in data[1].values()] == [np.ndarray, int, bool]
    np.testing.assert_array_equal(data[3]["image"], images[3])
    if (columns := data.find_row_columns()) is not None:  # mapped
        assert columns.names == ("image", "y", "on")
        np.testing.assert_array_equal(columns[2]["image"], images[2])
    opened, _ = open_batches(data, StreamOptions("data.train", True, 4, 1))
    (batch,) = opened.epoch(0)
    assert {name: value.dtype for name, value in batch.data.items()} == {
        "image": torch.int64, "y": torch.int64, "on": torch.bool
    }  # fmt: skip
    np.testing.assert_array_equal(batch.data["image"].numpy(), images[batch.indices])


def test_several_arrow_files_of_both_kinds_are_one_table(tmp_path):
    table = pa.table({"x": pa.array([1.0, 2.0]), "name": ["a", "b"]})
    with pa.ipc.new_file(tmp_path / "0.arrow", table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(tmp_path / "1.arrow", table.schema) as writer:
        writer.write_table(table.slice(1))
    data = whole(tmp_path)
    assert [sample["name"] for sample in data] == ["a", "b", "b"]
    assert data.describe(2).endswith("1.arrow row 0")
    assert data.column("x").tolist() == [1.0, 2.0, 2.0]


def test_columns_that_no_sample_can_have_are_named(tmp_path):
    table = pa.table({"when": pa.array([1], pa.timestamp("s")), "x": [1]})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with refused(DataError, "data.train.columns"):
        whole(tmp_path / "a.arrow")
    assert whole(tmp_path / "a.arrow", columns=["x"])[0] == 1


@pytest.mark.parametrize("cells", [[1, 2**63], [[1], [2**63, 2]]])
def test_a_number_that_int64_cannot_hold_is_named(tmp_path, cells):
    type_ = pa.uint64() if isinstance(cells[0], int) else pa.list_(pa.uint64())
    pq.write_table(pa.table({"x": pa.array(cells, type_), "y": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'x'"):
        whole(tmp_path / "a.parquet")


def test_stored_columns_are_not_parsed_again(tmp_path, place, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"x": 1}')
    assert whole(tmp_path / "a.jsonl", columns=["x"])[0] == 1
    if place == "store":
        monkeypatch.setattr(arrow_files.JsonFile, "_iterate_tables", None)
        assert whole(tmp_path / "a.jsonl", columns=["x"])[0] == 1
