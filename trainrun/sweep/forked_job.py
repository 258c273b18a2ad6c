"""Run a job as a fork of the sweep's process. torch is imported already, so a job starts in a third of a second.

Forks are used for jobs on CPUs, on Linux. The user's own modules are imported again in each job, because their
files may have changed.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from trainrun.errors import EXIT_FAILED
from trainrun.output import say
from trainrun.runtime.machine import signal_at_parent_exit

PACKAGE = Path(__file__).parents[1]
# What imports the rest of what a training needs; it starts no thread and computes nothing.
WARM_MODULES = (
    "trainrun.cli.main", "trainrun.cli.train_command", "trainrun.runs.rank", "trainrun.autotune.start",
    "trainrun.summary.at_end", "trainrun.data.pipeline", "trainrun.data.engines.in_memory",
    "trainrun.data.overlap.shared_rows", "trainrun.task.classification",
)  # fmt: skip


def import_what_jobs_need() -> None:
    """Import torch and the modules that a training needs, so that forks share them.

    These objects are frozen for the garbage collector, so that it does not copy their memory pages in each fork.
    """
    for name in WARM_MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def exit_with_sweep(cores: Sequence[int]) -> None:
    """Prepare the process of a job: on Linux it receives SIGTERM when the sweep's process ends, even by SIGKILL.

    cores: the cores that the job may use; empty for all.
    """
    signal_at_parent_exit(signal.SIGTERM)
    if cores and sys.platform == "linux":
        os.sched_setaffinity(0, cores)


class ForkedJob:
    """A fork that runs a command line of trainrun. It has the methods of `subprocess.Popen` that a sweep uses.

    close: open files of the sweep that the job must close.
    """

    def __init__(
        self, words: Sequence[str], output: BinaryIO, cores: Sequence[int], environment: Mapping[str, str],
        close: Sequence[int],
    ) -> None:  # fmt: skip
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # numpy's threads, which are idle, see to forks
            self.pid = os.fork()
        if self.pid == 0:
            run_in_fork(words, output.fileno(), cores, environment, close)

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended the job; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_in_fork(
    words: Sequence[str],
    output: int,
    cores: Sequence[int],
    environment: Mapping[str, str],
    close: Sequence[int],
) -> None:
    """Run a job in a new fork, and end the process. It does not return."""
    code = EXIT_FAILED
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        exit_with_sweep(cores)
        for descriptor in close:
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os.environ.update(environment)
        sys.argv = ["trainrun", *words]
        remove_user_modules()
        code = run_main_module()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_main_module() -> int:
    """Run `python -m trainrun` in this process, and return its exit code."""
    try:
        runpy.run_path(str(PACKAGE / "__main__.py"), run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        say(error.code, file=sys.stderr)  # as Python does
        return EXIT_FAILED
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_FAILED
    return 0


def remove_user_modules() -> None:
    """Remove modules of no installed package from `sys.modules`, so that they are imported again."""
    installed = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    kept = (sys.prefix, sys.base_prefix, str(PACKAGE), *installed)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name != "__main__" and not file.startswith(kept):
            del sys.modules[name]
    importlib.invalidate_caches()
