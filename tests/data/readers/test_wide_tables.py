"""Tables of many columns: the work grows with their number, not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainrun.data.readers.tables import csv_files, parquet

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


def written(folder: Path, width: int, ending: str, rows: int = 4) -> str:
    path = folder / f"{width}{ending}"
    columns = {f"c{i}": [row + i for row in range(rows)] for i in range(width - 1)}
    table = pa.table({**columns, "y": [row % 2 for row in range(rows)]})
    if ending == ".csv":
        lines = [table.column_names, *zip(*table.to_pydict().values(), strict=True)]
        path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    else:
        pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize(("load", "ending"), [(csv_files.load, ".csv"), (parquet.load, ".parquet")])
def test_tables_take_time_with_their_columns_alone(tmp_path, load, ending):
    few, many = (written(tmp_path, width, ending) for width in (FEW, MANY))
    load(few, val_fraction=0.25)["train"]  # what is imported once
    small, large = (
        calls_of(lambda path=path: load(path, val_fraction=0.25)["train"]) for path in (few, many)
    )
    assert large < 1.2 * MANY / FEW * small


def test_wide_rows_are_read_in_short_blocks(tmp_path, monkeypatch):
    """The text of a block stays below a number of cells; short and long blocks give the same numbers."""
    path, dialect = written(tmp_path, 50, ".csv", rows=40), csv_files.Dialect()
    whole = csv_files.load(path, val_fraction=0.0)["train"].tensors
    monkeypatch.setattr(csv_files, "CELLS_AT_ONCE", 500)
    assert [len(rows) for rows, _ in csv_files._iterate_blocks(Path(path), dialect, 50)] == [10, 10, 10, 10]
    short = csv_files.load(path, val_fraction=0.0)["train"].tensors
    assert all(one.equal(other) for one, other in zip(whole, short, strict=True))
