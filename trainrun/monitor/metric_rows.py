"""Write and read the rows of `metrics.jsonl`. Reading refuses invalid rows with their line number, so that readers
need no checks.
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
from trainrun.folder.run_folder import replace_non_finite, sync_path, write_text
from trainrun.output import SPEEDS

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
NO_NUMBERS = ("kind", "text", "split", "facts", "class_names")  # whatever they say
OF_THE_END = ("confusion", "regression", "end")  # written once more by the session that goes on
LARGEST = 2**53

Row = dict[str, Any]


def read_metric_rows(path: Path) -> list[Row]:
    """Return all rows in file order, without an incomplete last line.

    Raise DataError with the line number if another line is damaged, and OSError if the file cannot be read.
    """
    return [row for _, row in _read_lines_and_rows(path)]


def delete_rows_after(path: Path, step: int, validated: bool = True) -> None:
    """Delete the rows after `step`, the end rows of earlier sessions and an incomplete last line. Later notes move
    to `step`.

    validated: whether the validation at `step` is part of the state that the run resumes from. If not, its row is
        deleted, because the validation runs again.
    """
    last = step if validated else step - 1
    lines_before = [
        line if row.get("step", 0) <= step else json.dumps(row | {"step": step})
        for line, row in _read_lines_and_rows(path)
        if row.get("kind") not in OF_THE_END
        and (row.get("kind") == "note" or row.get("step", 0) <= (last if row.get("kind") == "eval" else step))
    ]
    write_text(path, "".join(f"{line}\n" for line in lines_before), durable=True)


def read_valid_lines(path: Path) -> tuple[list[str], int]:
    """Return the valid lines unchanged, and the number of damaged lines."""
    lines: list[str] = []
    whole_lines = path.read_bytes().split(b"\n")[:-1]
    for line in whole_lines:
        try:
            lines.append(_parse_line(line)[0])
        except ValueError:
            continue
    return lines, len(whole_lines) - len(lines)


def parse_row(line: bytes) -> Row:
    """Return the row of a line. Raise ValueError if no run writes such a line."""
    return _parse_line(line)[1]


def _read_lines_and_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield each line as text, with its row."""
    *lines, cut = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            yield _parse_line(line)
        except ValueError as error:
            raise DataError(
                f"{path}: line {number} is damaged ({error}); delete that line to read the others"
            ) from error
    try:
        last = _parse_line(cut)
    except ValueError:
        return
    yield last


def _parse_line(line: bytes) -> tuple[str, Row]:
    """Return a line as text and as a row. Raise ValueError if no run writes such a line."""
    text = line.decode("utf-8")
    try:
        row = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    if '"nan"' in text or 'inf"' in text:
        row = parse_non_finite(row)
    if wrong := invalid_field(row):
        raise ValueError(f"a run never writes such a value of {wrong[:40]!r}")
    return text, row


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def parse_non_finite(row: Row) -> Row:
    """Return the row with the texts for NaN and infinity replaced by numbers, in its summary and metrics too."""
    out: Row = {}
    for name, value in row.items():
        if name in ("summary", "metrics") and isinstance(value, dict):
            out[name] = parse_non_finite(value)
        else:
            is_number = isinstance(value, str) and name not in NO_NUMBERS
            out[name] = NOT_FINITE.get(value, value) if is_number else value
    return out


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _is_count(value: Any) -> bool:
    return type(value) is int and -1 <= value < LARGEST


def _is_square_matrix(value: Any) -> bool:
    return _has_shape(value, [[_is_count]]) and all(len(row) == len(value) for row in value)


def _has_shape(value: Any, shape: Any) -> bool:
    """Return whether a value has the given shape.

    shape: a type; a function that tests the value; a list with the shape of every item; a tuple with the shape of
        every value of a mapping; or a mapping from names to shapes, whose values may be None or absent.
    """
    if isinstance(shape, list):
        return isinstance(value, list) and all(_has_shape(item, shape[0]) for item in value)
    if isinstance(shape, tuple):
        return isinstance(value, dict) and all(_has_shape(item, shape[0]) for item in value.values())
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            value.get(name) is None or _has_shape(value[name], item) for name, item in shape.items()
        )
    return isinstance(value, shape) if isinstance(shape, type) else bool(shape(value))


EVERYWHERE: dict[str, Any] = {
    "kind": str, "step": _is_count, "epoch": _is_number, "time": _is_number, "text": str, "split": str,
    "class_names": [str], "matrix": _is_square_matrix,
    "facts": {"name": str, "choices": [str], "steps_per_epoch": _is_number},
    "summary": {
        "monitor": str, "value": _is_number, "best_step": _is_number, "step": _is_count, "epoch": _is_number,
        "seconds": _is_number, **dict.fromkeys(SPEEDS, _is_number), "skipped_steps": _is_count,
        "metrics": (_is_number,), "hardware": (_is_number,), "idle": str,
    },
}  # fmt: skip
OF_KIND: dict[str, dict[str, Any]] = {
    "ledger": dict.fromkeys(("seconds", "vitals", "device"), (_is_number,)),
    "ranks": {"steps": _is_count, "seconds": ([_is_number],)},
    "vae": {"kl_of_dimensions": [_is_number], "activity": [_is_number]},
    "regression": {"target": [[_is_number]], "prediction": [[_is_number]]},
}
OF_NUMBERS = ("train", "eval", "test", "hardware", "vae")  # rows whose other values are all numbers
NEEDED = {
    **dict.fromkeys(("train", "eval", "test", "hardware", "start"), ("step",)), "ledger": ("step", "seconds"),
    "ranks": ("step", "steps", "seconds"), "confusion": ("step", "matrix"),
    "regression": ("step", "target", "prediction"),
    "vae": ("step", "kl_of_dimensions", "activity", "kl", "beta", "active_units"),
}  # fmt: skip


def invalid_field(row: Mapping[str, Any]) -> str:
    """Return the name of the first missing or invalid value of a row; "" if the row is valid."""
    kind = row.get("kind", "")
    if not isinstance(kind, str):
        return "kind"
    shapes = dict.fromkeys(row, _is_number) if kind in OF_NUMBERS else {}
    shapes |= EVERYWHERE | OF_KIND.get(kind, {})
    lacking = (name for name in NEEDED.get(kind, ()) if name not in row)
    wrong = (name for name, value in row.items() if name in shapes and not _has_shape(value, shapes[name]))
    return next(lacking, "") or next(wrong, "")


BLOCK_BYTES = 1 << 16
ENCODER = json.JSONEncoder(allow_nan=False)


class MetricsFile:
    """A writer that appends rows. A row is written within `flush_seconds` of the next row, or at `flush`.

    The file is reopened for each flush, because a resume may replace it when it deletes later rows. Thread-safe.
    check: called before each flush.
    """

    def __init__(
        self, path: Path, flush_seconds: float = 1.0, check: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._check, self._flush_seconds = path, check, flush_seconds
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._flushed = time.monotonic()

    def write(self, row: Mapping[str, Any]) -> None:
        """Buffer one row of any kind. Values are plain numbers, texts, lists and mappings."""
        line = _format_row(row)
        with self._lock:
            self._lines.append(line)
            if time.monotonic() - self._flushed >= self._flush_seconds:
                self._flush()

    def flush(self) -> None:
        """Write the buffered rows."""
        with self._lock:
            self._flush()

    def sync(self) -> None:
        """Write the buffered rows and wait until they are on the disk."""
        self.flush()
        if self._path.exists():
            sync_path(self._path)
            sync_path(self._path.parent)

    def _flush(self) -> None:
        if self._lines:
            self._check()
            _append_or_nothing(self._path, "".join(self._lines).encode())
            self._lines.clear()
        self._flushed = time.monotonic()


def _append_or_nothing(path: Path, data: bytes) -> None:
    """Append all of the data. If the disk is full, append nothing and raise OSError: half a line would damage the
    next.
    """
    with open(path, "ab", buffering=0) as file:
        num_written = 0
        try:
            while num_written < len(data):
                num_written += file.write(data[num_written:])
        except OSError:
            file.truncate(file.tell() - num_written)
            raise


def remove_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line before rows are appended. Do nothing if there is no file."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = length = file.seek(0, os.SEEK_END)
        while length > 0:
            start = max(0, length - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(length - start).rfind(b"\n")
            length = start + newline + 1
            if newline >= 0:
                break
        if length < end:
            file.truncate(length)


def _format_row(row: Mapping[str, Any]) -> str:
    try:
        return ENCODER.encode(row) + "\n"
    except ValueError:  # rare, so the common row pays nothing for it
        return ENCODER.encode(replace_non_finite(row)) + "\n"
