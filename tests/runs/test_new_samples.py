"""`data.path` behind evaluate and predict names new samples, and all of them are read; predictions have class names."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import trainrun
from trainrun.cli.main import main

QUIET = (
    "monitor.plots=false",
    "monitor.hardware=false",
    "output_dir=run",
    "trainer.max_epochs=1",
    "trainer.check_task=false",
)
NAMES = ("cat", "dog")


def write_table(path: str, number: int, columns: tuple[str, ...] = ("a", "b", "label")) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in range(number):
            cells = {"a": row % 7 / 7, "b": row % 5 / 5, "label": NAMES[row % 2]}
            writer.writerow([cells[name] for name in columns])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_table("t.csv", 60)
    write_table("new.csv", 31)
    return tmp_path


def train_on_table(*words: str) -> None:
    trainrun.train("data=csv", "data.path=t.csv", "model=mlp", *QUIET, *words)


def predicted(*words: str, split: str = "val") -> list[dict[str, str]]:
    assert main(["predict", "run", *words]) == 0
    with Path(f"run/predictions-{split}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the number of samples on the screen, and the notes."""
    capsys.readouterr()
    assert main(["evaluate", "run", *words]) == 0
    shown = capsys.readouterr()
    return int(shown.out.rpartition("(")[2].split()[0]), shown.err


def test_all_of_a_new_table_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    train_on_table()
    assert len(predicted()) == 6
    assert len(predicted("data.path=new.csv")) == 31
    assert evaluated(capsys, "data.path=new.csv")[0] == 31
    assert len(predicted("data.path=new.csv", "data.train.val_path=t.csv")) == 60, "what is typed holds"


def test_the_data_of_the_training_is_evaluated_on_its_held_out_part(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the file lies now; its samples of the training would give other metrics."""
    train_on_table()
    (folder / "moved.csv").write_bytes((folder / "t.csv").read_bytes())
    metrics = []
    for path in ("t.csv", "moved.csv"):
        number, notes = evaluated(capsys, f"data.path={path}")
        assert number == 6
        assert f"data.train.val_path={path}" in notes
        metrics.append(json.loads(Path("run/evaluation-val.json").read_text()))
        assert len(predicted(f"data.path={path}")) == 60
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("words", [["data.train.val_path=new.csv"], ["data.folds=3", "data.fold=1"]])
def test_a_run_with_other_validation_data_reads_all_of_it(words: list[str]) -> None:
    train_on_table("data.train.val_fraction=0", *words)
    write_table("later.csv", 11)
    assert len(predicted("data.path=later.csv")) == 11


def test_samples_without_targets_have_the_classes_of_training() -> None:
    train_on_table()
    write_table("blind.csv", 2, ("b", "a"))
    rows = predicted("data.path=blind.csv", "data.train.target=none")
    assert [NAMES[int(row["prediction"])] for row in rows] == [row["prediction_name"] for row in rows]
    assert len(rows) == 2
    assert "target" not in rows[0]


def test_predictions_and_targets_have_their_names() -> None:
    train_on_table()
    rows = predicted("data.path=new.csv")
    assert [row["target_name"] for row in rows] == [NAMES[row % 2] for row in range(31)]
    assert all(row["prediction_name"] == NAMES[int(row["prediction"])] for row in rows)
    assert main(["predict", "run", "--out", "p.parquet"]) == 0
    assert pyarrow.parquet.read_table("p.parquet")["prediction_name"].type == pyarrow.string()


def test_numbers_without_names_stay_numbers() -> None:
    Path("n.csv").write_text("a,y\n" + "".join(f"{row},{row % 3}\n" for row in range(40)))
    trainrun.train("data=csv", "data.path=n.csv", "model=mlp", *QUIET)
    rows = predicted()
    assert all(row.get("prediction_name", row["prediction"]) == row["prediction"] for row in rows)


def test_of_a_folder_with_names_the_part_of_the_split_is_read() -> None:
    train_on_table()
    write_table("named/train.csv", 20)
    write_table("named/val.csv", 9)
    write_table("parts/one.csv", 4)
    write_table("parts/two.csv", 5)
    assert len(predicted("data.path=named")) == 9
    assert len(predicted("data.path=parts")) == 9


def write_pictures(path: str, number: int) -> None:
    for row in range(number):
        place = Path(path) / NAMES[row % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (row * 5 % 255, 0, 0)).save(place / f"{row}.png")


def test_all_of_a_new_folder_of_pictures_is_read() -> None:
    write_pictures("old", 40)
    write_pictures("fresh", 14)
    write_pictures("split/train", 4)
    write_pictures("split/val", 6)
    trainrun.train("data=image_folder", "data.path=old", "model=cnn", "data.batch_size=8", *QUIET)
    assert [row["target_name"] for row in predicted("data.path=fresh")] == ["cat"] * 7 + ["dog"] * 7
    assert len(predicted("data.path=split")) == 6


def test_all_of_a_new_parquet_file_is_read() -> None:
    for path, number in (("old.parquet", 40), ("new.parquet", 13)):
        table = pyarrow.table(
            {"x": [float(row) for row in range(number)], "label": [NAMES[row % 2] for row in range(number)]}
        )
        pyarrow.parquet.write_table(table, path)
    trainrun.train("data=parquet", "data.path=old.parquet", "model=mlp", *QUIET)
    assert len(predicted("data.path=new.parquet")) == 13


def test_a_split_that_is_misspelled_has_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    train_on_table()
    for command in ("evaluate", "predict"):
        assert main([command, "run", "--split", "tst"]) == 2
        assert "Did you mean test?" in capsys.readouterr().err
