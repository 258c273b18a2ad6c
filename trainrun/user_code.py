"""The code of the user: where it is imported from, and which exceptions it raised, as opposed to trainrun or torch."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Final

_PACKAGE = str(Path(__file__).parent) + "/"
HERE: Final = "trainrun.here."  # the prefix of modules of the working directory, see trainrun/here.py
_LIBRARY = sysconfig.get_paths()["stdlib"] + "/"


def is_raised_by_torch(error: BaseException) -> bool:
    """Return whether code of torch raised the error, without code of the user between trainrun and torch."""
    names: list[str] = []
    frame = error.__traceback__
    while frame is not None:
        names.append(str(frame.tb_frame.f_globals.get("__name__")).partition(".")[0])
        frame = frame.tb_next
    return names[-1:] == ["torch"] and not set(names) - {"torch", "trainrun", *sys.stdlib_module_names}


def format_error(error: BaseException) -> str:
    """Return the message of an error; with its class for errors such as KeyError, whose message alone says little."""
    says_enough = isinstance(error, TypeError | ValueError | RuntimeError)
    return str(error) if says_enough else f"{type(error).__name__}: {error}"


def list_user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code in a traceback, the outermost first.

    If the error has none, return those of the first of its causes that has some.
    """
    cause: BaseException | None = error
    while cause is not None:
        frames = [
            frame for frame in traceback.extract_tb(cause.__traceback__) if is_user_file(frame.filename)
        ]
        if frames:
            return frames
        cause = cause.__cause__
    return []


def format_user_line(error: BaseException) -> str:
    """Return ` (file line n)` for the innermost line of the user's code; "" without one."""
    frames = list_user_frames(error)
    return f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""


def format_error_with_line(error: BaseException) -> str:
    """Return `KeyError: 'label' (/home/you/model.py line 11)`, with the innermost line of the user's code."""
    return f"{type(error).__name__}: {error}{format_user_line(error)}"


def format_user_traceback(error: BaseException) -> str:
    """Return a traceback with the user's lines only; "" if the user's code took no part."""
    frames = list_user_frames(error)
    if not frames:
        return ""
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()


def is_built_in(value: Any) -> bool:
    """Return whether the class of a value is defined in this package."""
    return class_package(type(value)) == "trainrun"


def is_users_class(kind: type) -> bool:
    """Return whether a class is defined in the user's own code."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_user_file(file)


def class_package(kind: type) -> str:
    """Return the name of the package or module that defines a class.

    A module of the working directory may be imported as `trainrun.here.NAME`. It is the user's NAME.
    """
    return kind.__module__.removeprefix(HERE).partition(".")[0]


def describe_system_error(error: BaseException) -> str:
    """Return the message of the operating system, as `PATH: Permission denied`; "" if user code took part."""
    if list_user_frames(error):
        return ""
    if not isinstance(error, OSError) or not error.strerror:
        return ""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def is_user_file(filename: str) -> bool:
    if filename.startswith(("<", _PACKAGE)):
        return False
    return not (filename.startswith(_LIBRARY) or "site-packages" in filename or "dist-packages" in filename)


def add_import_paths(extra: list[str]) -> list[str]:
    """Append the working directory and `extra` to the import path, so that installed modules come first.

    Return the folders that are on the path for the user's code.
    """
    paths = [] if getattr(sys.flags, "safe_path", False) else [os.getcwd(), *extra]
    sys.path += [path for path in paths if path not in sys.path]
    return paths
