"""Standard output and error: where nobody reads them any more, or their disk is full, the run goes on without them."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from trainrun.output import SUBSTITUTE


class LossyOutput(io.FileIO):
    """A descriptor that leads to the null device from its first write error on, so that no print ends a run."""

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
    """Put `LossyOutput` below standard output and error. Call it where a process starts."""
    sys.stdout, sys.stderr = wrap_output(sys.stdout), wrap_output(sys.stderr)


def wrap_output(stream: TextIO) -> TextIO:
    """Return the same stream over `LossyOutput`; it writes characters that its encoding lacks as similar ones."""
    if not isinstance(stream, io.TextIOWrapper):  # closed, or that of another program
        return stream
    raw = LossyOutput(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as Python does it with -u
        stream.encoding, SUBSTITUTE, line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip
