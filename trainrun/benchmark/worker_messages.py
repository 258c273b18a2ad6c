"""What a command and its worker processes send each other: plain values that go through a socket and to all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from trainrun.timing.phases import ACCOUNTS, COMPILE

# Variants of a turn; several are joined by `+`.
VALIDATING: Final = "validating"  # validations come as in the run
SAVING: Final = "saving"  # checkpoints come as in the run
WHOLE: Final = f"{VALIDATING}+{SAVING}"
KEEPING: Final = "keeping"  # its last batches are kept, to be trained on again without reading


@dataclass(frozen=True)
class Train:
    """Ask for some steps of the run, after `warm` steps that are not timed.

    variant: an ablation (see `diagnose.ablations`), VALIDATING, SAVING, KEEPING, or several. restart: begin with the
    weights and averages of the first such message, of which a copy is kept. most_seconds: the steps end after it, at
    least one is done; for a single rank only.
    """

    steps: int
    warm: int = 2
    variant: str = ""
    restart: bool = True
    most_seconds: float = math.inf


@dataclass(frozen=True)
class Load:
    """Ask for batches of the training stream that nobody trains on."""

    batches: int
    warm: int = 2


@dataclass(frozen=True)
class Validate:
    """Ask for one validation; of a long one the first batches run, and the rest is extrapolated."""


@dataclass(frozen=True)
class Save:
    """Ask for one step and its checkpoint: how long the training waits for it."""


@dataclass(frozen=True)
class Profile:
    """Ask for a few steps under torch's profiler."""


@dataclass(frozen=True)
class RateRange:
    """Ask for steps whose learning rate grows from `low` to `high`; the run is of no other use behind them."""

    low: float
    high: float
    steps: int


Message = Train | Load | Validate | Save | Profile | RateRange


@dataclass(frozen=True)
class RunInfo:
    """What a run says of itself before its first step.

    unit: of an item (`samples`, `tokens`). engine, number: what reads, with how many readers; "" for a stream
    of the user's own.
    total_steps, val_every: None without an end or without validations. layers: class names of all modules.
    thread_safe: threads may read the data. reads_ahead: batches are read during the training. padded: times the
    positions that batches of like length would have; sample_positions: of one sample, padding included; both 0 where no
    lengths are known. one_graph: a step of its task can be
    one graph.
    """

    unit: str
    engine: str
    number: int
    num_threads: int
    device: str
    world_size: int
    total_steps: int | None
    val_every: float | None
    layers: tuple[str, ...] = ()
    memory_bytes: int = 0
    precision: str = ""
    thread_safe: bool = False
    reads_ahead: bool = False
    padded: float = 0.0
    sample_positions: float = 0.0
    one_graph: bool = False


@dataclass(frozen=True)
class Turn:
    """What one message took. seconds: wall clock, the device's work included. items: of all ranks. positions: of the
    batches that rank 0 read, padding included; 0 where no batch says it.

    phases: seconds by name, of rank 0. busy_seconds: of loading, rank 0 and its workers, waits for a core included.
    peak_bytes: of the device, or of the process on a CPU. compile_seconds: since the run began.
    """

    seconds: float
    steps: int
    items: float
    busy_seconds: float = 0.0
    peak_bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    positions: int = 0

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds

    @property
    def running_seconds(self) -> float:
        """Return the seconds without compilation, which the first turn with a new shape includes."""
        return self.seconds - self.phase(COMPILE)

    def phase(self, phase: int) -> float:
        """Return the seconds of one phase of `timing.phases`."""
        return self.phases.get(ACCOUNTS[phase], 0.0)


@dataclass(frozen=True)
class Profiled:
    """What the profiler found on rank 0. table: the operations that take most, by their own time. trace: a gzipped file
    for a trace viewer."""

    table: str
    trace: bytes


@dataclass
class RateLosses:
    """Learning rates of the first group, and the loss of each step. peaks: the run's own rate of each group."""

    rates: list[float]
    losses: list[float]
    peaks: list[float]
    diverged: bool


Reply = Turn | Profiled | RateLosses | None
