"""Run the jobs of a sweep as processes, one on each place, until all are done or the sweep is stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from trainrun.errors import EXIT_USAGE
from trainrun.folder.lock import lock_run_folder
from trainrun.folder.run_folder import RunDir
from trainrun.folder.status import read_status
from trainrun.runtime.python_module import module_command
from trainrun.sweep.forked_job import ForkedJob, exit_with_sweep
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.places.leases import Lease, Leases
from trainrun.sweep.progress import SweepProgress
from trainrun.sweep.results import (
    OUTPUT,
    Job,
    apply_objective,
    has_checkpoint,
    mark_pruned_job,
    read_result,
    replace_nonfinite,
)
from trainrun.sweep.search.study import SweepStudy

Process = subprocess.Popen[bytes] | ForkedJob
Command = Callable[[list[str], Path], list[str]]
STOPPING = "stopping: the jobs that run save first; Ctrl-C again ends them without"
KILL_AFTER = 3  # the first Ctrl-C lets jobs save, the second ends them, the third kills them
POLL_SECONDS = 0.02
JUDGE_SECONDS = 0.2  # between two looks at the validations of the jobs
LOOK_ROUNDS = 25  # of the loop between two looks at what other workers did


class StopRelay:
    """Sends stop signals to the running jobs. These are in their own sessions and get no signals from the terminal.

    writes: whether the handler itself writes a line about the first signal.
    """

    __slots__ = ("count", "number", "processes", "writes")

    def __init__(self, writes: bool = True) -> None:
        self.number = 0
        self.count = 0
        self.processes: list[Process] = []
        self.writes = writes

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1
        if self.count == 1 and self.writes:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"\n{STOPPING}\n".encode())  # say() is not safe in a handler
        for process in list(self.processes):
            self.relay_signal(process, number)

    def add(self, process: Process) -> None:
        self.processes.append(process)
        if self.number:  # it came while the job was being started
            self.relay_signal(process, self.number)

    def relay_signal(self, process: Process, number: int) -> None:
        if process.poll() is not None:
            return
        if self.count < KILL_AFTER:
            process.send_signal(number)
        else:
            os.killpg(process.pid, signal.SIGKILL)


def job_command(words: list[str], folder: Path) -> list[str]:
    """Return the command that starts a job, or continues it from its newest checkpoint."""
    return module_command("trainrun", *job_overrides(words, folder))


def job_overrides(words: list[str], folder: Path) -> list[str]:
    """Return the words of a job's command line. Plots are off unless a word sets `monitor.plots`."""
    if has_checkpoint(folder):
        code = [word for word in words if word.startswith("--config-dir=")]
        return ["resume", str(folder), *code]
    plots = [] if any("monitor.plots=" in word for word in words) else ["monitor.plots=false"]
    return [*words, *plots, f"hydra.run.dir={folder}"]


def earlier_seconds(noted: float | None, said: object) -> float:
    """Return the seconds of a job's earlier attempts, the larger of two measurements.

    noted: measured by the sweep, with start-up and end, without attempts during which the sweep was killed. said:
        the value in the job's own status, of all attempts.
    """
    return max(noted or 0.0, replace_nonfinite(said) or 0.0)


@dataclass
class RunningJob:
    """A job with its process. earlier: its status before this attempt. began: the start, by `time.monotonic()`."""

    job: Job
    process: Process
    lease: Lease
    output: BinaryIO
    earlier: dict[str, Any]
    goes_on: bool
    began: float
    is_stopping: bool = False


class JobQueue:
    """Runs the wanted jobs of a sweep, and the points that a search asks for.

    command: returns the command of a job's process; None to fork this process, which has imported torch already.
    objective: the metrics that rank the jobs; empty for the metric that each job monitors. study: the Optuna study of a
    search or a pruner. leases: the devices; None to run one job at a time on the whole machine. devices_of: returns how
    many devices a job needs. until: when the jobs have to save and the sweep ends, by `time.monotonic()`.
    """

    def __init__(
        self, sweep: Sweep, command: Command | None, relay: StopRelay, progress: SweepProgress,
        leases: Leases | None = None, devices_of: Callable[[Job], int] = lambda job: 1, until: float | None = None,
        objective: Sequence[str] = (), study: SweepStudy | None = None,
    ) -> None:  # fmt: skip
        self._sweep, self._command, self._relay, self._progress = sweep, command, relay, progress
        self._leases, self._devices_of, self._until = leases, devices_of, until
        self._objective, self._study = objective, study
        self._running: list[RunningJob] = []
        self._waiting: list[int] = []
        self._num_taken = 0  # of the jobs that the sweep wants
        self._elsewhere: set[int] = set()  # those of them that other workers run
        self._judged = 0.0  # when the jobs were last compared
        self._rounds = 0  # of the loop
        self.refused: set[int] = set()  # jobs that ended by a mistake, before their first step
        self.out_of_time = False
        self.fault = ""  # for which the sweep ends

    def run(self) -> None:
        """Run jobs until no job is left to start or to wait for, here and in other workers."""
        self._take_new_jobs()
        if self._study is not None:
            self._study.open()
        is_announced = False
        while self._fill_places() or self._running:
            if self._relay.number and not is_announced:
                self._progress.print_message(STOPPING)
                is_announced = True
            for running in [one for one in self._running if one.process.poll() is not None]:
                self._end(running)
            self._check_time()
            self._prune_jobs()
            self._read_other_workers()
            self._progress.draw()
            time.sleep(POLL_SECONDS)

    def _fill_places(self) -> bool:
        """Start waiting jobs while there are free places, then the jobs of the next points of a search.

        Return whether more jobs are to be started later.
        """
        while not self._is_stopping():
            self._take_new_jobs()
            for num in [num for num in self._waiting if num not in self._elsewhere]:
                self._start(num)
            study = self._study
            if self._elsewhere != set(self._waiting) or study is None or study.has_all_points:
                return bool(self._waiting)
            if not self._has_place():
                return True
            for num in study.ask():  # a point that was made before has its jobs already
                study.tell(num)
            self._check_time()
        return False

    def _take_new_jobs(self) -> None:
        """Add the jobs that this worker or another one has created since the last call to the waiting jobs."""
        jobs = self._sweep.wanted[self._num_taken :]
        self._num_taken += len(jobs)
        if self._study is not None and not self._sweep.search:
            jobs = self._sweep.shuffle_job_numbers(
                jobs
            )  # a pruner lets each job go on that is better than all before it
        self._waiting += [num for num in jobs if not self._keep(num, "before")]

    def _read_other_workers(self) -> None:
        """Read what other workers did: drop jobs that they finished, stop jobs that they pruned, retry the others."""
        self._rounds += 1
        if self._rounds % LOOK_ROUNDS:
            return
        self._sweep.refresh()
        self._elsewhere = set()
        for num in list(self._waiting):
            if self._sweep.has_ended(self._sweep.jobs[num]):
                self._waiting.remove(num)
                self._progress.keep(self._sweep.jobs[num], "by another worker")
        self._stop_pruned_jobs()

    def _has_place(self) -> bool:
        """Return whether the next job of a search could start now."""
        if self._leases is None:
            return not self._running
        lease = self._leases.take(self._devices_of(Job(0, self._sweep.first_overrides(), "")))
        if lease is not None:
            lease.release()
        return lease is not None

    def _is_stopping(self) -> bool:
        """Return whether no more jobs are started: after a signal, at the end of the time, or because of a mistake."""
        return bool(self._relay.number) or self.out_of_time or bool(self.fault)

    def _check_time(self) -> None:
        if self._until is not None and not self.out_of_time and time.monotonic() >= self._until:
            self.out_of_time = True
            self._stop_jobs()

    def _stop_jobs(self) -> None:
        for running in self._running:
            self._relay.relay_signal(running.process, signal.SIGTERM)

    def _keep(self, num: int, by_whom: str) -> bool:
        """Report a job that an earlier call or another worker has finished. Return whether no job is left to run."""
        job = self._sweep.jobs[num]
        folder = self._sweep.folder / job.folder
        if job.result.state == "pruned":
            mark_pruned_job(folder)
        elif read_status(RunDir(folder)).get("state") == "done":
            result = read_result(folder)
            if job.result.seconds is not None:
                result = replace(result, seconds=earlier_seconds(job.result.seconds, result.seconds))
            result = apply_objective(result, folder, self._objective)
            if result != job.result:
                self._sweep.note(num, result)
        elif not self._sweep.has_ended(job):
            return False
        self._progress.keep(self._sweep.jobs[num], by_whom)
        return True

    def _start(self, num: int) -> None:
        """Start a waiting job if a place is free and no other worker runs it."""
        lease = self._take_place(self._sweep.jobs[num])
        if lease is None:
            return
        claim = self._sweep.locks.lock_job(num)
        if claim is None:
            self._elsewhere.add(num)
            lease.release()
            return
        lease.files.append(claim)
        self._sweep.refresh()
        self._waiting.remove(num)
        if self._keep(num, "by another worker"):
            lease.release()
            return
        self._start_process(self._sweep.jobs[num], lease)

    def _take_place(self, job: Job) -> Lease | None:
        if self._leases is not None:
            return self._leases.take(self._devices_of(job))
        return None if self._running else Lease([], [])

    def _start_process(self, job: Job, lease: Lease) -> None:
        folder = self._sweep.folder / job.folder
        folder.mkdir(exist_ok=True)
        with lock_run_folder(
            RunDir(folder), patient=True
        ):  # the job of a sweep that was killed saves and ends
            goes_on = has_checkpoint(folder)
            if not goes_on:
                shutil.rmtree(folder)  # an earlier try that saved nothing
                folder.mkdir()
        self._progress.start(job, goes_on)
        words = list(job.words)
        if not goes_on:  # else its config has the number of threads
            words += lease.settings(words)
        earlier, began = read_status(RunDir(folder)), time.monotonic()
        output = (folder / OUTPUT).open("wb")
        environment = lease.environment()
        process: Process
        if self._command is None:
            process = ForkedJob(
                job_overrides(words, folder), output, lease.cores, environment, self._open_files()
            )
        else:
            process = subprocess.Popen(
                self._command(words, folder),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=lease.files, env={**os.environ, **environment},
                preexec_fn=lambda: exit_with_sweep(lease.cores),  # a sweep that is killed leaves no job behind
            )  # fmt: skip
        self._relay.add(process)
        self._running.append(RunningJob(job, process, lease, output, earlier, goes_on, began))

    def _open_files(self) -> list[int]:
        """Return the open files of the running jobs, which the next job must close."""
        leases = [descriptor for one in self._running for descriptor in one.lease.files]
        return [*leases, *(one.output.fileno() for one in self._running)]

    def _end(self, running: RunningJob) -> None:
        """Save the result of a job whose process has ended, and free its place."""
        self._running.remove(running)
        self._relay.processes.remove(running.process)
        running.output.close()
        code, job = int(running.process.returncode or 0), self._sweep.jobs[running.job.num]
        result = read_result(self._sweep.folder / job.folder, code, running.earlier)
        if code == EXIT_USAGE and not running.goes_on:
            self.refused.add(job.num)
        before = (
            earlier_seconds(job.result.seconds, running.earlier.get("seconds")) if running.goes_on else 0.0
        )
        result = replace(result, seconds=before + time.monotonic() - running.began)
        is_done = result.state == "done"
        result = apply_objective(result, self._sweep.folder / job.folder, self._objective)
        if job.result.state == "pruned" and not is_done:
            result = replace(result, state="pruned", error="")
            mark_pruned_job(self._sweep.folder / job.folder)
        self._sweep.note(job.num, result)
        running.lease.release()  # now: another worker sees the result
        self._progress.end(job, result)
        if self._study is not None:
            self._prune_points(job.num)
            self._study.tell(job.num)
        if is_done and result.state != "done" and not self._is_stopping():
            self._refuse_objective(result.error)

    def _prune_jobs(self) -> None:
        """Stop the jobs of points that are worse than others at the same resource."""
        if self._study is None or self._is_stopping():
            return
        now = time.monotonic()
        if now - self._judged < JUDGE_SECONDS:
            return
        self._judged = now
        for running in self._running:
            self._prune_points(running.job.num)
        self._stop_pruned_jobs()

    def _prune_points(self, num: int) -> None:
        """Report new validations of the points of a job, and mark the jobs of points that are worse than others."""
        assert self._study is not None
        running = [one.job.num for one in self._running]
        for other in self._study.choose_jobs_to_prune(num):
            job = self._sweep.jobs[other]
            if job.result.state not in ("done", "failed"):
                self._sweep.note(other, replace(job.result, state="pruned"))
                if other not in running:
                    mark_pruned_job(self._sweep.folder / job.folder)
            if other in self._waiting:
                self._waiting.remove(other)
                self._study.tell(other)

    def _stop_pruned_jobs(self) -> None:
        """Send SIGTERM to running jobs that this worker or another one has pruned. They save first."""
        for running in self._running:
            if self._sweep.jobs[running.job.num].result.state == "pruned" and not running.is_stopping:
                running.is_stopping = True
                self._relay.relay_signal(running.process, signal.SIGTERM)

    def _refuse_objective(self, error: str) -> None:
        """End the sweep if no job reports the objective."""
        if not any(job.result.values for job in self._sweep.jobs.values()):
            self.fault = error
            self._stop_jobs()
