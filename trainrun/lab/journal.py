"""The journal of a search: one JSON object a line, so that a search that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from trainrun.rundir import cannot_write

NAME: Final = "journal.jsonl"
BEGIN, END = "begin", "end"


class Journal:
    """rows: what an earlier life of this search wrote. asked: the question; it stands above the first line, so that
    nothing is on the disk before something was found out. path: None keeps nothing."""

    def __init__(self, path: Path | None, rows: Sequence[dict[str, Any]] = (),
                 asked: dict[str, Any] | None = None) -> None:  # fmt: skip
        self._path = path
        self._earlier = list(rows)
        self._head = [] if asked is None or rows else [{"kind": BEGIN, "asked": asked}]
        self.seconds = max((row.get("seconds", 0.0) for row in self._earlier), default=0.0)  # that it took

    def write(self, kind: str, **row: Any) -> None:
        """On the disk when it returns."""
        if self._path is None:
            return
        lines = [*self._head, {"kind": kind, **row}]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.truncate(whole_lines(self._path))
                file.writelines(json.dumps(line) + "\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self._path.parent, error) from error
        self._head = []

    def earlier(self, kind: str, **where: Any) -> dict[str, Any] | None:
        """The first line of this kind that an earlier life wrote and that was not asked for yet."""
        for row in self._earlier:
            if row["kind"] == kind and all(row.get(key) == value for key, value in where.items()):
                self._earlier.remove(row)
                return row
        return None


def whole_lines(path: Path) -> int:
    """Bytes of a file up to the end of its last line that is whole."""
    return path.read_bytes().rfind(b"\n") + 1


def read_rows(path: Path) -> list[dict[str, Any]]:
    """None without a file. A line that a kill cut short is left out, and nothing after it counts."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def unfinished(folders: Iterable[Path], asked: dict[str, Any]) -> Path | None:
    """The last journal that was begun with the same question and has no end."""
    found = None
    for path in (folder / NAME for folder in folders):
        rows = read_rows(path)
        if rows and rows[0].get("asked") == asked and rows[-1]["kind"] != END:
            found = path
    return found
