"""Samples of a store of records that belong to one part of the data: what the engines read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainrun.data.readers.files import fingerprint_of
from trainrun.data.readers.parts import Part, Rows
from trainrun.data.readers.records.record import Facts
from trainrun.errors import DataError


class Store(Protocol):
    """Records by number. read: from any thread; raises ValueError or DataError. files: what the content depends on."""

    @property
    def files(self) -> Sequence[Path]: ...

    def __len__(self) -> int: ...

    def read(self, number: int) -> Any: ...

    def place(self, number: int) -> str: ...


class Records:
    """Map-style. arguments: what else the decoded content depends on, for the fingerprint."""

    thread_safe = True

    def __init__(self, store: Store, rows: Rows | None, facts: Facts, arguments: tuple[Any, ...]) -> None:
        self._store = store
        self._rows = rows
        self._arguments = arguments
        self.class_names = facts.class_names
        self.num_classes = facts.num_classes

    def __len__(self) -> int:
        return len(self._store) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> Any:
        number = self._number(index)
        try:
            return self._store.read(number)
        except (ValueError, OverflowError) as error:
            raise DataError(f"{self._store.place(number)}: {error}") from error

    def describe(self, index: int) -> str:
        """The file and the record in it."""
        return self._store.place(self._number(index))

    def fingerprint(self) -> str:
        rows = None if self._rows is None else self._rows.tobytes()
        return fingerprint_of(self._store.files, type(self._store).__name__, rows, self._arguments)

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return int(index) if self._rows is None else int(self._rows[index])


def records_of(store: Store, part: Part, facts: Facts, *arguments: Any) -> Records:
    """The part's records. DataError: there is none, or nothing is left for one side."""
    if len(store) == 0:
        raise DataError(f"{part.place[1]}={part.place[0]}: there is no record in it")
    rows = part.rows(np.zeros(len(store), np.int64))
    return Records(store, rows, facts, arguments)
