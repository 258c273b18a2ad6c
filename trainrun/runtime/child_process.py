"""Run user code in a forked child process that is discarded afterwards.

what: the child has copies of all objects of this process, so nothing that the code changes reaches this process:
    tensors, attributes, closures, locks, random states, positions in open files. Plain values return through a pipe.
    The code runs in a new thread of the child: OpenMP's threads do not survive a fork, and a computation in the
    forked thread would wait for them forever, while a new thread starts its own.
when: user code that runs before the training, on Linux. when not: after CUDA was started, which allows no fork, and
    if the user has started threads: a fork has none of them, so code that waits for one would wait forever.
"""

from __future__ import annotations

import contextvars
import gc
import math
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
from time import sleep
from typing import Any, Final, TypeVar

T = TypeVar("T")
Say = Callable[[str], None]

OPEN_FILES: Final = Path("/proc/self/fd")
THREADS: Final = Path("/proc/self/task")
OWN_THREADS: Final = ("MainThread", "trainrun")  # begin names of threads that are not the user's
AUTOGRAD: Final = "pt_autograd"  # the name of the threads that torch starts for the backward pass of a GPU
OWNER_SECONDS: Final = 0.5  # between two looks whether the parent process is still there
LIMIT_SECONDS: Final = 120.0
SIGN, ANSWER = b"s", b"a"  # the kinds of messages
HEAD_BYTES: Final = 9  # of a message: its kind, and the number of bytes that follow
_answers: int | None = None  # in a child, the pipe to its parent


class ChildError(Exception):
    """The error of work in a child process. The message names the original error, or how the process ended.

    text: the traceback in the child.
    """

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class ChildTimeout(ChildError):
    """The error that a child process returned no result within its limit."""


class ChildExited(ChildError):
    """The error that a child process exited without a result."""


def can_fork_safely() -> bool:
    """Return whether a forked child of this process can run user code: forward passes on the CPU, and data sets."""
    if sys.platform != "linux":
        return False
    if not all(thread.name.startswith(OWN_THREADS) for thread in threading.enumerate()):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return False
    return not any(name.startswith(AUTOGRAD) for name in _list_thread_names())


def run_in_child(
    work: Callable[[], T], limit_seconds: float = LIMIT_SECONDS, computes: bool = True, say: Say | None = None
) -> T:
    """Run `work` in a forked child process and return its result. No other effect reaches this process.

    The result is pickled. An error that can be pickled is raised again here, any other as ChildError. Output of the
    child is dropped. The child starts with this process's random states, but not with its grad mode and autocast.

    limit_seconds: the time until the result or the next `report_progress`; 0 for no limit.
    computes: whether the work may use several torch threads. If not, it runs in the main thread of the child with
        one thread, as in a loader worker.
    say: receives the texts of `report_progress`.
    """
    reading, writing = os.pipe()
    state = random.getstate()  # Python seeds its generator anew after a fork
    with warnings.catch_warnings():  # Python 3.12 warns of a fork beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        _run_as_child(work, reading, writing, state, computes)
    os.close(writing)
    try:
        answer = _read_answer(reading, limit_seconds or math.inf, say)
        if answer is None:
            raise ChildTimeout(f"it took longer than {limit_seconds:g} s")
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)  # it has answered, or its answer is not wanted any more
        _, status = os.waitpid(process, 0)
    if not answer:
        number = os.waitstatus_to_exitcode(status)
        ending = f"signal {-number}, {signal.Signals(-number).name}" if number < 0 else f"exit code {number}"
        raise ChildExited(f"its process ended ({ending})")
    succeeded, value = pickle.loads(answer)
    if succeeded:
        result: T = value
        return result
    raise value


def report_progress(text: str = "") -> bool:
    """Report to the parent process that the work continues, with a text. Return False if this is not a child
    process.
    """
    if _answers is None:
        return False
    _send_message(_answers, SIGN, text)
    return True


def _run_as_child(work: Callable[[], Any], reading: int, writing: int, state: Any, computes: bool) -> None:
    """Run the work, send its result, and exit without any clean-up of the parent's objects."""
    global _answers
    try:
        os.close(reading)
        _answers = writing
        owner = os.getppid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the parent decides what a stop request means
        signal.set_wakeup_fd(-1)
        gc.disable()  # a collection would copy every page that holds an object
        random.setstate(state)
        _reopen_files(writing)
        threading.Thread(target=_exit_with_owner, args=(owner,), daemon=True).start()
        if computes:
            context = contextvars.copy_context()
            worker = threading.Thread(target=context.run, args=(_send_result, work, writing))
            worker.start()
            worker.join()
        else:
            _use_one_thread()
            _send_result(work, writing)
    finally:
        os._exit(0)


def _use_one_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _send_result(work: Callable[[], Any], writing: int) -> None:
    try:
        answer = pickle.dumps((True, work()))
    except BaseException as error:
        answer = pickle.dumps((False, _make_sendable(error)))
    _send_message(writing, ANSWER, answer)


def _send_message(pipe: int, kind: bytes, content: str | bytes) -> None:
    """Write one message: its kind, its length in bytes, and its content."""
    content = content.encode() if isinstance(content, str) else content
    rest = memoryview(kind + len(content).to_bytes(8, "little") + content)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _make_sendable(error: BaseException) -> Exception:
    """Return the error if it survives pickling, else a ChildError with its class, message and traceback."""
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


def reopen_read_files() -> None:
    """Reopen the files that the parent has open for reading, so that this process has its own positions in them."""
    for entry in _list_folder(OPEN_FILES):
        with suppress(OSError):
            mode = _open_mode(int(entry))
            if _is_regular_file(int(entry)) and mode & os.O_ACCMODE == os.O_RDONLY:
                _reopen_file(int(entry), mode)


def end_pipes_and_sockets() -> None:
    """Replace every pipe and socket of a child process by the null device, since their content can be read only
    once.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in _list_folder(OPEN_FILES):
        with suppress(OSError):  # it was the descriptor of the listing
            kind = os.fstat(int(entry)).st_mode
            if int(entry) != _answers and (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
                os.dup2(nothing, int(entry), inheritable=False)


def _reopen_files(pipe: int) -> None:
    """Reopen the files of the parent, so that this process has its own positions, and redirect output to the null
    device.

    A fork shares the position of each open file: reading here would move it for the parent as well.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in _list_folder(OPEN_FILES):
        descriptor = int(entry)
        if descriptor in (pipe, nothing):
            continue
        with suppress(OSError):
            mode = _open_mode(descriptor)
            if descriptor in (1, 2) or (_is_regular_file(descriptor) and mode & os.O_ACCMODE == os.O_WRONLY):
                os.dup2(nothing, descriptor, inheritable=False)
            elif _is_regular_file(descriptor):
                _reopen_file(descriptor, mode)


def _open_mode(descriptor: int) -> int:
    import fcntl  # not on Windows

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def _reopen_file(descriptor: int, mode: int) -> None:
    """Reopen the file behind a descriptor at the same position, which then no other process moves."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    opened = os.open(OPEN_FILES / str(descriptor), mode & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
    os.lseek(opened, position, os.SEEK_SET)
    os.dup2(opened, descriptor, inheritable=False)
    os.close(opened)


def _is_regular_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _exit_with_owner(owner: int) -> None:
    """Wait for the parent to exit, then end this process."""
    while os.getppid() == owner:
        sleep(OWNER_SECONDS)
    os._exit(1)


def _read_answer(reading: int, limit_seconds: float, say: Say | None) -> bytes | None:
    """Return the pickled result, b"" if the child exited without one, None if it is late."""
    while True:
        head = _read_bytes(reading, HEAD_BYTES, limit_seconds)
        content = head and _read_bytes(reading, int.from_bytes(head[1:], "little"), limit_seconds)
        if not head or content is None or head[:1] == ANSWER:
            return head and content
        if content and say is not None:
            say(content.decode())


def _read_bytes(reading: int, number: int, limit_seconds: float) -> bytes | None:
    """Return `number` bytes of the pipe, b"" if its other end is closed, None after `limit_seconds` without data.

    Waiting is counted in ticks, so time in which this process itself was suspended does not count.
    """
    parts, missing, waited = [], number, 0.0
    tick = min(1.0, limit_seconds / 4)
    while missing:
        ready, _, _ = select.select([reading], [], [], tick)
        if not ready:
            waited += tick
            if waited >= limit_seconds:
                return None
            continue
        part = os.read(reading, min(missing, 1 << 16))
        if not part:
            return b""
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _list_thread_names() -> list[str]:
    names = []
    for entry in _list_folder(THREADS):
        with suppress(OSError):  # it has ended meanwhile
            names.append((THREADS / entry / "comm").read_text())
    return names


def _list_folder(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
