"""The rows of a run on disk: `metrics.jsonl`, one strict JSON object a line, append only.

JSON has no word for numbers that are not finite; here they are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainrun.errors import DataError
from trainrun.monitor.row_kinds import wrong_field
from trainrun.runs.run_folder import sync_path, write_text

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
TEXTS = ("kind", "text", "split", "facts", "class_names")  # never numbers, whatever they say
BLOCK_BYTES = 1 << 16
OF_THE_END = ("confusion", "end")  # written once more by the session that goes on

Row = dict[str, Any]


class MetricsFile:
    """Appends rows; a row reaches the disk within `flush_seconds` of the next one, or at `flush`.

    The file is reopened for each flush: it may be replaced as a whole while a run starts, when rows
    behind the step of a resume are cut. Other threads may write too. check: called ahead of each flush.
    """

    def __init__(
        self, path: Path, flush_seconds: float = 1.0, check: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._check = path, check
        self._flush_seconds = flush_seconds
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._flushed = time.monotonic()

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row of any kind; values are plain numbers, texts, lists and mappings."""
        line = _line(row)
        with self._lock:
            self._lines.append(line)
            if time.monotonic() - self._flushed >= self._flush_seconds:
                self._flush()

    def flush(self) -> None:
        """Write what was held back."""
        with self._lock:
            self._flush()

    def sync(self) -> None:
        """Write what was held back, and return when the disk has it."""
        with self._lock:
            self._flush()
            if self._path.exists():
                sync_path(self._path)
                sync_path(self._path.parent)

    def _flush(self) -> None:
        if self._lines:
            self._check()
            _append(self._path, "".join(self._lines).encode())
            self._lines.clear()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self.flush()


def _append(path: Path, data: bytes) -> None:
    """All of it or, where the disk is full, nothing: half a line would damage the next one."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise


def mend_end(path: Path) -> None:
    """Take away a last line that was cut off, before anything is appended to it. No file is fine."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        kept = end
        while kept > 0:
            start = max(0, kept - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(kept - start).rfind(b"\n")
            kept = start + newline + 1
            if newline >= 0:
                break
        if kept < end:
            file.truncate(kept)


def read_rows(path: Path) -> list[Row]:
    """All rows in the order of writing; a last line that was cut off is left out.

    Raises DataError with the line number where anything else is damaged, and OSError.
    """
    return [row for _, row in _numbered_rows(path)]


def cut_rows_after(path: Path, step: int, validated: bool = True) -> None:
    """Drop the rows behind `step`, ends of earlier sessions, a line that was cut off. No file is fine.

    validated: whether the validation of that very step is part of what the run goes on from; else it is done again.
    """
    if not path.exists():
        return
    last = step if validated else step - 1
    kept = [
        line
        for line, row in _numbered_rows(path)
        if row.get("kind") not in OF_THE_END
        and row.get("step", 0) <= (last if row.get("kind") == "eval" else step)
    ]
    write_text(path, "".join(f"{line}\n" for line in kept), durable=True)


def sound_rows(path: Path) -> tuple[list[str], int]:
    """The lines that are sound, as they stand, and the number of those that are damaged."""
    lines: list[str] = []
    num_bad = 0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            lines.append(_text_and_row(line)[0])
        except ValueError:
            num_bad += 1
    return lines, num_bad


def _text_and_row(line: bytes) -> tuple[str, Row]:
    """Raises ValueError if no run writes such a line."""
    text = line.decode("utf-8")
    row = _parsed(text)
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    if '"nan"' in text or 'inf"' in text:
        row = _numbers(row)
    if wrong := wrong_field(row):
        raise ValueError(f"no run writes such a value of {wrong[:40]!r}")
    return text, row


def _numbered_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Each line as it stands, with its row."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        cut = number == len(lines)  # no newline behind it
        if cut and not line:
            return
        try:
            found = _text_and_row(line)
        except ValueError as error:
            if cut:
                return
            raise DataError(
                f"{path}: line {number} is damaged ({error}); delete that line to read the others"
            ) from error
        yield found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _numbers(row: Row) -> Row:
    """Non-finite numbers back from their names, in the row itself, its summary, and the metrics of that."""
    out: Row = {}
    for name, value in row.items():
        if name in ("summary", "metrics") and isinstance(value, dict):
            out[name] = _numbers(value)
        elif isinstance(value, str) and name not in TEXTS:
            out[name] = NOT_FINITE.get(value, value)
        else:
            out[name] = value
    return out


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError:  # rare, so the common row pays nothing for it
        return json.dumps(_strict(row), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    return value
