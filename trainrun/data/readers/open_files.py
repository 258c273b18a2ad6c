"""Open files and decoded blocks that stay inside one process: made when first used, never sent to another."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Kept:
    """The last `limit` values made by `make(key)`, for this process and, with per_thread, this thread.

    After a fork the child makes its own; a pickled copy is empty. Two threads may make the same value
    at the same time: the lock is not held while making, so slow reads overlap.
    close: called with a value that is dropped.
    """

    def __init__(self, make: Callable[[Any], Any], limit: int, per_thread: bool = False,
                 close: Callable[[Any], None] | None = None) -> None:  # fmt: skip
        self._make = make
        self._limit = limit
        self._per_thread = per_thread
        self._close = close
        self._renew()

    def _renew(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_make", "_limit", "_per_thread", "_close")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew()

    def __getitem__(self, key: Hashable) -> Any:
        if self._owner != os.getpid():
            self._renew()  # a forked child: the lock may be held by a thread that is gone
        values = self._mine()
        with self._lock:
            if key in values:
                values.move_to_end(key)
                return values[key]
        value = self._make(key)
        with self._lock:
            values[key] = value
            dropped = values.popitem(last=False)[1] if len(values) > self._limit else None
        if dropped is not None and self._close is not None:
            self._close(dropped)
        return value

    def _mine(self) -> OrderedDict[Hashable, Any]:
        if not self._per_thread:
            return self._values
        if not hasattr(self._local, "values"):
            self._local.values = OrderedDict()
        mine: OrderedDict[Hashable, Any] = self._local.values
        return mine
