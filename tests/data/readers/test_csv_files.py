"""Tables as text: what becomes a number, a class, or an error that names the line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from approved import approve, refused

from trainrun.data.readers.tables import csv_files, parquet
from trainrun.data.readers.tables.csv_files import load
from trainrun.errors import DataError

ROWS = [f"{i},{i / 4},{'cat' if i % 3 else 'dog'},{i % 5}" for i in range(40)]
TABLE = "\n".join(["a,b,kind,grade", *ROWS]) + "\n"


def written(folder: Path, text: str = TABLE, name: str = "table.csv") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def fault(path: str, split: str = "train", **arguments) -> str:
    with pytest.raises(DataError) as caught:
        load(path, **arguments)[split]
    return str(caught.value)


def everything(path: str, **arguments):
    """Inputs and target of train and val in the order of the file."""
    train, val = (load(path, **arguments)[split] for split in ("train", "val"))
    inputs, target = (torch.cat(pair) for pair in zip(train.tensors, val.tensors, strict=True))
    order = inputs.flatten(1)[:, 0].argsort()
    return inputs[order], target[order], train


def test_words_become_classes_and_numbers_floats(tmp_path):
    inputs, target, train = everything(written(tmp_path), inputs=["a", "b"], target="kind")
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, torch.tensor([[i, i / 4] for i in range(40)]))
    assert target.tolist() == [0 if i % 3 else 1 for i in range(40)]
    assert (train.class_names, train.num_classes) == (("cat", "dog"), 2)


def test_one_input_and_all_but_the_target(tmp_path):
    path = written(tmp_path, "label,x,y2\n" + "".join(f"{i % 2},{i},{-i}\n" for i in range(10)))
    inputs, target, train = everything(path, val_fraction=0.4)
    assert torch.equal(inputs, torch.tensor([[float(i), float(-i)] for i in range(10)]))
    assert target.dtype == torch.int64
    assert target.tolist() == [0, 1] * 5
    assert train.num_classes == 2
    only, _, _ = everything(path, inputs="x", val_fraction=0.4)
    assert only.shape == (10, 1)


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_row_numbers_of_pandas_are_inputs_only_where_they_are_named(tmp_path, name):
    path = written(tmp_path, f"{name},x,label\n0,5,0\n1,6,1\n")
    assert load(path, val_path=path)["train"].tensors[0].tolist() == [[5], [6]]
    assert load(path, inputs=[name, "x"], val_path=path)["train"].tensors[0].tolist() == [[0, 5], [1, 6]]


@pytest.mark.parametrize(
    ("dtype", "shape", "kind"),
    [("auto", (36,), torch.int64), ("float32", (36, 1), torch.float32), ("class", (36,), torch.int64)],
)
def test_kinds_of_target(tmp_path, dtype, shape, kind):
    path = written(tmp_path)
    target = load(path, inputs=["a"], target="grade", target_dtype=dtype)["train"].tensors[1]
    assert (target.shape, target.dtype) == (shape, kind)
    several = load(path, inputs=["a"], target=["b", "grade"])["train"].tensors[1]
    assert (several.shape, several.dtype) == ((36, 2), torch.float32)
    assert load(path, inputs=["a"], target="b")["train"].tensors[1].shape == (36, 1)
    assert len(load(path, inputs=["a"], target="none")["train"].tensors) == 1


def test_classes_of_whole_numbers_are_in_the_order_of_numbers(tmp_path):
    path = written(tmp_path, "x,y\n" + "".join(f"{i},{[10, 2, -1][i % 3]}\n" for i in range(30)))
    train = load(path, target_dtype="class")["train"]
    assert train.class_names == ("-1", "2", "10")
    assert set(train.tensors[1].tolist()) == {0, 1, 2}


def test_words_of_one_number_are_numbered_in_the_same_order_by_every_process(tmp_path):
    words = ["1.5", "1.50", "1.500", "1.5000", "1.50000", "1.500000"]
    path = written(tmp_path, "x,y\n" + "".join(f"1,{word}\n" for word in words))
    assert load(path, target_dtype="class", val_path=path)["train"].class_names == tuple(words)


def test_spaces_around_a_word_make_no_other_class(tmp_path):
    path = written(tmp_path, "x,label\n1,cat\n2,cat \n3, dog\n")
    assert load(path, val_path=path)["train"].class_names == ("cat", "dog")


def test_a_word_with_a_line_under_it_is_no_number(tmp_path):
    path = written(tmp_path, "x,y\n1,1_0\n2,1_1\n")
    assert load(path, val_path=path)["train"].class_names == ("1_0", "1_1")


def test_validation_data_of_its_own_has_the_classes_of_the_training_data(tmp_path):
    path = written(tmp_path)
    val_path = written(tmp_path, "kind,a\ndog,1\ndog,2\n", "val.csv")
    arguments = {"inputs": ["a"], "target": "kind", "val_path": val_path}
    val = load(path, **arguments)["val"]
    assert val.tensors[0].tolist() == [[1], [2]]
    assert val.tensors[1].tolist() == [1, 1]
    assert len(load(path, **arguments)["train"].tensors[0]) == 40, "nothing is held out"
    assert load(path, **arguments, test_path=val_path)["test"].tensors[1].tolist() == [1, 1]
    written(tmp_path, "kind,a\ndog,1\ncow,2\n", "val.csv")
    assert f"{val_path} line 3: column 'kind' is 'cow', which is no class" in fault(path, "val", **arguments)
    written(tmp_path, "kind\ndog\n", "val.csv")
    assert "val.csv: has no column a, which the training data has" in fault(path, "val", **arguments)
    assert load(path, target="kind")["test"] is None


def test_several_files_in_the_order_of_their_names(tmp_path):
    written(tmp_path, "x,y\n3,0\n4,1\n", "b.csv")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"y,x\n0,1\n1,2\n"))
    written(tmp_path, "no table", "c.txt")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    written(tmp_path / ".ipynb_checkpoints", "x,y\n3,0\n4,1\n", "b-checkpoint.csv")
    for path in (str(tmp_path), f"{tmp_path}/?.csv*"):
        inputs = load(path, inputs="x", target="y", val_path=path)["train"].tensors[0]
        assert inputs.flatten().tolist() == [1, 2, 3, 4]
    written(tmp_path, "x,z\n3,0\n", "b.csv")
    assert "b.csv: its columns are not those of" in fault(str(tmp_path), target="y")
    written(tmp_path, "x,z,y\n3,0,0\n", "b.csv")
    assert "b.csv: its columns are not those of" in fault(str(tmp_path), target="y")
    named = load(str(tmp_path), inputs="x", target="y", val_path=str(tmp_path))["train"]
    assert named.tensors[0].tolist() == [[1], [2], [3]]
    written(tmp_path, "x,y\n3,0\nno,1\n", "b.csv")
    text = fault(str(tmp_path), target="y")
    assert "b.csv: " in text
    assert "column 'x': 'no' in line 3" in text


def test_forms_of_text(tmp_path):
    path = written(tmp_path, '\ufeff"x", y\r\n"1", "a, ""b"""\r\n\r\n2, c\r\n')
    train = load(path, val_path=path)["train"]
    assert train.tensors[0].tolist() == [[1], [2]]
    assert train.class_names == ('a, "b"', "c")
    tabs = written(tmp_path, "1\t2\t0\n3\t4\t1\n", "no_header.tsv")
    train = load(tabs, target=2, header=False, val_path=tabs)["train"]
    assert train.tensors[0].tolist() == [[1, 2], [3, 4]]
    semicolons = written(tmp_path, "x;y\n1;0\n2;1\n", "semi.csv")
    assert load(semicolons, delimiter=";", val_path=semicolons)["train"].tensors[0].tolist() == [[1], [2]]


def test_types_and_shape_of_inputs(tmp_path):
    path = written(tmp_path, "p,q,label\n" + "".join(f"{i},{2**62 + i},{i % 2}\n" for i in range(20)))
    assert load(path, dtype="int64")["train"].tensors[0][0, 1] == 2**62, "no way through floats"
    assert load(path, dtype="float64")["train"].tensors[0].dtype == torch.float64
    assert load(path, shape=[1, 2, 1], dtype="int64")["train"].tensors[0].shape == (18, 1, 2, 1)
    assert load(path, inputs="p", dtype="uint8")["train"].tensors[0].dtype == torch.uint8
    assert "data.shape=[3]: needs 3 numbers a row, but data.train.inputs are 2" in fault(
        path, shape=[3], dtype="int64"
    )
    assert "line 2: column 'q' is 4611686018427387904, which data.train.dtype=uint8" in fault(
        path, dtype="uint8"
    )


@pytest.mark.parametrize("cell", ["", "NA", "nan", "?"])
@pytest.mark.parametrize("rows_at_once", [2, 8192])
def test_missing_inputs(tmp_path, monkeypatch, cell, rows_at_once):
    monkeypatch.setattr(csv_files, "ROWS_AT_ONCE", rows_at_once)
    path = written(tmp_path, f"x,w,label\n1,2,0\n3,4,1\n5,{cell},0\n6,7,1\n")
    approve(fault(path, inputs=["x", "w"]), path, "'w'", "line 4", "data.train.fill=0")
    assert load(path, val_path=path)["train"].tensors[0].tolist()[2] == [5, 0, 1]
    assert load(path, fill=-1, val_path=path)["train"].tensors[0][:, 1].tolist() == [2, 4, -1, 7]
    assert "data.train.fill=0.5: must be a whole" in fault(path, fill=0.5, dtype="int64")


@pytest.mark.parametrize("rows_at_once", [2, 8192])
def test_true_and_false_are_numbers_as_in_other_tables(tmp_path, monkeypatch, rows_at_once):
    monkeypatch.setattr(csv_files, "ROWS_AT_ONCE", rows_at_once)
    path = written(tmp_path, "flag,x,y\nTrue,1,0\nFALSE,2,1\n,3,0\n true,4,1\n")
    found = load(path, val_path=path, target="y", fill=0.5)["train"].tensors[0]
    assert found.tolist() == [[1, 1], [0, 2], [0.5, 3], [1, 4]]
    approve(fault(path, val_path=path, target="y", inputs=["flag", "x"]), "'flag'", "line 4")
    path = written(tmp_path, "flag,y\nTrue,0\nFalse,1\n0.5,0\nTrue,1\n")
    assert "column 'flag'" in fault(path, val_path=path, target="y", inputs=["flag"])
    path = written(tmp_path, "flag,y\n1,0\n0,1\nTrue,0\nFalse,1\n")
    approve(fault(path, val_path=path, target="y"), "'flag'", "line 4")


@pytest.mark.parametrize("targets", [["1", "NA", "2"], ["a", "", "b"], ["1.5", "nan", "2"], ["1", "", "2"]])
def test_a_missing_target_is_never_filled(tmp_path, targets):
    path = written(tmp_path, "x,y\n" + "".join(f"1,{target}\n" for target in targets))
    assert f"{path} line 3: column 'y' is missing" in fault(path, fill=0, val_path=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; it needs a header and rows"),
        ("x,y\n", "no rows after the header"),
        ("x,x\n1,2\n", "two columns are called 'x'"),
        ("x,y\n1,2\n3\n", "line 3: 1 cells, but the first line has 2; is the file cut short"),
        ('x,y\n1,2\n"3,4\n', "cannot be read as CSV in UTF-8"),
        ("x,y\n1,2\n'abc',4\n", "column 'x': \"'abc'\" in line 3"),
        ("x,y\n5,3\n1_000,2\n", "column 'x': '1_000' in line 3"),
        ("x,y\n1e300,2\n", "line 2: column 'x' is 1e+300, which data.train.dtype=float32 cannot hold"),
    ],
)
def test_damaged_tables(tmp_path, text, message):
    path = written(tmp_path, text)
    assert message in fault(path, target="y")
    assert path in fault(path, target="y")


def test_tables_that_are_not_text(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"x,y\n1,2\n\xff\xfe,3\n")
    assert "cannot be read as CSV in UTF-8" in fault(f"{tmp_path}/x.csv")
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(TABLE.encode())[:-20])
    assert "cannot be read as CSV in UTF-8" in fault(f"{tmp_path}/x.csv.gz", target="kind")
    assert "data.path=/no/where: no such place" in fault("/no/where")
    assert "data.path: name the data" in fault(None)
    (tmp_path / "folder").mkdir()
    assert "no *.csv or *.csv.gz or *.tsv or *.tsv.gz in this folder" in fault(f"{tmp_path}/folder")
    assert "no file fits this pattern" in fault(f"{tmp_path}/*.txt")


def test_wrong_names(tmp_path):
    path = written(tmp_path)
    assert "data.train.target=kid: no such column; did you mean kind?" in fault(path, target="kid")
    assert "data.train.inputs=c: no such column; columns: a, b, kind, grade" in fault(
        path, inputs=["a", "c"], target="b"
    )
    assert "data.train.target: name the column to predict" in fault(path)
    assert "data.train.categories=[kind]" in fault(path, inputs=["a", "b", "kind"], target="grade")
    assert "data.train.delimiter=ab: must be one character" in fault(path, delimiter="ab")
    assert "data.train.val_fraction=0: " in fault(path, "val", inputs="a", target="kind", val_fraction=0)
    assert "split=valid" in fault(path, "valid", target="kind")


@pytest.mark.parametrize("character", [";", "\t", ","])
def test_the_delimiter_of_the_first_line_is_found(tmp_path, character):
    path = written(
        tmp_path, character.join("aby") + "\n" + character.join("120") + "\n" + character.join("341")
    )
    assert load(path, val_fraction=0.0)["train"].tensors[0].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("cells", "is_refused"),
    [
        (["1,5", "2,25", "3"], True),
        (["-1,5", "NA", "4"], True),
        (["1,5", "2", "many"], False),
        (["1,200", "2,300", "4,500"], False),  # perhaps grouped digits
        (["a,b", "b", "c"], False),
    ],
)
def test_a_target_with_decimal_commas_is_refused(tmp_path, suffix, cells, is_refused):
    path = str(tmp_path / f"t.{suffix}")
    if suffix == "csv":
        Path(path).write_text("x;y\n" + "".join(f"1;{cell}\n" for cell in cells))
    else:
        pq.write_table(pa.table({"x": [1.0] * 3, "y": cells}), path)
    module = csv_files if suffix == "csv" else parquet
    options = {"target": "y", "val_fraction": 0.0}
    assert module.load(path, **options, target_dtype="class")["train"].num_classes == 3
    if is_refused:
        with refused(DataError, "target_dtype=class"):
            module.load(path, **options)["train"]
    else:
        assert module.load(path, **options)["train"].num_classes == 3
