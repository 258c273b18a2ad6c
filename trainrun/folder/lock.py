"""The lock of a run folder: only one training writes there, until the last of its processes exits.

The lock (flock) belongs to an open file, not to the existence of a file, so `kill -9` releases it. Ranks inherit the
open file from their launcher: if the launcher is killed while they still save, they hold the lock until they exit.
Loader workers do not hold it. Some network file systems have no locks: then nothing is locked, and a note says so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from trainrun.errors import EXIT_AGAIN, ConfigError, TrainrunError
from trainrun.folder.run_folder import RunDir
from trainrun.output import say

INHERITED = "TRAINRUN_LOCK"  # the number of the open file, for a rank
BUSY = (errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
WAIT_SECONDS = 45.0  # for the ranks of a launcher that is gone: they stop and save
POLL_SECONDS = 0.1
_held: set[int] = set()
_forks_are_heard = False


class RunBusy(TrainrunError):
    """The error that another process writes in the run folder. The same command works later."""

    exit_code = EXIT_AGAIN


def print_lock_note(text: str) -> None:
    say(f"trainrun: {text}", file=sys.stderr, flush=True)


@contextmanager
def lock_run_folder(
    run: RunDir, note: Callable[[str], None] = print_lock_note, patient: bool = False
) -> Iterator[None]:
    """Lock the run folder inside the block. Raise RunBusy if another process trains there.

    patient: wait for that process, which is known to exit soon.
    """
    try:
        descriptor = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise build_lock_error(run, error) from error
    try:
        if _try_lock(descriptor, run, note, patient):
            os.ftruncate(descriptor, 0)
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        _close_in_forks(descriptor)
        try:
            yield
        finally:
            _held.discard(descriptor)
            _release_lock(descriptor)
    finally:
        os.close(descriptor)


def open_locked_file(
    path: Path, operation: int, note: Callable[[str], None] = lambda text: None
) -> int | None:
    """Return the descriptor of a file that is open and locked; None if another process holds the lock.

    operation: of `fcntl.flock`. On a file system without locks the file is only opened, and `note` says so.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in NO_LOCKS:
            note(
                f"{path.parent}: this file system has no locks; make sure that no other process works in this folder"
            )
            return descriptor
        os.close(descriptor)
        if error.errno in BUSY:
            return None
        raise
    return descriptor


@contextmanager
def close_in_forks(descriptor: int) -> Iterator[None]:
    """Close an open file after the block, and in children that are forked inside it."""
    _close_in_forks(descriptor)
    try:
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _try_lock(descriptor: int, run: RunDir, note: Callable[[str], None], patient: bool) -> bool:
    """Acquire the lock. Return False if the file system has no locks. Raise RunBusy if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return _wait_for_lock(descriptor, run, error, note, patient)


def build_lock_error(run: RunDir, error: OSError) -> ConfigError:
    """Return the error for a lock file that cannot be opened."""
    if (
        error.errno == errno.ELOOP
    ):  # the folder may be anybody's, and the lock is written before that is asked
        return ConfigError(f"{run.lock}: is a link, not a lock of trainrun; remove it")
    return build_write_error(run, error)


def build_write_error(run: RunDir, error: OSError) -> ConfigError:
    """Return the error for a run folder that is not writable. A resumed run cannot move to another folder."""
    return ConfigError(
        f"{run.root}: cannot write in it ({error.strerror}), and a run continues in its own folder; make it writable, "
        f"or start a new run from its newest checkpoint: {shlex.quote(f'ckpt_path={run.root}')}"
    )


def _wait_for_lock(
    descriptor: int, run: RunDir, error: OSError, note: Callable[[str], None], patient: bool
) -> bool:
    """Wait for the lock while the process that holds it exits. Return False if the file system has no locks."""
    until, has_warned = time.monotonic() + WAIT_SECONDS, False
    while True:
        if error.errno in NO_LOCKS:
            note(
                f"{run.root}: this file system has no locks; make sure that no other process trains in this folder"
            )
            return False
        if error.errno not in BUSY:
            raise build_write_error(run, error) from error
        owner = _read_owner(descriptor)
        if not (patient or _has_owner_exited(owner)) or time.monotonic() > until:
            raise RunBusy(
                f"{run.root}: {_describe_owner(owner)} trains in this folder; wait until it ends, or choose another "
                "folder"
            )
        if not has_warned:
            has_warned = True
            note(f"{run.root}: a rank of {_describe_owner(owner)} is still saving; waiting for it to exit")
        time.sleep(POLL_SECONDS)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as again:
            error = again


def _read_owner(descriptor: int) -> dict[str, object]:
    try:
        owner = json.loads(os.pread(descriptor, 1000, 0))
    except ValueError:  # it has the lock and has not said who it is yet
        return {}
    return owner if isinstance(owner, dict) else {}


def _describe_owner(owner: dict[str, object]) -> str:
    return (
        f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
    )


def _has_owner_exited(owner: dict[str, object]) -> bool:
    """Return whether the owner of a lock has exited. This is known only on the owner's machine."""
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


def _release_lock(descriptor: int) -> None:
    """Release the lock, even if a starting child process has a copy of the open file."""
    with suppress(OSError):  # no locks here
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _close_in_forks(descriptor: int) -> None:
    """Close the lock file in forked children, so that a loader worker does not hold the lock of a killed parent."""
    global _forks_are_heard
    _held.add(descriptor)
    if not _forks_are_heard:
        _forks_are_heard = True
        os.register_at_fork(after_in_child=_close_held_locks)


def _close_held_locks() -> None:
    while _held:
        os.close(_held.pop())


def describe_inherited_lock() -> tuple[list[int], dict[str, str]]:
    """Return the file descriptors that a rank inherits, and the environment variable that lists them."""
    return sorted(_held), {INHERITED: ",".join(map(str, sorted(_held)))}


def hold_inherited_lock(env: MutableMapping[str, str] = os.environ) -> None:
    """Hold the launcher's lock in this rank until it exits, but not in its children."""
    for number in filter(None, env.pop(INHERITED, "").split(",")):
        os.set_inheritable(int(number), False)
        _close_in_forks(int(number))
