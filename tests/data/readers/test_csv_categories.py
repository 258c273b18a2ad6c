"""Columns of words as inputs: each word of the training data is an input of its own, in predictions too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from approved import refused

import trainrun
from trainrun.cli.main import main
from trainrun.data.readers import column_store
from trainrun.data.readers.tables.csv_files import load
from trainrun.errors import DataError

COLORS = ["red", "blue", "green"]
ROWS = [(i, COLORS[i % 3], f"s{i % 2}", i % 2) for i in range(24)]


def write(path: Path, rows: list[tuple[Any, ...]]) -> str:
    path.write_text("a,color,size,y\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture(params=["in memory", "stored"])
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    if request.param == "stored":
        monkeypatch.setattr(column_store, "STORED_FROM", 0)
    return write(tmp_path / "t.csv", ROWS)


def inputs_of(source: Any) -> list[list[float]]:
    return source.tensors[0].tolist()


def test_each_word_is_an_input(table: str) -> None:
    train = load(table, target="y", categories=["color", "size"], val_fraction=0.0)["train"]
    assert list(train.input_columns) == ["a", "color=blue", "color=green", "color=red", "size=s0", "size=s1"]
    expected = [
        [a, *(float(color == one) for one in sorted(COLORS)), float(size == "s0"), float(size == "s1")]
        for a, color, size, _ in ROWS
    ]
    assert inputs_of(train) == expected
    assert "color 3, size 2" in train.notice
    one = load(table, ["color"], "y", categories="color", val_fraction=0.0, shape=[3, 1], dtype="uint8")[
        "train"
    ]
    assert one.tensors[0][0].flatten().tolist() == [0, 0, 1]


def test_other_files_have_the_categories_of_training(table: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.csv", [(1, "red", "s1", 0), (2, "red", "s1", 1)])
    words: dict[str, Any] = {"target": "y", "categories": ["color", "size"]}
    val = load(table, val_path=other, **words)["val"]
    assert inputs_of(val) == [[1, 0, 0, 1, 0, 1], [2, 0, 0, 1, 0, 1]]
    named = load(other, ["a", "color=blue", "color=red", "size=s1"], val_fraction=0.0, **words)["train"]
    assert list(named.input_columns) == ["a", "color=blue", "color=red", "size=s1"]
    assert inputs_of(named) == [[1, 0, 1, 1], [2, 0, 1, 1]]
    write(tmp_path / "other.csv", [(1, "pink", "s1", 0)])
    with refused(DataError, "other.csv", "'color'", "'pink'"):
        load(table, val_path=other, **words)["val"]


def test_a_missing_word_is_refused_unless_something_stands_for_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [*ROWS, ("", "", "s0", 1)])
    with refused(DataError, "line 26"):
        load(path, target="y", categories=["color", "size"], val_fraction=0.0)["train"]
    train = load(path, target="y", categories=["color", "size"], fill=-1, val_fraction=0.0)["train"]
    assert inputs_of(train)[-1] == [-1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ({"categories": ["colour"]}, "data.train.categories=colour"),
        ({"categories": ["size"]}, "'color'"),
        ({"categories": ["color", "size"], "inputs": ["a", "color"]}, "data.train.categories=size"),
        ({"categories": ["color", "size"], "shape": [7]}, "data.shape"),
    ],
)
def test_wrong_words_are_refused(table: str, words: dict[str, Any], key: str) -> None:
    with refused(DataError, key):
        load(table, target="y", val_fraction=0.0, **words)["train"]


def test_a_column_without_a_word_is_no_category(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [(i, "", "s", i % 2) for i in range(20)])
    with refused(DataError, "data.train.categories=color"):
        load(path, target="y", categories=["color"], fill=0.0, val_fraction=0.0)["train"]


def test_a_column_named_like_a_word_of_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("color,color=red,y\n" + "red,1,0\nblue,0,1\n" * 10)
    with refused(DataError, "data.train.categories=color", "color=red"):
        load(str(tmp_path / "t.csv"), target="y", categories=["color"], val_fraction=0.0)["train"]


def test_too_many_words_are_no_categories(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [(i, f"id{i}", "s", i % 2) for i in range(101)])
    with refused(DataError, "'color'"):
        load(path, target="y", categories=["color", "size"])["train"]


MIXED = "color,age,price,id,y\n" + "".join(
    f"{COLORS[i % 3]},{'' if i % 5 == 4 else i},{'free' if i == 7 else i},n{i},{i % 2}\n" for i in range(120)
)


def test_words_and_gaps_need_no_setting(table: str, tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text(MIXED.replace("free", "7").replace("red,3,3", ",3,3"))
    splits = load(str(tmp_path / "m.csv"), target="y", val_fraction=0.0)
    train = splits["train"]
    names = ["color=blue", "color=green", "color=red", "color=", "age", "age=", "price"]
    assert list(train.input_columns) == names
    assert inputs_of(train)[2:5] == [[0, 1, 0, 0, 2, 0, 2], [0, 0, 0, 1, 3, 0, 3], [1, 0, 0, 0, 0, 1, 4]]
    assert all(name in train.notice for name in ("color 3", "age", "id"))
    by_name = load(str(tmp_path / "m.csv"), names, "none", val_fraction=0.0)["train"]
    assert inputs_of(by_name) == inputs_of(train)


@pytest.mark.parametrize("cells", ["1,5", "$1200", "12 %", "1.200,50"])
def test_formatted_numbers_are_no_categories(tmp_path: Path, cells: str) -> None:
    (tmp_path / "t.csv").write_text("a;y\n" + f"{cells};0\n" * 10)
    with pytest.raises(DataError, match="'a'"):
        load(str(tmp_path / "t.csv"), target="y", val_fraction=0.0)["train"]


@pytest.mark.parametrize(
    ("cell", "num_rows", "says"),
    [("{},5", 300, "'0,5'"), ("{},5", 30, "'0,5'"), ("${}00", 300, "'$000'"), ("w{}", 300, "No input")],
)
def test_where_no_column_can_be_used_no_empty_list_is_proposed(
    tmp_path: Path, cell: str, num_rows: int, says: str
) -> None:
    rows = [f"{cell.format(i)};{cell.format(i)};{i % 2}\n" for i in range(num_rows)]
    (tmp_path / "t.csv").write_text("a;b;y\n" + "".join(rows))
    for inputs in (None, ["a", "b"]):
        with refused(DataError, "t.csv", says) as caught:
            load(str(tmp_path / "t.csv"), inputs, "y", val_fraction=0.0)["train"]
        assert "Add these settings" not in str(caught.value)


def test_gaps_that_training_does_not_have_are_refused(table: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.csv", [("", "red", "s1", 0)])
    with refused(DataError, "other.csv", "'a'"):
        load(table, target="y", val_path=other)["val"]


def test_cells_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(MIXED)
    with refused(DataError, "'price'", "'free'", "data.train.inputs") as caught:
        load(str(tmp_path / "t.csv"), target="y", val_fraction=0.0)["train"]
    assert "'color'" not in str(caught.value)
    with refused(DataError, "'color'", "'age'", "'price'", "'id'", "data.train.fill=0") as caught:
        load(str(tmp_path / "t.csv"), ["color", "age", "price", "id"], "y", val_fraction=0.0)["train"]
    assert "data.train.inputs=[color,age,price] data.train.categories=[color]" in str(caught.value)
    (tmp_path / "t.csv").write_text(MIXED.replace("free", "7"))
    mended: dict[str, Any] = {"inputs": ["color", "age", "price"], "categories": ["color"], "fill": 0}
    train = load(str(tmp_path / "t.csv"), target="y", val_fraction=0.0, **mended)["train"]
    assert inputs_of(train)[4] == [1, 0, 0, 0, 4]


@pytest.mark.parametrize(("dtype", "cell"), [("int64", "1.5"), ("float32", "1,5")])
def test_a_few_wrong_cells_are_to_be_corrected(tmp_path: Path, dtype: str, cell: str) -> None:
    (tmp_path / "t.csv").write_text("a;y\n" + "1;0\n" * 9 + f"{cell};1\n")
    with refused(DataError, "'a'", repr(cell), "line 11") as caught:
        load(str(tmp_path / "t.csv"), target="y", val_fraction=0.0, dtype=dtype)["train"]
    assert "categories" not in str(caught.value)


@pytest.mark.train
@pytest.mark.parametrize("inputs", [[], ["data.train.inputs=[a,color,size]"]])
def test_a_prediction_uses_the_categories_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str]
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", ROWS)
    words = [
        "data=csv",
        "data.path=t.csv",
        "data.train.target=y",
        "data.train.categories=[color,size]",
        *inputs,
    ]
    words += ["model=mlp", "model.hidden=[4]", "trainer.max_steps=4", "data.batch_size=8", "seed=1"]
    trainrun.train(*words, "monitor.plots=false", "monitor.hardware=false", "output_dir=run")
    assert main(["predict", "run", "data.path=t.csv"]) == 0
    (predictions,) = Path("run").glob("predictions-*.csv")
    whole = predictions.read_text().splitlines()
    few = [row for row in ROWS if row[1] == "red"]
    write(tmp_path / "few.csv", few)
    assert main(["predict", "run", "data.path=few.csv"]) == 0
    header, *lines = predictions.read_text().splitlines()
    numbers = [row[0] for row in few]
    assert header == whole[0]
    assert [line.partition(",")[2] for line in lines] == [whole[1 + n].partition(",")[2] for n in numbers]
    assert main(["resume", "run", "trainer.max_steps=6"]) == 0
