"""The rows of a run as they are written: `metrics.jsonl`, one strict JSON object a line, append only.

JSON has no word for numbers that are not finite; here they are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainrun.folder.run_folder import strict, sync_path

BLOCK_BYTES = 1 << 16


class MetricsFile:
    """Appends rows; a row reaches the disk within `flush_seconds` of the next one, or at `flush`.

    The file is reopened for each flush: it may be replaced as a whole while a run starts, when rows
    behind the step of a resume are cut. Other threads may write too. check: called ahead of each flush.
    """

    def __init__(
        self, path: Path, flush_seconds: float = 1.0, check: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._check, self._flush_seconds = path, check, flush_seconds
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
        self.flush()
        if self._path.exists():
            sync_path(self._path)
            sync_path(self._path.parent)

    def _flush(self) -> None:
        if self._lines:
            self._check()
            _append(self._path, "".join(self._lines).encode())
            self._lines.clear()
        self._flushed = time.monotonic()


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
    """Remove an incomplete last line before rows are appended. Do nothing if there is no file."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = kept = file.seek(0, os.SEEK_END)
        while kept > 0:
            start = max(0, kept - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(kept - start).rfind(b"\n")
            kept = start + newline + 1
            if newline >= 0:
                break
        if kept < end:
            file.truncate(kept)


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError:  # rare, so the common row pays nothing for it
        return json.dumps(strict(row), allow_nan=False) + "\n"
