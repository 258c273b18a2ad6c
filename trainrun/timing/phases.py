"""The time of a run by phase: exactly one phase is open at every instant, so the seconds add up to the total."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

START_UP: Final = 0
DATA: Final = 1
COPY: Final = 2
FORWARD: Final = 3
BACKWARD: Final = 4
CHECK: Final = 5
CLIP: Final = 6
OPTIMIZER: Final = 7
DEVICE: Final = 8
RANKS: Final = 9
VALIDATION: Final = 10
CHECKPOINT: Final = 11
LOGGING: Final = 12
PLOTS: Final = 13
COMPILE: Final = 14
MEASURING: Final = 15
RUNNER: Final = 16
OTHER: Final = 17
HOOKS: Final = 18

# data: the training waits for its next batch. copy: the host hands it to a GPU. check: whether gradients are
# finite. device: the host waits at a log point until a GPU has done what it was given. ranks: waiting for other
# ranks. measuring: FLOPs and throughput limits, after the training. runner: the loop's own work. other: what nothing
# here says, and all of a `loop` of the user's own that books nothing. hooks: all calls of `hook.NAME`.
ACCOUNTS: Final = (
    "start-up", "data", "copy", "forward", "backward", "check", "clip", "optimizer", "device", "ranks",
    "validation", "checkpoint", "logging", "plots", "compile", "measuring", "runner", "other", "hooks",
)  # fmt: skip
# Of the loop between validations and checkpoints: what a step takes.
LOOP: Final = (
    "data", "copy", "forward", "backward", "check", "clip", "optimizer", "device", "ranks", "logging", "runner",
)  # fmt: skip

UPDATE: Final = ("check", "clip", "optimizer", "runner")


class PhaseTimer:
    """A timer of the phases of the training thread. Each change of phase takes about 0.15 us.

    began: `time.perf_counter()` when the run began. The time from then until now counts as start-up. On a GPU the
        times are those of the host, including its waits for the GPU.
    """

    __slots__ = ("_clock", "_open", "_seconds", "_since", "began")

    def __init__(self, began: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = self.began = clock() if began is None else began
        self._open = START_UP
        self._seconds = [0.0] * len(ACCOUNTS)

    def open(self, account: int) -> int:
        """Close the open phase and open another. Return the one that was open."""
        now = self._clock()
        was = self._open
        self._seconds[was] += now - self._since
        self._since = now
        self._open = account
        return was

    @property
    def account(self) -> int:
        """Return the open phase."""
        return self._open

    def read_seconds(self, account: int) -> float:
        """Return the seconds of a phase so far. In another thread, the seconds since the latest change of phase may
        be missing.
        """
        return self._seconds[account] + (self._clock() - self._since if self._open == account else 0.0)

    def read_from_any_thread(self) -> dict[str, float]:
        """Return the seconds of every phase, from any thread, without a change of phase."""
        return {name: self.read_seconds(account) for account, name in enumerate(ACCOUNTS)}

    @contextmanager
    def measure(self, account: int) -> Iterator[None]:
        """Count the time of the block as a phase. Afterwards the earlier phase continues."""
        was = self.open(account)
        try:
            yield
        finally:
            self.open(was)

    def move_seconds(self, source: int, target: int, seconds: float) -> None:
        """Move seconds from one phase to another, for example compilation that was measured as part of a forward
        pass.
        """
        moved = min(seconds, self._seconds[source])
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def read(self) -> dict[str, float]:
        """Return the seconds of every phase so far, without phases of 0 seconds."""
        self.open(self._open)
        return {name: seconds for name, seconds in zip(ACCOUNTS, self._seconds, strict=True) if seconds > 0}


# When this module was imported, first of all by the command, less what the process had computed until then.
_ENTERED: Final = time.perf_counter() - time.process_time()


def measure_process_start() -> float:
    """Return when this process began on the clock `time.perf_counter()`, to about 10 ms."""
    import psutil

    return time.perf_counter() - (time.time() - psutil.Process().create_time())


def measure_command_start() -> float:
    """Return when the command started, on the same clock as `measure_process_start`.

    If a shell script started the command by `exec`, the process has the start time of the script. So the CPU time of
    Python before trainrun was entered is subtracted from now. Waits for the disk are missing (at most 10 ms).
    """
    return max(measure_process_start(), _ENTERED)


class Session(NamedTuple):
    """The steps and items of this rank since its start, and the seconds of each phase at the end of the training."""

    steps: int
    items: float
    seconds: Mapping[str, float]

    @property
    def update_seconds(self) -> float:
        """Return the seconds of the optimizer updates of all steps."""
        return sum(self.seconds.get(name, 0.0) for name in UPDATE)

    @property
    def loop_seconds(self) -> float:
        return sum(self.seconds.get(name, 0.0) for name in LOOP)
