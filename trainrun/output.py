"""What is printed: paths, names, reasons and values may be anybody's, so nothing in them can steer a terminal."""

from __future__ import annotations

import re
import sys
from typing import IO

from trainrun.masking import masked

# Control characters but tab and new line, and what changes the direction of a text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: object) -> str:
    """The text with its control characters spelled out, as `\\x1b`; what cannot be encoded too; secrets masked."""
    shown = CONTROLS.sub(lambda found: ascii(found[0])[1:-1], masked(str(text)))
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def say(text: object = "", file: IO[str] | None = None, end: str = "\n", flush: bool = False) -> None:
    """As `print`, for a text that holds what others wrote. file: None is standard output."""
    print(plain(text), file=file, end=end, flush=flush)


def redraw(text: str = "") -> None:
    """Put a text in place of the last line of the terminal."""
    print(f"\r\033[K{plain(text)}", end="", flush=True)


def complain(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """`sys.excepthook`: the traceback of what nobody caught."""
    import traceback

    say("".join(traceback.format_exception(error)), file=sys.stderr, end="")
