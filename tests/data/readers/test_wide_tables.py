"""Tables of many columns: the work grows with their number, not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainrun.data.readers.tables import csv_files

FEW, MANY = 100, 800


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions are called, and generators resumed."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def names_of(width: int) -> list[str]:
    return [*(f"c{i}" for i in range(width - 1)), "y"]


def csv_table(folder: Path, width: int, rows: int = 4) -> str:
    path = folder / f"{width}.csv"
    lines = [
        names_of(width),
        *([str(row + i) for i in range(width - 1)] + [str(row % 2)] for row in range(rows)),
    ]
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    return str(path)


def parquet_table(folder: Path, width: int) -> str:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / f"{width}.parquet"
    columns = {name: [row + i for row in range(4)] for i, name in enumerate(names_of(width)[:-1])}
    pq.write_table(pa.table({**columns, "y": [0, 1, 0, 1]}), path)
    return str(path)


def test_csv_takes_time_with_its_columns_alone(tmp_path):
    few, many = csv_table(tmp_path, FEW), csv_table(tmp_path, MANY)
    small = calls_of(lambda: csv_files.load(few, "train", val_fraction=0.25))
    large = calls_of(lambda: csv_files.load(many, "train", val_fraction=0.25))
    assert large < 1.2 * MANY / FEW * small


def test_parquet_takes_time_with_its_columns_alone(tmp_path):
    few, many = parquet_table(tmp_path, FEW), parquet_table(tmp_path, MANY)
    from trainrun.data.readers.tables import parquet

    parquet.load(few, "train", val_fraction=0.25)  # what is imported once
    small = calls_of(lambda: parquet.load(few, "train", val_fraction=0.25))
    large = calls_of(lambda: parquet.load(many, "train", val_fraction=0.25))
    assert large < 1.2 * MANY / FEW * small


def test_wide_rows_are_read_in_short_blocks(tmp_path, monkeypatch):
    """The text of a block stays below a number of cells; short and long blocks give the same numbers."""
    path, dialect = csv_table(tmp_path, 50, rows=40), csv_files.Dialect()
    whole = csv_files.load(path, "train", val_fraction=0.0).tensors
    monkeypatch.setattr(csv_files, "CELLS_AT_ONCE", 500)
    blocks = list(csv_files._blocks(Path(path), dialect, 50))
    assert [len(rows) for rows, _ in blocks] == [10, 10, 10, 10]
    short = csv_files.load(path, "train", val_fraction=0.0).tensors
    assert all(one.equal(other) for one, other in zip(whole, short, strict=True))
