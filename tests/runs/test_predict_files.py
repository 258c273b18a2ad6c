"""`predict` reads new files as the training read its own: pictures, tables and rows, without the training data."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from approved import refused
from PIL import Image
from torch import nn

import trainrun
from trainrun.cli.main import main
from trainrun.errors import ConfigError, DataError

QUIET = ("monitor.plots=false", "monitor.hardware=false", "output_dir=run", "trainer.check_task=false")
COLORS = {"blue sky": (20, 40, 230), "red": (230, 30, 20)}
KINDS = ("lily", "rose")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_pictures(path: str, color: tuple[int, int, int], number: int) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(number).integers(-15, 15, (number, 20, 24, 3))
    for row in range(number):
        pixels = np.clip(noise[row] + color, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(f"{path}/{row}.png")


def train_on_pictures() -> None:
    for name, color in COLORS.items():
        write_pictures(f"photos/{name}", color, 24)
    augment = (
        "data.augment.normalize={_target_: trainrun.data.augment.normalize.Normalize, "
        "mean: [0.4, 0.2, 0.5], std: [0.3, 0.1, 0.4]}"
    )
    words = ("data=image_folder", "data.path=photos", "data.shape=[3,16,16]", "model=mlp")
    trainrun.train(*words, augment, "trainer.max_epochs=4", *QUIET)
    shutil.rmtree("photos")


def table_of(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def write_table(path: str, names: tuple[str, ...], number: int) -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in range(number):
            cells = {
                "width": row % 2 + row % 7 / 20,
                "height": row % 5 / 5,
                "kind": KINDS[row % 2],
                "note": 7,
            }
            writer.writerow([cells[name] for name in names])


def train_on_table() -> None:
    write_table("t.csv", ("width", "height", "kind"), 80)
    words = ("data=csv", "data.path=t.csv", "data.train.target=kind", "model=mlp", "trainer.max_epochs=30")
    trainrun.train(*words, *QUIET)
    Path("t.csv").unlink()


def test_pictures_by_file_folder_and_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    train_on_pictures()
    write_pictures("new", COLORS["red"], 3)
    write_pictures("new/deep", COLORS["blue sky"], 2)
    assert main(["predict", "run", "new"]) == 0
    rows = table_of("run/predictions-new.csv")
    assert [row["file"] for row in rows] == [
        *(f"new/{i}.png" for i in range(3)),
        *(f"new/deep/{i}.png" for i in range(2)),
    ]
    assert [row["prediction"] for row in rows] == ["red"] * 3 + ["blue sky"] * 2
    assert {row["prediction_2"] for row in rows[:3]} == {"blue sky"}
    sums = [float(row["confidence"]) + float(row["confidence_2"]) for row in rows]
    assert sums == pytest.approx([1.0] * 5)
    assert "target" not in rows[0]
    assert main(["predict", "run", "new/0.png", "new/deep/*.png", "--out", "p.csv", "--top", "1"]) == 0
    assert [row["prediction"] for row in table_of("p.csv")] == ["red", "blue sky", "blue sky"]
    assert "prediction_2" not in table_of("p.csv")[0]


def test_new_pictures_are_predicted_as_those_of_a_split() -> None:
    """The confidence is that of `predict` without files, to the last digits, so size and normalisation are the same."""
    for name, color in COLORS.items():
        write_pictures(f"more/{name}", color, 2)
    train_on_pictures()
    for name, color in COLORS.items():
        write_pictures(f"photos/{name}", color, 24)
    assert main(["predict", "run", "data.train.val_path=more"]) == 0
    assert main(["predict", "run", "more"]) == 0
    old, new = table_of("run/predictions-val.csv"), table_of("run/predictions-new.csv")
    assert [row["prediction_name"] for row in old] == [row["prediction"] for row in new]
    confidences = [[float(row["confidence"]) for row in rows] for rows in (old, new)]
    assert confidences[0] == pytest.approx(confidences[1], rel=1e-5)


def test_pictures_from_python() -> None:
    train_on_pictures()
    run = trainrun.load("run")
    write_pictures("new", COLORS["red"], 2)
    by_file = run.predict(["new/0.png", "new/1.png"])
    opened = [Image.open(f"new/{i}.png") for i in range(2)]
    arrays = [np.asarray(one) for one in opened]
    tensors = [torch.from_numpy(one.copy()).movedim(-1, 0) for one in arrays]
    for samples in (opened, arrays, tensors):
        assert run.predict(samples)["confidence"] == pytest.approx(by_file["confidence"])
    assert run.predict(arrays[0])["prediction"] == ["red"]
    with pytest.raises(DataError, match=r"\(2, 1, 4, 4\), but this run takes \(N, 3, "):
        run.predict(torch.zeros(2, 1, 4, 4))


def test_a_table_in_any_order_of_columns(capsys: pytest.CaptureFixture[str]) -> None:
    train_on_table()
    write_table("new.csv", ("note", "height", "width"), 4)
    assert main(["predict", "run", "new.csv"]) == 0
    assert "note" in capsys.readouterr().out
    rows = table_of("run/predictions-new.csv")
    assert [row["row"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["prediction"] for row in rows] == ["lily", "rose", "lily", "rose"]
    columns = {"width": [0.0, 1.05], "height": [0.0, 0.2]}
    pyarrow.parquet.write_table(pyarrow.table(columns), "new.parquet")
    assert main(["predict", "run", "new.parquet", "new.csv"]) == 0
    assert [row["file"] for row in table_of("run/predictions-new.csv")] == ["new.parquet"] * 2 + [
        "new.csv"
    ] * 4


def test_a_missing_column_is_named() -> None:
    train_on_table()
    write_table("new.csv", ("height", "note"), 4)
    with refused(DataError, "width"):
        trainrun.load("run").predict("new.csv")


def test_rows_from_python() -> None:
    train_on_table()
    run = trainrun.load("run")
    row, other = {"width": 0.1, "height": 0.2}, {"height": 0.2, "width": 1.1}
    assert run.predict(row)["prediction"] == ["lily"]
    assert run.predict([row, other])["prediction"] == ["lily", "rose"]
    assert run.predict({"width": [0.1, 1.1], "height": [0.2, 0.2]})["prediction"] == ["lily", "rose"]
    with refused(DataError, "width"):
        run.predict({"height": 0.2})
    for samples, key in (
        ([row, {**row, "width": "wide", "height": ""}], "row 1"),
        ([{**row, "width": 1e300}], "width"),
        ([row, "new.csv"], "1 of 2"),
        (np.array(["lily", "rose"]), "<U4"),
        ([], "no samples"),
        ([1, 2], "list"),
        (3, "int"),
    ):
        with refused(DataError, key):
            run.predict(samples)
    assert "run'): ended at step" in repr(run)
    assert "unknown" in repr(trainrun.Run(Path("nowhere")))


def test_categories_of_words() -> None:
    with Path("t.csv").open("w") as file:
        file.write("color,size,price\n")
        file.writelines(f"{('red', 'blue')[i % 2]},{i % 3},{i % 2 * 10}.0\n" for i in range(60))
    words = ("data.path=t.csv", "data.train.target=price", "data.train.categories=[color]", "task=regression")
    trainrun.train("data=csv", *words, "model=mlp", "model.num_classes=1", "trainer.max_epochs=40", *QUIET)
    run = trainrun.load("run")
    low, high = run.predict([{"color": "red", "size": 1}, {"color": "blue", "size": 1}])["prediction"]
    assert low < high
    with refused(DataError, "'color'", "'pink'", "row 0"):
        run.predict({"color": "pink", "size": 1})


def test_arrays_of_a_run_of_objects() -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    run = trainrun.train(*QUIET, "task=classification", model=nn.Linear(4, 2), data=(x, (x[:, 0] > 0).long()))
    found = run.predict(x[:5])
    assert found["index"] == list(range(5))
    assert found["prediction"] == run.load_model()(x[:5]).argmax(1).tolist()
    assert trainrun.load("run").history()["step"] is not None
    assert "<iframe" in run._repr_html_()
    assert 'class="chart"' in str(run.plot())


@pytest.mark.parametrize("words", [["nowhere.png"], ["empty"], ["t.csv"], ["new/0.png", "seed=3"]])
def test_what_cannot_be_read_is_refused(words: list[str]) -> None:
    train_on_pictures()
    write_pictures("new", COLORS["red"], 1)
    Path("empty").mkdir()
    write_table("t.csv", ("width",), 2)
    assert main(["predict", "run", *words]) == ConfigError.exit_code
    assert not Path("run/predictions-new.csv").exists()
