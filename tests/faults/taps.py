"""The file layer: every change below one folder passes through here, whatever code makes it.

It lies under Python's own calls (open, os.write, os.replace, ...), so nothing that the runner writes can
go past it: checkpoints, config, status and rows alike.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WRITES = set("wax+")


class Operation(NamedTuple):
    """target: of a rename; data: what a write wrote, and where."""

    name: str
    path: str
    target: str = ""
    data: bytes = b""
    offset: int = 0


Hook = Callable[[str, Operation], None]  # "before", "half" (of a write: half of it was written) or "after"


class Tap:
    """Calls `hook` around each operation on what lies below `root`. Once installed it stays: for a forked process."""

    def __init__(self, root: Path, hook: Hook) -> None:
        self.root, self.hook = str(root), hook
        self.paths: dict[int, str] = {}
        self.lock = threading.RLock()
        self.real: dict[str, Any] = {
            name: getattr(os, name)
            for name in (
                "open",
                "close",
                "write",
                "fsync",
                "replace",
                "rename",
                "mkdir",
                "rmdir",
                "unlink",
                "remove",
            )
        }
        self.real_open = io.open

    def install(self) -> None:
        for name in ("replace", "rename"):
            setattr(os, name, self._two_paths(name))
        for name in ("mkdir", "rmdir", "unlink", "remove"):
            setattr(os, name, self._one_path(name))
        os.open, os.close, os.write, os.fsync = self._open, self._close, self._write, self._fsync  # type: ignore
        io.open = builtins.open = self._python_open  # type: ignore[assignment]

    def inside(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(self.root + os.sep)

    def around(self, operation: Operation, act: Callable[[], Any]) -> Any:
        self.hook("before", operation)
        result = act()
        self.hook("after", operation)
        return result

    def write(self, descriptor: int, data: Any, act: Callable[[Any], int]) -> int:
        """A write in two halves, so that a kill finds one of them done."""
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.get_inheritable(descriptor) is False and _appends(descriptor):
            offset = os.fstat(descriptor).st_size
        view = memoryview(data).cast("B")
        operation = Operation("write", self.paths[descriptor], data=bytes(view), offset=offset)
        self.hook("before", operation)
        middle = (
            len(view) // 2 if len(view) < 1 << 20 else 0
        )  # long ones may go by O_DIRECT, in whole sectors
        done = act(view[:middle]) if middle else 0
        self.hook("half", operation)
        while done < len(view):
            done += act(view[done:])
        self.hook("after", operation)
        return done

    def _two_paths(self, name: str) -> Callable[..., Any]:
        def call(source: Any, target: Any, **more: Any) -> Any:
            if not self.inside(target):
                return self.real[name](source, target, **more)
            operation = Operation("rename", os.path.abspath(source), os.path.abspath(target))
            return self.around(operation, lambda: self.real[name](source, target, **more))

        return call

    def _one_path(self, name: str) -> Callable[..., Any]:
        kind = "unlink" if name == "remove" else name

        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if not self.inside(path) or not (name == "mkdir" or os.path.lexists(path)):
                return self.real[name](path, *rest, **more)
            if name == "mkdir" and os.path.lexists(path):
                return self.real[name](path, *rest, **more)
            operation = Operation(kind, os.path.abspath(path))
            return self.around(operation, lambda: self.real[name](path, *rest, **more))

        return call

    def _open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if not self.inside(path) and not (isinstance(path, (str, os.PathLike)) and str(path) == self.root):
            return self.real["open"](path, flags, *rest, **more)
        act = lambda: self.real["open"](path, flags, *rest, **more)  # noqa: E731
        creates = writes and flags & os.O_CREAT and not os.path.lexists(path)
        descriptor = self.around(Operation("create", os.path.abspath(path)), act) if creates else act()
        self.paths[descriptor] = os.path.abspath(path)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self.paths.pop(descriptor, None)
        self.real["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        if descriptor not in self.paths:
            return self.real["write"](descriptor, data)
        return self.write(descriptor, data, lambda part: self.real["write"](descriptor, part))

    def _fsync(self, descriptor: int) -> None:
        if descriptor not in self.paths:
            self.real["fsync"](descriptor)
            return
        self.around(Operation("fsync", self.paths[descriptor]), lambda: None)  # kills spare the page cache

    def _python_open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: Any = None,
        errors: Any = None,
        newline: Any = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        is_open = isinstance(file, int) and file in self.paths
        seen = is_open or (opener is None and self.inside(file))  # opener: a nameless file
        if is_open and closefd and not WRITES & set(mode):
            del self.paths[file]  # Python's file closes it, and a pipe may get its number
        if not seen or not WRITES & set(mode):
            return self.real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        path = self.paths[file] if is_open else os.path.abspath(file)
        kind = "".join(letter for letter in mode if letter not in "bt")
        make = lambda: TappedFile(self, file if is_open else path, kind)  # noqa: E731
        if is_open:
            raw = make()
        elif not os.path.lexists(path):
            raw = self.around(Operation("create", path), make)
        elif "w" in mode:
            raw = self.around(Operation("truncate", path), make)
        else:
            raw = make()
        self.paths[raw.fileno()] = path
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class TappedFile(io.FileIO):
    """A file of Python's own whose writes are seen."""

    def __init__(self, tap: Tap, file: str | int, mode: str) -> None:
        self._tap = tap
        super().__init__(file, mode)

    def write(self, data: Any) -> int:
        if self.fileno() not in self._tap.paths:
            return super().write(data) or 0
        return self._tap.write(self.fileno(), data, lambda part: super(TappedFile, self).write(part) or 0)

    def truncate(self, size: int | None = None) -> int:
        operation = Operation(
            "cut", self._tap.paths[self.fileno()], offset=self.tell() if size is None else size
        )
        return int(self._tap.around(operation, lambda: super(TappedFile, self).truncate(size)))

    def close(self) -> None:
        if not self.closed:
            self._tap.paths.pop(self.fileno(), None)
        super().close()


def _appends(descriptor: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND)
