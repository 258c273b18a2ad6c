"""The errors that a user can cause. Any other exception that reaches the user is a bug in trainrun, with a
traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    """An error whose message names the setting as typed, what is allowed, and what to do instead."""

    exit_code = EXIT_USAGE


class ConfigError(TrainrunError):
    """The error that settings are wrong. faults: one line for each of them."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class DataError(TrainrunError):
    """The error that the data is missing, damaged, empty, or does not fit the model."""


class PluginError(TrainrunError):
    """The error that a user's `_target_` cannot be imported, takes other arguments, or breaks its contract."""


class CheckpointError(TrainrunError):
    """The error that a checkpoint is missing, damaged, or belongs to another model."""


class SaveError(CheckpointError):
    """The error for a run that cannot write its files, because the disk is full or was removed."""

    exit_code = EXIT_FAILED


class LaunchError(TrainrunError):
    """The error that the ranks of a run could not be started, or lost each other."""


class LostContact(LaunchError):
    """Another rank is gone. That rank's own error has the cause, so a new attempt is worthwhile.

    exchanges: by process group, the number and the name of the exchange that this rank entered last; the newest one
        comes last. step: the last complete step.
    """

    exit_code = EXIT_FAILED

    def __init__(self, reason: BaseException | str, exchanges: dict[str, list[Any]] | None = None) -> None:
        self.exchanges = exchanges or {}
        self.step: int | None = None
        self.reason = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        super().__init__(f"lost contact with the other ranks ({self.reason})")


class MeetingFailed(LostContact):
    """The error for ranks that did not connect, or cannot be reached, before the first step."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        LaunchError.__init__(self, message)


class TrainingError(TrainrunError):
    """The error that the training failed: a loss that is not finite, a dead rank, or not enough memory."""

    exit_code = EXIT_FAILED


OF_ARGUMENTS = (
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
)  # torch looks at few before it computes with them


ANY_FAULT = (Exception, SystemExit)  # sys.exit in code that is called would end the run without a word


@contextmanager
def raise_as_config_error(kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Raise an error of the block again as ConfigError. The text of the error must name the setting."""
    try:
        yield
    except kind as error:
        raise ConfigError(str(error)) from error
