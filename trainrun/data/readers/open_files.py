"""Open files and decoded blocks of one process. They are created at the first use and never sent to another process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class ProcessLocalCache:
    """The last `limit` values made by `make(key)`, for this process or, with per_thread, for this thread.

    A forked child makes its own values, and a pickled copy is empty. The lock is not held while a value is made, so
    slow reads overlap. close: called with a value that is dropped.
    """

    def __init__(self, make: Callable[[Any], Any], limit: int, per_thread: bool = False,
                 close: Callable[[Any], None] | None = None) -> None:  # fmt: skip
        self._arguments = (make, limit, per_thread, close)
        self._make, self._limit, self._per_thread, self._close = self._arguments
        self._replace_lock()

    def _replace_lock(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._local = threading.local()

    def __reduce__(self) -> Any:
        return ProcessLocalCache, self._arguments

    def __getitem__(self, key: Hashable) -> Any:
        if self._owner != os.getpid():
            self._replace_lock()  # a forked child: the lock may be held by a thread that is gone
        values = (
            self._local.__dict__.setdefault("values", OrderedDict()) if self._per_thread else self._values
        )
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
