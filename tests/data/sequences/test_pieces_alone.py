"""`data.truncate=split`: a piece of a long sample is read alone, and equals what cutting the whole sample gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from trainrun.data.pipeline import open_batches
from trainrun.data.readers.tables import parquet
from trainrun.data.readers.text.text import TextSamples
from trainrun.data.readers.text.text import load as load_text
from trainrun.data.sequences.fields import PiecesDataset, map_fields
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Columns, find_columns

SIZE = 4


def text(folder: Path) -> Any:
    for number, size in enumerate((30, 7, 4, 2, 19)):
        (folder / f"{number}.txt").write_bytes(bytes(range(65, 65 + size)))
    return load_text(f"{folder}/*.txt", kind="documents", val_fraction=0.0, cache_dir=str(folder / "cache"))[
        "train"
    ]


def table_of(folder: Path, target: str | None, **columns: Any) -> Any:
    pyarrow, written = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    written.write_table(pyarrow.table(columns), folder / "t.parquet", row_group_size=2)
    words: dict[str, Any] = {"val_fraction": 0.0, "target": target or "none"}
    return parquet.load(str(folder / "t.parquet"), **words)["train"]


LISTS = [list(range(n)) for n in (9, 3, 4, 1, 6)]


def lists(folder: Path) -> Any:
    return table_of(folder, None, ids=LISTS)


def lists_and_targets(folder: Path) -> Any:
    return table_of(folder, "label", ids=LISTS, label=[[n + 1 for n in row] for row in LISTS])


def several_lists(folder: Path) -> Any:
    mask = [[1] * len(row) for row in LISTS]
    return table_of(folder, "label", ids=LISTS, mask=mask, label=[0, 1, 0, 1, 0])


def subset(folder: Path) -> Any:
    return Subset(text(folder), [3, 0, 4])


def joined(folder: Path) -> Any:
    return ConcatDataset([text(folder), subset(folder)])


NAMES = {
    text: ("inputs", "target"), lists: ("inputs",), lists_and_targets: ("inputs", "target"),
    several_lists: ("inputs.ids", "inputs.mask"), subset: ("inputs", "target"), joined: ("inputs", "target"),
}  # fmt: skip


@pytest.mark.parametrize("source_of", NAMES, ids=lambda function: function.__name__)
def test_a_piece_is_that_of_the_whole_sample(source_of: Any, tmp_path: Path) -> None:
    source, names = source_of(tmp_path), NAMES[source_of]
    first = [np.asarray(leaf) for leaf in leaves_of(source[0])]
    lengths = np.array([len(leaves_of(source[index])[0]) for index in range(len(source))])
    pieces = PiecesDataset(source, lengths, SIZE, names)
    assert len(pieces) > len(source)
    for index in range(len(pieces)):
        begin, whole = int(pieces.begin[index]), source[int(pieces.sample[index])]

        def cut(name: str, value: Any, begin: int = begin) -> Any:
            return value[begin : begin + SIZE] if name in names else value

        wanted, found = leaves_of(map_fields(whole, cut)), leaves_of(pieces[index])
        assert len(wanted) == len(found) == len(first)
        for mine, theirs in zip(found, wanted, strict=True):
            assert type(mine) is type(theirs)
            assert np.asarray(mine).dtype == np.asarray(theirs).dtype
            assert np.array_equal(np.asarray(mine), np.asarray(theirs))


def leaves_of(sample: Any) -> list[Any]:
    found: list[Any] = []
    map_fields(sample, lambda _, value: found.append(value))
    return found


def test_no_whole_sample_is_read_for_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[int] = []
    really = TextSamples.__getitem__

    def counted(self: TextSamples, index: int) -> Any:
        whole.append(index)
        return really(self, index)

    source = text(tmp_path)
    monkeypatch.setattr(TextSamples, "__getitem__", counted)
    options = StreamOptions("data.train", True, 2, 1, max_sequence_length=SIZE, truncate="split", padding="longest",
                            engine="workers", num_workers=0)  # fmt: skip
    stream, _ = open_batches(source, options)
    whole.clear()
    seen = sum(int((batch.data[1] >= 0).sum()) for batch in stream.epoch(0))
    assert seen == int(source.lengths.sum())
    assert whole == []


def test_of_a_table_only_the_piece_is_copied(tmp_path: Path) -> None:
    source = table_of(tmp_path, None, ids=[list(range(10_000))] * 3)
    pieces = PiecesDataset(source, np.full(3, 10_000), SIZE, ("inputs",))
    found = pieces[7]
    owner = found if found.base is None else found.base
    assert found.tolist() == [28, 29, 30, 31]
    assert owner.nbytes == SIZE * found.itemsize


@pytest.mark.parametrize("names", [("x",), ("x", "y")])
def test_rows_of_columns_are_cut_before_they_are_copied(names: tuple[str, ...]) -> None:
    arrays = {
        "x": torch.arange(30).reshape(3, 10),
        "y": np.arange(30, 60).reshape(3, 10),
        "label": np.arange(3),
    }
    columns = find_columns(arrays, "data.train")
    assert isinstance(columns, Columns)
    found = PiecesDataset(columns, np.full(3, 10), SIZE, names)[4]
    assert found["x"].tolist() == [14, 15, 16, 17]
    assert found["y"].tolist() == ([44, 45, 46, 47] if "y" in names else list(range(40, 50)))
    assert found["label"] == 1
    found["x"][0] = -1
    assert arrays["x"][1, 4] == 14
