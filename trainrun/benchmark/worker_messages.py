"""What a command and its worker processes send each other: plain values that go through a socket and to all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from trainrun.timing.phases import ACCOUNTS, COMPILE

WHOLE: Final = "whole"  # a variant: validations and checkpoints come as in the run
SAVING: Final = "saving"  # a variant: only checkpoints do
KEEPING: Final = "keeping"  # a variant: its last batches are kept, to be trained on again without reading


@dataclass(frozen=True)
class Train:
    """Ask for some steps of the run, after `warm` steps that are not timed.

    variant: an ablation (see `diagnose.ablations`), WHOLE, SAVING or KEEPING. restart: begin with the weights and
    averages of the first such message, of which a copy is kept. most_seconds: the steps end after it, at least one is
    done; for a single rank only.
    """

    steps: int
    warm: int = 2
    variant: str = ""
    restart: bool = True
    most_seconds: float = math.inf


@dataclass(frozen=True)
class TraceSteps:
    """Ask for the first steps of the run, whose losses and update are written down; the first message, once."""

    steps: int


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


Message = Train | TraceSteps | Load | Validate | Save | Profile | RateRange


@dataclass(frozen=True)
class RunInfo:
    """What a run says of itself before its first step.

    unit: of an item (`samples`, `tokens`). engine, number: how `data.engine=auto` reads, with how many readers.
    total_steps, val_every: None without an end or without validations. layers: class names of all modules.
    thread_safe: threads may read the data. reads_ahead: batches are read during the training. padded: times the
    positions that batches of like length would have; 0 where no lengths are known. one_graph: a step of its task can be
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
    one_graph: bool = False


@dataclass(frozen=True)
class Turn:
    """What one message took. seconds: wall clock, the device's work included. items: of all ranks. positions: of the
    batches that rank 0 read, padding included; 0 where no batch says it.

    phases: seconds by name, of rank 0. cpu_seconds: of loading, rank 0 and its workers. peak_bytes: of the device, or
    of the process on a CPU. compile_seconds: since the run began.
    """

    seconds: float
    steps: int
    items: float
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    positions: int = 0

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds

    @property
    def running_seconds(self) -> float:
        """Seconds without compilation, which the first turn with a new shape pays for."""
        return self.seconds - self.phase(COMPILE)

    def phase(self, phase: int) -> float:
        """Seconds of one phase of `timing.phases`."""
        return self.phases.get(ACCOUNTS[phase], 0.0)


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of a run: mean losses, items over all ranks, and a safetensors file with the change of every
    parameter."""

    losses: tuple[float, ...]
    items: tuple[float, ...]
    update: str


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


Reply = Turn | FirstSteps | Profiled | RateLosses | None
