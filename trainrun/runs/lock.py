"""One writer a run folder: a training there holds its lock until the last of its processes ends.

The lock (flock) belongs to an open file, not to a file's existence, so `kill -9` frees it. Ranks get the open
file from their launcher: those that a killed launcher left behind, and that still save, hold it to their end.
Loader workers do not. Some network file systems have no locks: there nobody is held off, and that is said.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress

from trainrun.output import say
from trainrun.runs.run_folder import RunDir

INHERITED = "TRAINRUN_LOCK"  # the number of the open file, for a rank
_held: set[int] = set()
_forks_are_heard = False


def tell(text: str) -> None:
    say(f"trainrun: {text}", file=sys.stderr, flush=True)


@contextmanager
def only_writer(run: RunDir, note: Callable[[str], None] = tell, patient: bool = False) -> Iterator[None]:
    """Nobody else trains in this folder inside. Raises RunBusy, at once while the other process runs.

    patient: waits for that one too, for it is known to be about to end.
    """
    try:
        descriptor = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        from trainrun.runs.exceptional.busy_lock import no_lock

        raise no_lock(run, error) from error
    try:
        if _taken(descriptor, run, note, patient):
            os.ftruncate(descriptor, 0)
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        _keep_from_forks(descriptor)
        try:
            yield
        finally:
            _held.discard(descriptor)
            _release(descriptor)
    finally:
        os.close(descriptor)


def _taken(descriptor: int, run: RunDir, note: Callable[[str], None], patient: bool) -> bool:
    """Whether there is a lock to be had at all; then it is ours."""
    import fcntl  # not on Windows

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        from trainrun.runs.exceptional.busy_lock import taken_later

        return taken_later(descriptor, run, error, note, patient)


def _release(descriptor: int) -> None:
    """Also where a child that is just being started (a compiler's) has a copy of the open file for a moment."""
    import fcntl

    with suppress(OSError):  # no locks here
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _keep_from_forks(descriptor: int) -> None:
    """A forked child (a loader worker) does not keep the lock of a parent that was killed."""
    global _forks_are_heard
    _held.add(descriptor)
    if not _forks_are_heard:
        _forks_are_heard = True
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    while _held:
        os.close(_held.pop())


def passed_on() -> tuple[list[int], dict[str, str]]:
    """For the start of a rank: the open files it inherits, and the word that tells it of them."""
    return sorted(_held), {INHERITED: ",".join(map(str, sorted(_held)))}


def take_over(env: MutableMapping[str, str] = os.environ) -> None:
    """In a rank: holds the launcher's lock until it ends, and keeps it from its own children."""
    for number in filter(None, env.pop(INHERITED, "").split(",")):
        os.set_inheritable(int(number), False)
        _keep_from_forks(int(number))
