"""A table for spreadsheets and pandas: `metrics.csv` in the run folder, with one number per line.

When: you want a table of all numbers. When not: you need other rows too, which only `metrics.jsonl` has. To get one
    column per metric: `pandas.read_csv("metrics.csv").pivot_table(index="step", columns="name", values="value")`
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainrun.errors import ConfigError

HEAD = ("step", "time", "name", "value")


class CsvFile:
    """A tracking service: `monitor.tracker=csv`. path: the file of one run; null for `metrics.csv` in the run
    folder.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = Path(path) if path else None
        self._there: set[str] = set()  # the names at the step that the run begins with
        self._step = 0

    def open(self, run: Mapping[str, Any], step: int) -> None:
        """Open the table. A resumed run overwrites the rows after the step from which it continues.

        Raise ConfigError if the file is not the table of this run.
        """
        inside = Path(run["folder"]) / "metrics.csv"
        self._path, rows, mark = self._path or inside, [], inside.with_name(".csv-path")
        if self._path.is_file():
            with self._path.open(newline="", encoding="utf-8") as file:
                head, *rows = [*csv.reader(file)] or [[*HEAD]]
            rows = [row for row in rows if len(row) == 4 and row[0].isdecimal()]  # a kill cuts the last one
            marked = mark.is_file() and mark.read_text() == str(self._path.absolute())
            if self._path != inside and (head != [*HEAD] or not marked):
                raise ConfigError(f"{self._path}: is there already and not of this run; name another")
        if self._path != inside:
            mark.write_text(str(self._path.absolute()))
        earlier = [row for row in rows if int(row[0]) <= step]
        self._step, self._there = step, {row[2] for row in earlier if int(row[0]) == step}
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([HEAD, *earlier])
        temporary.replace(self._path)

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        assert self._path is not None
        there = self._there if step == self._step else ()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                (step, f"{seconds:.3f}", name, value) for name, value in values.items() if name not in there
            )

    def text(self, name: str, text: str, step: int) -> None: ...

    def histogram(self, name: str, low: float, high: float, counts: list[int], step: int) -> None: ...

    def picture(self, name: str, path: str, step: int) -> None: ...

    def finish(self) -> None: ...
