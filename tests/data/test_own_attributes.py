"""A data set of the user's may have any attributes: only those that the manual names have a meaning."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quiet_runs import QUIET, losses, train, weights
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainrun.data.cache.cached import CachedDataset
from trainrun.data.facts import describe_source
from trainrun.data.readers.class_numbers import RenumberedClasses
from trainrun.data.readers.pictures.image_folder import ImageFolder
from trainrun.data.readers.reader_protocol import ReaderDataset
from trainrun.data.readers.text.text import TextSamples
from trainrun.data.tensor_dataset import Arrays, Columns

pytestmark = pytest.mark.process

DOCUMENTED = {
    "targets", "classes", "class_names", "num_classes", "set_epoch", "thread_safe", "fingerprint", "labels",
}  # fmt: skip
OWN_CLASSES = (Arrays, CachedDataset, Columns, ImageFolder, ReaderDataset, RenumberedClasses, TextSamples)
NAMES = sorted(
    {name for one in OWN_CLASSES for name in dir(one) if not name.startswith("_")}
    | {field.name for one in (Arrays, Columns) for field in dataclasses.fields(one)}
    | {"files", "notice", "source_class_name"}
)
MODULE = f"""
import torch
from torch.utils.data import Dataset

NAMES = {NAMES!r}


class Plain(Dataset):
    def __init__(self, value=None):
        self.points = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        values = {{"text": "abc", "method": self.shout}}
        for name in NAMES if value else []:
            setattr(self, name, values[value])

    def shout(self):
        return "not what was asked for"

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.points[index], int(self.points[index].sum() > 0)


class Tokens(Plain):
    def __getitem__(self, index):
        return torch.arange(3 + index % 5), index % 2


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(20, 2)

    def forward(self, tokens):
        return self.layer(tokens).mean(1)
"""
DATA = {
    "points": ("data=own_attributes.Plain", "model=mlp", "model.hidden=[4]"),
    "points in a cache": ("data=own_attributes.Plain", "model=mlp", "model.hidden=[4]", "data.cache=memory"),
    "sequences": ("data=own_attributes.Tokens", "model=own_attributes.Bag", "data.padding=bucket"),
}


@pytest.mark.parametrize("words", DATA.values(), ids=list(DATA))
def test_attributes_of_a_data_set_change_nothing(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set(NAMES) - DOCUMENTED
    assert names > {"files", "notice", "lengths", "find_byte_pictures", "column", "unused_arguments"}
    (tmp_path / "own_attributes.py").write_text(MODULE.replace(repr(NAMES), repr(sorted(names))))
    monkeypatch.chdir(tmp_path)
    settings = [
        *QUIET,
        "seed=1",
        "data.batch_size=8",
        "data.num_classes=2",
        "checkpoint.every_n_epochs=null",
        *words,
    ]
    expected: tuple[Any, Any] | None = None
    for value in ("null", "text", "method"):
        run = train(value, 3, *settings, f"data.train.value={value}")
        trained = losses(run), {name: tensor.tolist() for name, tensor in weights(run).items()}
        expected = expected or trained
        assert trained == expected


def describe(**attributes: Any) -> tuple[tuple[str, ...], int | None]:
    """Return the class names and their number that a data set with these attributes has, also twice and in part."""
    data = Labelled(6)
    for name, value in attributes.items():
        setattr(data, name, value)
    facts = [describe_source(one) for one in (data, ConcatDataset([data, data]), Subset(data, [0, 1]))]
    one, *others = [(fact.class_names, fact.num_classes) for fact in facts]
    assert others == [one, one]
    return one


class Labelled(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(4), index % 3


@pytest.mark.parametrize(
    "names",
    [np.unique([2, 0, 1, 1]), torch.arange(3), {"0": 0, "1": 1, "2": 2}, ["0", "1", "2"]],
    ids=["array", "tensor", "mapping", "list"],
)
@pytest.mark.parametrize("attribute", ["classes", "class_names"])
def test_class_names_may_be_any_collection(attribute: str, names: Any) -> None:
    assert describe(**{attribute: names}) == (("0", "1", "2"), 3)


@pytest.mark.parametrize("number", [np.int64(3), 3], ids=["array", "number"])
def test_a_whole_number_of_classes_counts(number: Any) -> None:
    assert describe(num_classes=number) == ((), 3)


@pytest.mark.parametrize("number", [lambda: 3, {"a": 3}, "3", True, -1, np.arange(3)])
def test_another_attribute_num_classes_is_left_alone(number: Any) -> None:
    assert describe(num_classes=number, classes=lambda: ["a"]) == ((), None)


@pytest.mark.parametrize(
    "targets", [[[1] * (i % 3) for i in range(6)], {"a": 1}, "abc", [1, 2], lambda: [0] * 6]
)
def test_targets_that_are_not_one_label_a_sample_are_left_alone(targets: Any) -> None:
    assert describe(targets=targets) == ((), None)
