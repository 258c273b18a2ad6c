"""A label that is no class is named with its line, row or file before a network is built for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused

from trainrun.assemble.data_pipeline import check_labels_fit, describe_sources
from trainrun.config.compose import compose_run
from trainrun.data.facts import describe_classes, describe_many_labels, describe_source
from trainrun.data.readers.arrays import hdf5
from trainrun.data.readers.arrays import numpy_files as arrays
from trainrun.data.readers.pictures import image_folder
from trainrun.data.readers.tables import csv_files, parquet
from trainrun.errors import DataError

N, WRONG = 40, 11  # samples, and the one whose label is wrong


def labels_with(wrong: int) -> list[int]:
    return [wrong if i == WRONG else i % 3 for i in range(N)]


def as_csv(folder: Path, labels: list[int], **arguments: Any) -> Any:
    lines = [f"{i},{label}" for i, label in enumerate(labels)]
    (folder / "t.csv").write_text("\n".join(["a,y", *lines, ""]))
    return csv_files.load(str(folder / "t.csv"), val_fraction=0.1, **arguments)["train"]


def as_arrays(folder: Path, labels: list[int]) -> Any:
    np.savez(folder / "t.npz", x_train=np.zeros((N, 2), np.float32), y_train=np.array(labels))
    return arrays.load(str(folder / "t.npz"), val_fraction=0.1)["train"]


def as_pictures(folder: Path, labels: list[int]) -> Any:
    from PIL import Image

    for i in range(N):
        Image.new("L", (2, 2)).save(folder / f"{i}.png")
    lines = [f"{i}.png,{label}" for i, label in enumerate(labels)]
    (folder / "labels.csv").write_text("\n".join(["file,label", *lines, ""]))
    return image_folder.load(str(folder), labels="labels.csv", val_fraction=0.1, shape=[1, 2, 2])["train"]


def as_parquet(folder: Path, labels: list[int]) -> Any:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": np.zeros(N), "y": labels}), folder / "t.parquet")
    return parquet.load(str(folder / "t.parquet"), val_fraction=0.1)["train"]


def as_hdf5(folder: Path, labels: list[int]) -> Any:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "t.h5", "w") as file:
        file["x"], file["y"] = np.zeros((N, 2), np.float32), labels
    return hdf5.load(str(folder / "t.h5"), val_fraction=0.1)["train"]


PLACES = {
    as_csv: "t.csv line 13: column 'y'", as_arrays: "t.npz: y_train row 11", as_pictures: "11.png",
    as_parquet: "t.parquet row 11", as_hdf5: "t.h5: 'x' row 11",
}  # fmt: skip


def fault(source: Any, *words: str) -> str:
    config = compose_run(["data=csv", "data.path=t.csv", "model=mlp", *words]).config
    with pytest.raises(DataError) as caught:
        check_labels_fit(config, describe_source(source), {"train": source, "val": None})
    return str(caught.value)


@pytest.mark.parametrize("source_of", PLACES, ids=lambda source_of: source_of.__name__)
def test_the_place_of_a_wrong_label(tmp_path, source_of):
    huge = source_of(tmp_path, labels_with(999_999_999))
    said = fault(huge)
    assert f"{PLACES[source_of]} has label 999999999, which makes 1,000,000,000 classes of 37 samples" in said
    assert said.endswith("say data.num_classes=1000000000")
    negative = source_of(tmp_path, labels_with(-5))
    assert f"{PLACES[source_of]} has label -5, but classes are counted from 0" in fault(negative)
    said = fault(negative, "data.num_classes=3")
    assert f"{PLACES[source_of]} has label -5, but data.num_classes=3 allows 0 to 2" in said


def test_the_ways_out(tmp_path):
    config = compose_run(["data=csv", "data.path=t.csv", "model=mlp", "data.num_classes=1000000000"]).config
    huge = as_csv(tmp_path, labels_with(999_999_999))
    check_labels_fit(config, describe_source(huge), {"train": huge})
    config = compose_run(["data=csv", "data.path=t.csv", "model=mlp"]).config
    numbered = as_csv(tmp_path, labels_with(-5), target_dtype="class")
    check_labels_fit(config, describe_source(numbered), {"train": numbered})
    assert numbered.num_classes == 4
    words = ["data=csv", "data.path=t.csv", "model=mlp", "task=multilabel", "model.num_classes=1"]
    both = as_csv(tmp_path, [label % 2 for label in labels_with(0)])  # one output tells two classes apart
    check_labels_fit(compose_run(words).config, describe_source(both), {"train": both})


def test_a_single_class_is_refused_unless_it_is_asked_for(tmp_path):
    one = as_csv(tmp_path, ["cat"] * 20)
    assert "data.train: has a single class, 'cat', which leaves nothing to learn" in fault(one)
    config = compose_run(["data=csv", "data.path=t.csv", "model=mlp", "model.num_classes=1"]).config
    check_labels_fit(config, describe_source(one), {"train": one})


def test_a_label_that_only_the_validation_has(tmp_path):
    train, val = as_csv(tmp_path, labels_with(2)), as_csv(tmp_path, labels_with(7))
    config = compose_run(["data=csv", "data.path=t.csv", "model=mlp"]).config
    with refused(DataError) as caught:
        check_labels_fit(config, describe_source(train), {"train": train, "val": val})
    assert "as data.num_classes=8" in str(caught.value)


def test_what_is_no_class_number_stays(tmp_path):
    """Real numbers of a regression, labels that are ignored, and a task of the user's own."""
    huge, ignored = as_csv(tmp_path, labels_with(999_999_999)), as_csv(tmp_path, labels_with(-100))
    minus = as_csv(tmp_path, labels_with(-1))
    for source, words in (
        (huge, ["task=regression", "model.num_classes=1"]),
        (ignored, []),
        (minus, ["task.ignore_index=-1"]),
        (minus, ["task=custom", "task._target_=my_task.Mine"]),
    ):
        config = compose_run(["data=csv", "data.path=t.csv", "model=mlp", *words]).config
        check_labels_fit(config, describe_source(source), {"train": source})


def lines_on(folder: Path, labels: list[Any], *more: str, **arguments: Any) -> list[str]:
    words = ["data=csv", f"data.path={folder}/t.csv", "model=mlp", *more]
    config, source = compose_run(words).config, as_csv(folder, labels, **arguments)
    facts = describe_source(source)
    check_labels_fit(config, facts, {"train": source})
    found = describe_sources(config, {"train": source}, {}, is_new=True)
    return [line for line in (describe_classes(facts), *found) if line]


def test_real_numbers_as_labels_name_the_settings_that_help(tmp_path: Path) -> None:
    floats = [float(i % 2) for i in range(N)]
    with refused(DataError, "data.train.target_dtype=class", "task=regression"):
        lines_on(tmp_path, floats)
    assert lines_on(tmp_path, floats, target_dtype="class") == ["2: 0.0 (18), 1.0 (18)"]
    assert lines_on(tmp_path, floats, "task=regression") == []
    assert lines_on(tmp_path, floats, "task=multilabel", "model.num_classes=1") == []


def test_whole_numbers_from_python_name_both_ways() -> None:
    line = describe_many_labels(
        torch.utils.data.TensorDataset(torch.rand(N, 2), torch.arange(N)), "data.train", False
    )
    assert "other targets" in line
    assert "task=regression model.num_classes=1" in line


@pytest.mark.parametrize("labels", [range(7, N + 7), [f"id_{i}" for i in range(N)]])
def test_ids_as_labels_are_told(tmp_path: Path, labels: Any) -> None:
    *_, line = lines_on(tmp_path, list(labels))
    assert "data.train.target=" in line
    assert len(lines_on(tmp_path, [i % 5 for i in range(N)])) == 1  # the classes alone


@pytest.mark.parametrize(
    ("labels", "options", "is_said"),
    [
        ([18 + i % 25 for i in range(3 * N)], [], True),  # ages
        ([18 + i % 25 for i in range(3 * N)], ["task=regression"], False),
        ([18 + i % 19 for i in range(3 * N)], [], False),
        ([f"breed {i % 25}" for i in range(3 * N)], [], False),
    ],
)
def test_many_whole_numbers_as_labels_are_said_to_be_classes(
    tmp_path: Path, labels: list[Any], options: list[str], is_said: bool
) -> None:  # fmt: skip
    lines = lines_on(tmp_path, labels, *options)
    assert any("add task=regression" in line for line in lines) == is_said
