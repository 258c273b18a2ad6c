"""Class numbers and input columns of other data are those of training, by name, or are refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from approved import refused

import trainrun
from trainrun.cli.main import main
from trainrun.data.readers.class_numbers import RenumberedClasses, renumber_labels, use_training_classes
from trainrun.data.tensor_dataset import Arrays
from trainrun.errors import CheckpointError, DataError

QUIET = (
    "monitor.plots=false",
    "monitor.hardware=false",
    "model=mlp",
    "output_dir=run",
    "optimizer.lr=0.02",
    "seed=0",
)
CLASSES = ["ant", "bee", "cat"]
MODULE = '''
import torch

class Named(torch.utils.data.Dataset):
    """The class of a sample is where its input has its one; classes: in the order of their numbers."""

    def __init__(self, classes=("ant", "bee", "cat"), field=""):
        self.classes, self.field = list(classes), field
        self.known = ["ant", "bee", "cat"]

    def __len__(self):
        return 96

    def __getitem__(self, index):
        name = self.classes[index % len(self.classes)]
        x = torch.nn.functional.one_hot(torch.tensor(self.known.index(name) if name in self.known else 0), 3).float()
        number = self.classes.index(name)
        return {"x": x, self.field: number} if self.field else (x, number)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "named_classes.py").write_text(MODULE)
    return tmp_path


def accuracy(*words: str, split: str = "val") -> float:
    assert main(["evaluate", "run", "--split", split, *words]) == 0
    return float(json.loads(Path(f"run/evaluation-{split}.json").read_text())[f"{split}/acc"])


def write_classes(path: str, names: list[str], number: int = 96) -> None:
    """A Parquet file whose class numbers have names, as Hugging Face datasets writes it."""
    words = [names[row % len(names)] for row in range(number)]
    columns = {name: [float(word == name) for word in words] for name in CLASSES}
    table = pyarrow.table(columns | {"label": [names.index(word) for word in words]})
    feature = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(feature)}), path)


PARQUET = ("data=parquet", "data.path=train.parquet", "data.train.val_path=val.parquet")


def test_classes_of_validation_files_in_another_order_are_mapped():
    write_classes("train.parquet", CLASSES)
    write_classes("val.parquet", ["cat", "ant", "bee"])
    write_classes("other.parquet", ["bee", "cat"])
    run = trainrun.train(*PARQUET, *QUIET, "trainer.max_epochs=8")
    assert run.status["metrics"]["val/acc"] == 1.0
    assert accuracy("data.train.val_path=other.parquet") == 1.0
    assert accuracy("data.train.test_path=other.parquet", split="test") == 1.0


def test_a_class_that_training_did_not_have_is_refused_by_name():
    write_classes("train.parquet", ["ant", "bee"])
    write_classes("val.parquet", CLASSES)
    with refused(DataError, "cat") as caught:
        trainrun.train(*PARQUET, *QUIET, "trainer.max_epochs=1")
    assert str(caught.value).startswith("data.val")


@pytest.mark.parametrize("field", ["", "label"])
def test_classes_of_a_data_set_of_ones_own_are_mapped(field: str):
    words = (*QUIET, "data.train=named_classes.Named", "data.val=named_classes.Named", "data.batch_size=16",
             *([f"+data.{split}.field={field}" for split in ("train", "val")] if field else []))  # fmt: skip
    run = trainrun.train(*words, "data.val.classes=[cat,bee]", "trainer.max_epochs=6", "data.num_workers=0")
    assert run.status["metrics"]["val/acc"] == 1.0
    assert accuracy("data.val.classes=[bee,cat,ant]") == 1.0
    assert accuracy("data.train.classes=[bee,cat,ant]") == 1.0
    assert main(["evaluate", "run", "data.val.classes=[ant,dog]"]) == 2


def test_data_that_is_named_in_the_order_of_training_is_left_as_it_is():
    source = Arrays((torch.zeros(2, 1), torch.tensor([0, 1])), ("a", "b"), 2)
    assert use_training_classes(source, ("a", "b"), "data.val") is source
    unnamed = (torch.zeros(2, 1), torch.tensor([0, 1]))
    assert use_training_classes(unnamed, ("a", "b"), "data.val") is unnamed


def test_ignored_labels_and_label_maps_are_renumbered():
    labels = torch.tensor([[0, -100], [1, 2]])
    assert renumber_labels(labels, [2, 0, 1]).tolist() == [[2, -100], [0, 1]]
    assert renumber_labels(np.array([0, -1], np.int8), [5]).dtype == np.int8
    assert renumber_labels(1, [4, 3]) == 3


def test_what_a_mapped_data_set_says_of_itself_is_passed_on():
    class Mine:
        classes, targets, thread_safe = ("b", "a"), [0, 1, 1], True

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> list[int]:
            return [index, self.targets[index]]

    mapped = use_training_classes(Mine(), ("a", "b"), "data.val")
    assert isinstance(mapped, RenumberedClasses)
    assert mapped.targets.tolist() == [1, 0, 0]
    assert [mapped[index] for index in range(3)] == [[0, 1], [1, 0], [2, 0]]
    assert mapped.thread_safe
    assert not hasattr(mapped, "lengths")


def write_table(path: str, columns: list[str], number: int = 96) -> None:
    draws = np.random.default_rng(len(path))
    values = {name: draws.random(number).round(3) for name in ("a", "b", "c")}
    values["y"] = np.where(values["a"] > values["b"], "up", "down")
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*[values[name] for name in columns], strict=True))


def test_input_columns_in_another_order_are_taken_by_name():
    write_table("t.csv", ["a", "b", "c", "y"])
    trainrun.train("data=csv", "data.path=t.csv", "data.train.target=y", *QUIET, "trainer.max_epochs=20")
    before = accuracy()
    assert before > 0.8
    write_table("u.csv", ["y", "c", "b", "a"])
    assert accuracy("data.path=u.csv") > 0.8
    write_table("more.csv", ["b", "a", "y", "c"])
    lines = Path("more.csv").read_text().split()
    Path("more.csv").write_text("\n".join(f"{line},{row or 'id'}" for row, line in enumerate(lines)))
    assert accuracy("data.path=more.csv") > 0.8
    assert accuracy("data.train.val_path=u.csv") > 0.8
    write_table("less.csv", ["a", "b", "y"])
    assert main(["evaluate", "run", "data.path=less.csv"]) == 2
    assert main(["predict", "run", "data.path=less.csv"]) == 2


def test_a_resume_on_columns_in_another_order_is_refused():
    write_table("t.csv", ["a", "b", "c", "y"])
    trainrun.train("data=csv", "data.path=t.csv", "data.train.target=y", *QUIET, "trainer.max_epochs=1")
    write_table("u.csv", ["y", "c", "b", "a"])
    assert main(["resume", "run", "data.path=u.csv", "trainer.max_epochs=2"]) == CheckpointError.exit_code
    words = ["data.path=u.csv", "data.train.inputs=[a,b,c]", "trainer.max_epochs=2"]
    assert main(["resume", "run", *words]) == 0


def test_the_kinds_of_input_columns_are_those_of_training():
    labels = [number % 2 for number in range(40)]
    table = {"a": list(map(float, labels)), "b": [0.5] * 40, "label": labels}
    pyarrow.parquet.write_table(pyarrow.table(table), "t.parquet")
    trainrun.train("data=parquet", "data.path=t.parquet", *QUIET, "trainer.max_epochs=1")
    lists = {"b": [[0.5]] * 40, "a": table["a"], "label": table["label"]}
    pyarrow.parquet.write_table(pyarrow.table(lists), "u.parquet")
    assert main(["evaluate", "run", "data.path=u.parquet"]) == 2
