"""In the process that trains: the hooks that leave a history, and the fault of this life, armed."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

from faults import own
from faults.history import write_line
from faults.plan import CODE, DISK, SIGNALS, Fault
from faults.taps import Hook, Operation, Tap
from trainrun.checkpoint.manager import CheckpointManager
from trainrun.data.engines import workers
from trainrun.parallel import worker
from trainrun.parallel.group import init_group
from trainrun.timing.phases import PhaseTimer
from trainrun.training.triggers import Triggers

NUMBERS = {"kill": 9, "segv": 11, "term": 15, "int": 2, "usr1": 10, "usr2": 12, "stop": 19}
ERRORS = {name: getattr(errno, name.upper()) for name in DISK}
WORKER_SECONDS = 40.0  # for loader workers of which none stands still
RANK_SECONDS = 20.0  # the same for ranks
COUNTS = "FAULTS_COUNTS"  # a file that is told how many marks, batches and file operations there were


def keep_history() -> None:
    """Lines of a life's start and of every commit that the runner was told of."""
    start, finish_save = Triggers.start, CheckpointManager.finish_save

    def started(self: Triggers, state: Any, best: Any = None) -> None:
        write_line(f"start {state.step}")
        start(self, state, best)

    def finished(self: CheckpointManager, state: Any) -> Any:
        step = finish_save(self, state)
        if step is not None and self._parallel.rank == 0:
            write_line(f"commit {step}")
        return step

    Triggers.start = started  # type: ignore[method-assign]
    CheckpointManager.finish_save = finished  # type: ignore[method-assign]


def be_patient(fault: Fault | None) -> None:
    """A busy machine is no fault: short timeouts of a subject hold where something stands still. The config keeps
    them, for the run goes on with it."""
    if fault is None or fault.action != "worker-stop":
        limit = workers.TimeLimit
        workers.TimeLimit = lambda seconds, processes: limit(max(seconds, WORKER_SECONDS), processes)  # type: ignore
    if fault is None or fault.kind != "stop":
        worker.init_group = lambda device, seconds, *others: init_group(  # type: ignore
            device, max(seconds, RANK_SECONDS), *others
        )


class Counter:
    """Counts the places of one kind, and strikes at one of them."""

    def __init__(self, fault: Fault | None, driver: int) -> None:
        self.fault, self.driver, self.count = fault, driver, 0
        self.lock = threading.Lock()

    def pass_by(self) -> bool:
        """Whether it is here that it happens."""
        with self.lock:
            self.count += 1
            here = self.fault is not None and self.count == self.fault.value
        if here:
            write_line(f"struck {self.fault}")
        return here

    def signal(self) -> None:
        """A kill and a standstill hit this very process; a wish to stop is sent to the one that the user started."""
        assert self.fault is not None
        own = self.fault.kind in ("kill", "stop")
        os.kill(os.getpid() if own else self.driver, NUMBERS[self.fault.kind])


def arm(fault: Fault | None, run: Path, driver: int) -> None:
    """The fault of this life in this process; with none, places are counted for the reference."""
    if fault is not None and fault.place in ("time", "driver", "sample", "disk"):
        return  # of the parent, of a worker, and of the file system
    counts = os.environ.get(COUNTS)
    if fault is None and counts is None:
        return
    counters = {place: Counter(fault if fault and fault.place == place else None, driver) for place in
                ("mark", "batch", "file", "half", "after")}  # fmt: skip
    place = fault.place if fault else None
    if place in (None, "mark"):
        _mark(counters["mark"])
    if place in (None, "batch"):
        own.on_batch.append(_batch(counters["batch"]))
    if place in (None, "file", "half", "after"):
        file = counters[place or "file"]
        Tap(run, _disk(file, {"file": "before"}.get(place or "file", place or ""))).install()
    if counts is not None:
        _tell_counts(Path(counts), counters)


def _tell_counts(path: Path, counters: dict[str, Counter]) -> None:
    """Write the counts when this process exits; its loader workers, which inherit the function, write nothing."""
    rank, owner = os.environ.get("RANK", "0"), os.getpid()
    ending = os._exit

    def told(code: int) -> None:
        if os.getpid() == owner:
            with open(f"{path}.{rank}", "w") as file:
                file.write(" ".join(str(counters[name].count) for name in ("mark", "batch", "file")))
        ending(code)

    os._exit = told  # type: ignore[assignment]


def _mark(counter: Counter) -> None:
    opened = PhaseTimer.open

    def open_(self: PhaseTimer, account: int) -> int:
        if counter.pass_by():
            counter.signal()
        return opened(self, account)

    PhaseTimer.open = open_  # type: ignore[method-assign]


def _batch(counter: Counter) -> Any:
    def strike(number: int) -> float:
        if not counter.pass_by():
            return 1.0
        assert counter.fault is not None
        action = counter.fault.kind
        if action in (*SIGNALS, "stop"):
            counter.signal()
        elif action == "error":
            raise ValueError("a fault of the model")
        elif action == "oom":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return float("nan") if action == "nan" else 1.0

    return strike


def _disk(counter: Counter, when: str) -> Hook:
    def hook(now: str, operation: Operation) -> None:
        if now != when:
            return
        fault = counter.fault
        here = counter.pass_by()
        forever = fault is not None and fault.action.endswith("+") and counter.count > fault.value
        if not here and not forever:
            return
        assert fault is not None
        if fault.action in SIGNALS:
            counter.signal()
            return
        if operation.name in ("unlink", "rmdir") and fault.kind in ("enospc", "edquot"):
            return  # a full disk still deletes
        number = ERRORS[fault.kind]
        raise OSError(number, os.strerror(number), operation.path)

    return hook


assert set(CODE) == {"nan", "error", "oom"}
