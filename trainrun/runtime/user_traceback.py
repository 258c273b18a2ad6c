"""Where in the user's own code an exception came from: not in this package, nor in an installed one."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

ANY_FAULT = (Exception, SystemExit)  # sys.exit in code that is called would end the run without a word

_PACKAGE = str(Path(__file__).parents[1]) + "/"
_LIBRARY = sysconfig.get_paths()["stdlib"] + "/"


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines of the user's code that were being run, the outermost first; of the first cause that has any."""
    cause: BaseException | None = error
    while cause is not None:
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if _is_users(frame.filename)]
        if frames:
            return frames
        cause = cause.__cause__
    return []


def line_of(error: BaseException) -> str:
    """` (file line n)` of the innermost line of the user's code, or nothing."""
    frames = user_frames(error)
    return f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""


def user_traceback(error: BaseException) -> str:
    """A traceback of the user's lines alone; empty if none took part."""
    frames = user_frames(error)
    if not frames:
        return ""
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()


def is_users_class(kind: type) -> bool:
    """Whether it is defined in the user's own code."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and _is_users(file)


def of_the_system(error: BaseException) -> str:
    """What the operating system said, as `PATH: Permission denied`; empty if code of the user's took part."""
    if user_frames(error):
        return ""
    if not isinstance(error, OSError) or not error.strerror:
        return ""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _is_users(filename: str) -> bool:
    if filename.startswith(("<", _PACKAGE)):
        return False
    return not (filename.startswith(_LIBRARY) or "site-packages" in filename or "dist-packages" in filename)
