"""Standard output and error that do not end a run when the pipe is closed or the disk is full."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from trainrun.output import SUBSTITUTE


class LossyOutput(io.FileIO):
    """A file that writes to the null device after its first write error, so that no print ends a run."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def guard_streams() -> None:
    """Wrap standard output and error in `LossyOutput`. Call it when a process starts."""
    sys.stdout, sys.stderr = wrap_output(sys.stdout), wrap_output(sys.stderr)


def wrap_output(stream: TextIO) -> TextIO:
    """Return the stream over `LossyOutput`. Characters that its encoding lacks are replaced by similar ones."""
    if not isinstance(stream, io.TextIOWrapper):  # closed, or that of another program
        return stream
    raw = LossyOutput(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as Python does it with -u
        stream.encoding, SUBSTITUTE, line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip
