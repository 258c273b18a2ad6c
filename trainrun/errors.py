"""Every fault a user can cause, and whose code an exception came from: ours, torch's, or the user's own.

Anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = {  # what a place says that takes no more, and what to do about it
    errno.ENOSPC: "free space", errno.EDQUOT: "free space", errno.EFBIG: "allow larger files there (ulimit -f)",
}  # fmt: skip
OF_NAMES = (  # of places that were named wrongly, or may not be used
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EROFS,
)  # fmt: skip
EXIT_DONE = 0
EXIT_FAILED = 1  # the training failed
EXIT_USAGE = 2  # the user's words, files or data
EXIT_AGAIN = 75  # stopped by SIGTERM, the state is saved: run it again
EXIT_INTERRUPTED = 130  # stopped by Ctrl-C, the state is saved


class TrainrunError(Exception):
    """A fault with a message that names the key as typed, what is allowed and the way out."""

    exit_code = EXIT_USAGE


class ConfigError(TrainrunError):
    """One or more words of the config are wrong; `faults` holds one line for each."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class DataError(TrainrunError):
    """The data is missing, damaged, empty, or does not fit the model."""


class PluginError(TrainrunError):
    """A user's `_target_` cannot be imported, takes other arguments, or breaks its contract."""


class CheckpointError(TrainrunError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class SaveError(CheckpointError):
    """What a run wants to keep cannot be written: the disk is full, or gone. The words were right."""

    exit_code = EXIT_FAILED


class LaunchError(TrainrunError):
    """The ranks of a run could not be started or did not stay together."""


class TrainingError(TrainrunError):
    """The training itself failed: a non-finite loss, a dead rank, no memory."""

    exit_code = EXIT_FAILED


OF_ARGUMENTS = (
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
)  # torch looks at few before it computes with them


def is_of_torch(error: BaseException) -> bool:
    """Whether code of torch raised it, and none of the user's took part, from where it was caught inwards."""
    names: list[str] = []
    frame = error.__traceback__
    while frame is not None:
        names.append(str(frame.tb_frame.f_globals.get("__name__")).partition(".")[0])
        frame = frame.tb_next
    return names[-1:] == ["torch"] and not set(names) - {"torch", "trainrun", *sys.stdlib_module_names}


def named(error: BaseException) -> str:
    """Its words, which alone say little where it is of a kind like KeyError."""
    plain = isinstance(error, TypeError | ValueError | RuntimeError)
    return str(error) if plain else f"{type(error).__name__}: {error}"


ANY_FAULT = (Exception, SystemExit)  # sys.exit in code that is called would end the run without a word

_PACKAGE = str(Path(__file__).parent) + "/"
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


@contextmanager
def told_of_a_setting(kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """A technique refuses with an error that names the setting: no such device, package, compiler or name."""
    try:
        yield
    except kind as error:
        raise ConfigError(str(error)) from error
