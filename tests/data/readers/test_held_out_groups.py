"""Rows are held out by group or from the end of the data, in every format with columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from approved import refused
from PIL import Image

import trainrun
from trainrun.data.facts import describe_classes, describe_source
from trainrun.data.order.training_set import divide_into_fold
from trainrun.data.readers.arrays import hdf5, numpy_files
from trainrun.data.readers.parts import choose_held_rows
from trainrun.data.readers.pictures import image_folder
from trainrun.data.readers.tables import csv_files, huggingface, parquet
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import DataError

ROWS, PATIENTS = 48, 12
NUMBERS = list(range(ROWS))
PATIENT_OF = [f"p{(7 * number) % PATIENTS:02d}" for number in NUMBERS]


def write_csv(folder: Path) -> dict[str, Any]:
    rows = [f"{number},{patient},{number % 2}" for number, patient in zip(NUMBERS, PATIENT_OF, strict=True)]
    (folder / "t.csv").write_text("\n".join(["a,patient,y", *rows]))
    return {"path": str(folder / "t.csv"), "inputs": ["a"]}


def write_parquet(folder: Path) -> dict[str, Any]:
    columns = {"a": NUMBERS, "patient": PATIENT_OF, "y": [number % 2 for number in NUMBERS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    return {"path": str(folder / "t.parquet"), "inputs": ["a"]}


def write_data_set(folder: Path) -> dict[str, Any]:
    return {"path": write_parquet(folder)["path"], "columns": ["a", "y"]}


def write_hdf5(folder: Path) -> dict[str, Any]:
    with h5py.File(folder / "t.h5", "w") as file:
        file["x"] = np.array(NUMBERS, np.float32)[:, None]
        file["y"] = np.array(NUMBERS) % 2
        file["patient"] = np.array(PATIENT_OF, "S3")
    return {"path": str(folder / "t.h5")}


def write_arrays(folder: Path) -> dict[str, Any]:
    np.savez(folder / "t.npz", x_train=np.array(NUMBERS)[:, None], y_train=np.array(NUMBERS) % 2,
             patient=np.array([int(patient[1:]) for patient in PATIENT_OF]))  # fmt: skip
    return {"path": str(folder / "t.npz")}


def write_pictures(folder: Path) -> dict[str, Any]:
    rows = []
    for number, patient in zip(NUMBERS, PATIENT_OF, strict=True):
        Image.new("L", (2, 2), number).save(folder / f"{number:02d}.png")
        rows.append(f"{number:02d}.png,{'ab'[number % 2]},{patient}")
    (folder / "labels.csv").write_text("\n".join(["file,label,patient", *rows]))
    return {"path": str(folder), "labels": "labels.csv", "shape": [1, 2, 2], "dtype": "uint8"}


def numbers_in(source: Any) -> list[int]:
    if isinstance(source, Arrays):
        return [int(value) for value in np.asarray(source.tensors[0])[:, 0]]
    samples = [source[index] for index in range(len(source))]
    return [int(np.asarray(sample[0]).reshape(-1)[0]) for sample in samples]


Write = Callable[[Path], dict[str, Any]]
FORMATS: dict[str, tuple[Any, Write]] = {
    "csv": (csv_files, write_csv), "parquet": (parquet, write_parquet), "datasets": (huggingface, write_data_set),
    "hdf5": (hdf5, write_hdf5), "arrays": (numpy_files, write_arrays), "pictures": (image_folder, write_pictures),
}  # fmt: skip


@pytest.fixture(params=FORMATS)
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    module, write = FORMATS[request.param]
    arguments = write(tmp_path)
    return lambda split, **more: module.load(**arguments, **more)[split]


def test_all_rows_of_a_group_are_on_one_side(load: Callable[..., Any]):
    parts = {}
    for seed in (0, 1):
        train, val = (
            load(split, groups="patient", val_fraction=0.25, seed=seed) for split in ("train", "val")
        )
        numbers = [numbers_in(train), numbers_in(val)]
        assert sorted(numbers[0] + numbers[1]) == NUMBERS
        assert len(numbers[1]) == 12
        patients = [{PATIENT_OF[number] for number in side} for side in numbers]
        assert not patients[0] & patients[1]
        assert len(val.groups) == 12
        parts[seed] = numbers[1]
    assert parts[0] != parts[1]


def test_the_last_rows_or_the_last_groups_are_held_out(load: Callable[..., Any]):
    train, val = (load(split, val_by="last", val_fraction=0.25) for split in ("train", "val"))
    assert numbers_in(train) + numbers_in(val) == NUMBERS
    assert len(numbers_in(val)) == 12
    last = load("val", val_by="last", groups="patient", val_fraction=0.25)
    assert {PATIENT_OF[number] for number in numbers_in(last)} == {"p09", "p10", "p11"}


def test_without_groups_the_same_rows_are_held_out_as_ever(load: Callable[..., Any]):
    assert numbers_in(load("val", val_fraction=0.25)) == numbers_in(
        load("val", val_fraction=0.25, val_by="random")
    )


def test_wrong_words_are_refused(load: Callable[..., Any]):
    with refused(DataError, "data.train.val_by"):
        load("train", val_by="group", val_fraction=0.25)
    with refused(DataError, "data.train.val_by"):
        load("train", val_by="random", groups="patient", val_fraction=0.25)
    with pytest.raises(DataError):
        load("train", groups="nobody", val_fraction=0.25)


def test_folds_keep_groups_together(load: Callable[..., Any]):
    source = load("train", val_fraction=0.25)
    groups = np.array([int(PATIENT_OF[number][1:]) for number in numbers_in(source)])
    mine = Arrays((torch.arange(len(groups)),), groups=groups)
    seen = []
    for fold in range(5):
        inside, held, _ = divide_into_fold(mine, 5, fold, False, "groups")
        assert not set(groups[inside]) & set(groups[held])
        seen += held.tolist()
    assert sorted(seen) == list(range(len(groups)))


class Patients(torch.utils.data.Dataset[int]):
    """A user's class with attributes that it has for reasons of its own."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index

    def __init__(self) -> None:
        self.groups = [number // 10 for number in range(20)]
        self.patients = np.array([f"id{number % 5}" for number in range(20)])
        self.short = ["a"]


def test_folds_keep_together_what_the_setting_names():
    mine = Patients()
    for fold in range(4):
        held = divide_into_fold(mine, 4, fold, False)[1]
        assert len(held) == 5, "an attribute that is merely there changes nothing"
        inside, held, _ = divide_into_fold(mine, 4, fold, False, "patients")
        assert not set(mine.patients[inside]) & set(mine.patients[held])
    for name in ("short", "missing", "__getitem__"):
        with refused(DataError, f"data.fold_groups={name}"):
            divide_into_fold(mine, 4, 0, False, name)


def test_groups_of_unequal_size_come_near_the_fraction():
    groups = np.repeat(np.arange(30), np.arange(1, 31))
    held = choose_held_rows(len(groups), 0.2, 3, groups, is_last=False)
    assert 0.15 < held.mean() < 0.25
    two = choose_held_rows(10, 0.01, 0, np.arange(10) // 5, is_last=False)
    assert two.sum() == 5, "at least one group is on each side"


@pytest.mark.train
def test_invented_patients_score_at_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(5)
    centres, labels = draws.normal(size=(60, 16)), draws.permutation(np.arange(60) % 2)
    lines = [",".join(["patient", *(f"f{k}" for k in range(16)), "y"])]
    for row in draws.permutation(480):
        values = centres[row % 60] + 0.1 * draws.normal(size=16)
        lines.append(
            ",".join([f"id{row % 60}", *(f"{value:.4f}" for value in values), str(labels[row % 60])])
        )
    Path("t.csv").write_text("\n".join(lines))
    words = ["data=csv", "data.path=t.csv", "data.train.val_fraction=0.4", "model=mlp", "trainer.max_epochs=30",
             "optimizer.lr=0.003", "monitor.plots=false", "monitor.hardware=false", "seed=0"]  # fmt: skip
    inputs = f"data.train.inputs=[{','.join(f'f{k}' for k in range(16))}]"
    by_row = trainrun.train(*words, inputs, "output_dir=rows").status["metrics"]["val/acc"]
    by_patient = trainrun.train(*words, "data.train.groups=patient", "output_dir=groups").status["metrics"][
        "val/acc"
    ]
    assert by_row > 0.95
    assert 0.25 < by_patient < 0.75
    folds = trainrun.train(*words[:2], *words[3:], "data.train.val_fraction=0", "data.train.groups=patient",
                           "data.folds=3", "data.fold=0", "output_dir=folds").status["metrics"]["val/acc"]  # fmt: skip
    assert 0.25 < folds < 0.75


def test_the_first_lines_name_the_classes(tmp_path: Path):
    rows = [*["1,a", "2,b", "3,c"] * 5, "4,1O"]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]))
    source = csv_files.load(str(tmp_path / "t.csv"), val_fraction=0.0)["train"]
    assert describe_classes(describe_source(source)) == "4: 1O (1), a (5), b (5), c (5)"
    labels = torch.tensor([0] * 5 + [2] * 3)
    assert describe_classes(describe_source((torch.zeros(8, 2), labels))) == "2: 0 (5), 2 (3)"
    many = torch.arange(100).repeat_interleave(2)[1:]
    told = describe_classes(describe_source((torch.zeros(199, 1), many)))
    assert told.startswith("100: 0 (1), 1 (2), ")
    assert told.endswith("rarest 0 (1)")
    assert describe_classes(describe_source((torch.zeros(8, 2), torch.zeros(8, 1)))) == ""
