"""Run code of the user's in a forked child process that is thrown away.

what: the child has all objects of this process as its own copy, so nothing that the code changes reaches this process:
    tensors, attributes, closures, locks, random states, positions in open files. Plain values come back by a pipe.
    The code runs in a new thread of the child: OpenMP's threads do not survive a fork, and a computation in the
    forked thread would wait for them for ever, while a new thread starts its own.
when: user code that runs before the training, on Linux. when not: after CUDA was started, which allows no fork.
"""

from __future__ import annotations

import contextvars
import gc
import os
import pickle
import random
import select
import signal
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, TypeVar

T = TypeVar("T")

OPEN_FILES: Final = Path("/proc/self/fd")
THREADS: Final = Path("/proc/self/task")
AUTOGRAD: Final = "pt_autograd"  # the name of the threads that torch starts for the backward pass of a GPU
OWNER_SECONDS: Final = 0.5  # between two looks whether the parent process is still there
LIMIT_SECONDS: Final = 120.0


class ChildError(Exception):
    """The work of a child process failed: the message names its error, or how the process ended.

    text: the traceback of the child.
    """

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


def can_fork() -> bool:
    """Return whether a forked child of this process can run forward and backward passes on the CPU."""
    if sys.platform != "linux":
        return False
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return False
    return not any(name.startswith(AUTOGRAD) for name in _thread_names())


def run_in_child(work: Callable[[], T], limit_seconds: float = LIMIT_SECONDS) -> T:
    """Return what `work` returns in a forked child process; nothing else of it reaches this process.

    The result is pickled. An error that can be pickled is raised again here, any other as ChildError. Output of the
    child is dropped. Grad mode and autocast of the calling thread do not hold in `work`, random states do.
    """
    reading, writing = os.pipe()
    state = random.getstate()  # Python seeds its generator anew after a fork
    with warnings.catch_warnings():  # Python 3.12 warns of a fork beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        _be_child(work, reading, writing, state)
    os.close(writing)
    try:
        answer = _read_all(reading, monotonic() + limit_seconds)
        if answer is None:
            raise ChildError(f"it took longer than {limit_seconds:g} s")
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)  # it has answered, or its answer is not wanted any more
        _, status = os.waitpid(process, 0)
    if not answer:
        number = os.waitstatus_to_exitcode(status)
        raise ChildError(f"its process was ended by signal {-number}" if number < 0 else "its process ended")
    succeeded, value = pickle.loads(answer)
    if succeeded:
        result: T = value
        return result
    raise value


def _be_child(work: Callable[[], Any], reading: int, writing: int, state: Any) -> None:
    """Run the work, send its result, and end this process without any clean-up of the parent's objects."""
    try:
        os.close(reading)
        owner = os.getppid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the parent decides what a stop request means
        signal.set_wakeup_fd(-1)
        gc.disable()  # a collection would copy every page that holds an object
        random.setstate(state)
        _open_files_again(writing)
        threading.Thread(target=_leave_with, args=(owner,), daemon=True).start()
        context = contextvars.copy_context()
        worker = threading.Thread(target=context.run, args=(_send_result, work, writing))
        worker.start()
        worker.join()
    finally:
        os._exit(0)


def _send_result(work: Callable[[], Any], writing: int) -> None:
    try:
        answer = pickle.dumps((True, work()))
    except BaseException as error:
        answer = pickle.dumps((False, _sendable(error)))
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(answer)


def _sendable(error: BaseException) -> Exception:
    """Return the error itself if it survives pickling, else a ChildError with its class, message and traceback."""
    text = "".join(traceback.format_exception(error))
    first_line = str(error).partition("\n")[0]
    replacement = ChildError(f"{type(error).__name__}: {first_line}", text)
    if not isinstance(error, Exception):
        return replacement
    try:
        error.add_note(text) if hasattr(error, "add_note") else None
        again = pickle.loads(pickle.dumps(error))
        return error if str(again) == str(error) else replacement
    except Exception:  # an error class of the user's, with arguments of its own
        return replacement


def _open_files_again(pipe: int) -> None:
    """Give this process positions of its own in the files that the parent has open, and no way to write output.

    A fork shares the position of each open file: reading here would move it for the parent as well.
    """
    import fcntl  # not on Windows

    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in _names(OPEN_FILES):
        descriptor = int(entry)
        if descriptor in (pipe, nothing):
            continue
        with suppress(OSError):
            mode = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if descriptor in (1, 2) or (_is_file(descriptor) and mode & os.O_ACCMODE == os.O_WRONLY):
                os.dup2(nothing, descriptor, inheritable=False)
            elif _is_file(descriptor):
                position = os.lseek(descriptor, 0, os.SEEK_CUR)
                own = os.open(OPEN_FILES / entry, mode & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
                os.lseek(own, position, os.SEEK_SET)
                os.dup2(own, descriptor, inheritable=False)
                os.close(own)


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _leave_with(owner: int) -> None:
    """End this process if its parent is gone."""
    while os.getppid() == owner:
        sleep(OWNER_SECONDS)
    os._exit(1)


def _read_all(reading: int, deadline: float) -> bytes | None:
    """Return what comes through the pipe until its other end is closed; None if that takes too long."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(deadline - monotonic(), 0.0))
        if not ready:
            return None
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _thread_names() -> list[str]:
    names = []
    for entry in _names(THREADS):
        with suppress(OSError):  # it has ended meanwhile
            names.append((THREADS / entry / "comm").read_text())
    return names


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
