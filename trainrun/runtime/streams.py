"""The three standard streams of a process: closed, full or broken ones end no training and change no exit code.

A descriptor that is closed (`>&-`) is opened on the null device, before a file of the run could get its number. A
stream that can no longer be written leads there from then on; characters that its encoding lacks are written as
similar ones; where nobody closed it on purpose, as a pipe's reader
does (`| head`), standard error says so once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO

from trainrun.output import SUBSTITUTE

NAMES = ("stdin", "stdout", "stderr")


class Output(io.FileIO):
    """A descriptor whose faults are not raised."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            lead_nowhere(self.fileno())
            if error.errno != errno.EPIPE:
                name = NAMES[self.fileno()]
                with contextlib.suppress(OSError):
                    os.write(2, f"trainrun: {name}: {error.strerror}; what follows is not shown\n".encode())
            return len(data)


def lead_nowhere(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def guard_streams() -> None:
    """At the start of a process of ours, before it opens a file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            os.set_inheritable(descriptor, True)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115  (until the process ends)
    sys.stdout, sys.stderr = guarded(sys.stdout, 1), guarded(sys.stderr, 2)


def guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    """The same stream with `Output` below it."""
    raw = Output(descriptor, "w", closefd=False)
    if stream is None:  # it was closed; its number may be a file's by now
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    direct = stream.write_through
    strict = stream.errors in ("strict", "surrogateescape")  # they raise where the encoding lacks a character
    return io.TextIOWrapper(
        raw if direct else io.BufferedWriter(raw),  # as Python does it with -u
        encoding=stream.encoding, errors=SUBSTITUTE if strict else stream.errors,
        line_buffering=stream.line_buffering, write_through=direct,
    )  # fmt: skip
