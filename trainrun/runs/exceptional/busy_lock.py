"""A run folder whose lock is not to be had at once: somebody trains there, or there are no locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import time
from collections.abc import Callable

from trainrun.errors import EXIT_AGAIN, ConfigError, TrainrunError
from trainrun.runs.run_folder import RunDir

BUSY = (errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
WAIT_SECONDS = 45.0  # for the ranks of a launcher that is gone: they stop and save
POLL_SECONDS = 0.1


class RunBusy(TrainrunError):
    """Another process writes in the run folder; later the same command can go on."""

    exit_code = EXIT_AGAIN


def no_lock(run: RunDir, error: OSError) -> ConfigError:
    """Build the error for a lock that cannot be opened."""
    if (
        error.errno == errno.ELOOP
    ):  # the folder may be anybody's, and the lock is written before that is asked
        return ConfigError(f"{run.lock}: is a link, which no lock of ours is; take it away")
    return not_writable(run, error)


def not_writable(run: RunDir, error: OSError) -> ConfigError:
    """Build the error for a run folder that cannot be written: a resumed run cannot move to another folder."""
    return ConfigError(
        f"{run.root}: cannot write there ({error.strerror}), and a run goes on in its own folder; make that writable, "
        f"or begin another run from its newest checkpoint: {shlex.quote(f'ckpt_path={run.root}')}"
    )


def taken_later(
    descriptor: int, run: RunDir, error: OSError, note: Callable[[str], None], patient: bool
) -> bool:
    """Wait for what is left of a process that is gone. Whether there is a lock to be had at all; then it is ours."""
    until, told = time.monotonic() + WAIT_SECONDS, False
    while True:
        if error.errno in NO_LOCKS:
            note(f"{run.root}: this file system has no locks; see to it that no other process trains there")
            return False
        if error.errno not in BUSY:
            raise not_writable(run, error) from error
        owner = _owner(descriptor)
        if not (patient or _is_gone(owner)) or time.monotonic() > until:
            raise RunBusy(
                f"{run.root}: {_named(owner)} trains there; wait until it has ended, or name another folder"
            )
        if not told:
            told = True
            note(f"{run.root}: what is left of {_named(owner)} still saves; waiting for it")
        time.sleep(POLL_SECONDS)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as again:
            error = again


def _owner(descriptor: int) -> dict[str, object]:
    try:
        told = json.loads(os.pread(descriptor, 1000, 0))
    except ValueError:  # it has the lock and has not said who it is yet
        return {}
    return told if isinstance(told, dict) else {}


def _named(owner: dict[str, object]) -> str:
    return (
        f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
    )


def _is_gone(owner: dict[str, object]) -> bool:
    """Known only of a process of this machine."""
    number = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(number, int):
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
