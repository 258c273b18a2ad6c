"""Several runs from one command line: each job in a process and a folder of its own, one after the other.

A job that fails hides no other. Run again in the same folder, a finished job is not done again, a
stopped one goes on from its newest checkpoint, and new words add new jobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from trainrun.config.argv import OWN_KEYS, CommandLine
from trainrun.config.compose import compose_run
from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, ConfigError
from trainrun.folder.lock import only_writer
from trainrun.folder.run_folder import RunDir, is_there
from trainrun.folder.status import read_status
from trainrun.output import counted, say
from trainrun.parallel.launch import module_command
from trainrun.runtime.signals import catch_stops
from trainrun.sweep.conclusion import conclude
from trainrun.sweep.jobs import Sweep, calls_to_resume, expand, open_sweep
from trainrun.sweep.results import OUTPUT, Job, Result, has_checkpoint, read_result
from trainrun.sweep.table import shown_value

Command = Callable[[list[str], Path], list[str]]
STOPPING = b"\nstopping: the job that runs saves first; Ctrl-C again ends it without\n"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
KILL_AFTER = 3  # the first Ctrl-C lets a job save, the second ends it, the third kills it


class StopRelay:
    """Passes stop signals on to the job that is running: its own session keeps the terminal's from it."""

    __slots__ = ("count", "number", "process")

    def __init__(self) -> None:
        self.number = 0
        self.count = 0
        self.process: subprocess.Popen[bytes] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1
        if self.count == 1:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, STOPPING)  # say() is not safe in a handler
        self.pass_on(number)

    def pass_on(self, number: int) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        if self.count < KILL_AFTER:
            self.process.send_signal(number)
        else:
            os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        self.process = process
        if self.number:  # it came while the job was being started
            self.pass_on(self.number)
        return process.wait()


def end_with_sweep() -> None:
    """Run in a job before its program: on Linux it gets a SIGTERM when the sweep dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def job_command(words: list[str], folder: Path) -> list[str]:
    """A new run in the job's folder, or the old one from its newest checkpoint."""
    if has_checkpoint(folder):
        code = [word for word in words if word.startswith("--config-dir=")]
        return module_command("trainrun", "resume", str(folder), *code)
    return module_command("trainrun", *words, f"hydra.run.dir={folder}")


def sweep_command(prepared: CommandLine) -> int:
    """Run the sweep of a command line. Raise ConfigError for mistakes of any job, before the first one starts."""
    for note in prepared.notes:
        say(f"note: {note}", file=sys.stderr)
    words = [*[f"--config-dir={folder}" for folder in prepared.config_dirs], *prepared.overrides]
    named = [prepared.own[key] for key in OWN_KEYS if key in prepared.own]
    if len(named) > 1:
        raise ConfigError(
            f"output_dir={named[0]} and hydra.sweep.dir={named[1]}: two folders for one sweep; leave one out"
        )
    check_words([words])
    return run_sweep([words], Path(named[0]) if named else None)


def resume_sweep(folder: Path, trust: bool) -> int:
    """Run what is not done of a sweep, by the words with which it was begun. Raise ConfigError."""
    calls = calls_to_resume(folder, trust)
    check_words(calls)
    return run_sweep(calls, folder)


def check_words(calls: list[list[str]]) -> None:
    """Compose every value of every word once. Raise ConfigError for all mistakes."""
    seen: set[str] = set()
    faults: list[str] = []
    for job in itertools.chain.from_iterable(map(expand, calls)):
        if seen.issuperset(job):
            continue
        seen.update(job)
        try:
            compose_run(list(job))
        except ConfigError as error:
            faults += [fault for fault in error.faults if fault not in faults]
    if faults:
        raise ConfigError(*faults)


def run_sweep(calls: list[list[str]], folder: Path | None, command: Command = job_command) -> int:
    """Run every job that the command lines make, and return the exit code. Raise ConfigError before the first.

    folder: of the sweep; a new one under `sweeps/` where None. The tables and the picture come at the end, however it
    ends.
    """
    relay = StopRelay()
    with locked_sweep(calls, folder) as sweep, catch_stops(relay.handle):
        say(f"sweep: {counted(len(sweep.wanted), 'job')} in {sweep.folder}", flush=True)
        try:
            for position, num in enumerate(sweep.wanted, start=1):
                if relay.number:
                    break
                result = run_job(sweep, sweep.jobs[num], f"[{position}/{len(sweep.wanted)}]", relay, command)
                sweep.note(num, result)
        finally:
            conclude(sweep)
    if relay.number:
        return EXIT_INTERRUPTED if relay.number == signal.SIGINT else EXIT_AGAIN
    done = all(sweep.jobs[num].result.state == "done" for num in sweep.wanted)
    return EXIT_DONE if done else EXIT_FAILED


@contextlib.contextmanager
def locked_sweep(calls: list[list[str]], folder: Path | None) -> Iterator[Sweep]:
    """`open_sweep`; no other process runs jobs in its folder inside."""
    with contextlib.ExitStack() as closing:
        if folder is not None:
            folder = folder.expanduser().absolute()
            if is_there(RunDir(folder)):
                raise ConfigError(
                    f"output_dir={folder}: holds a run already; name another folder for the sweep"
                )
            with contextlib.suppress(OSError):  # `open_sweep` says it
                folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                closing.enter_context(only_writer(RunDir(folder)))
        sweep = open_sweep(calls, folder)
        if folder is None:
            closing.enter_context(only_writer(RunDir(sweep.folder)))
        yield sweep


def run_job(sweep: Sweep, job: Job, label: str, relay: StopRelay, command: Command) -> Result:
    """Run one job to its end, or keep the result of an earlier call."""
    folder = sweep.folder / job.folder
    if read_status(RunDir(folder)).get("state") == "done":
        result = read_result(folder)
        if job.result.seconds is not None:  # of all its tries, with start and end
            result = replace(result, seconds=job.result.seconds)
        say(f"{label} {job.folder}: kept, {shown_value(result)}", flush=True)
        return result
    folder.mkdir(exist_ok=True)
    with only_writer(RunDir(folder), patient=True):  # the job of a sweep that was killed saves and ends
        going_on = has_checkpoint(folder)
        if not going_on:
            shutil.rmtree(folder)  # an earlier try that saved nothing
            folder.mkdir()
    say(f"{label} {job.folder}: {'goes on' if going_on else 'starts'}", flush=True)
    earlier, began = read_status(RunDir(folder)), time.monotonic()
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            command(list(job.words), folder),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_sweep,  # a sweep that is killed leaves no job behind
        )  # fmt: skip
        result = read_result(folder, relay.wait(process), earlier)
    before = (job.result.seconds or 0.0) if going_on else 0.0
    result = replace(result, seconds=before + time.monotonic() - began)
    say(f"{label} {job.folder}: {result.state}, {result.error or shown_value(result)}", flush=True)
    return result
