"""The messages between a command and its worker processes: plain values that can be sent to all ranks."""

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
    """A request for some steps of the run, after `warm` steps that are not timed.

    variant: an ablation (see `diagnose.ablations`), VALIDATING, SAVING, KEEPING, or several. restart: start with the
        weights and averages of the first such message, which are saved. most_seconds: the time limit; at least one
        step is done. It works for a single rank only.
    """

    steps: int
    warm: int = 2
    variant: str = ""
    restart: bool = True
    most_seconds: float = math.inf


@dataclass(frozen=True)
class Load:
    """A request to read the batches of some steps without training on them. The items of the reply are not counted."""

    steps: int
    warm: int = 2


@dataclass(frozen=True)
class Validate:
    """A request for one validation. If it is long, only its first batches run, and the rest is extrapolated."""


@dataclass(frozen=True)
class Save:
    """A request for one step and a checkpoint, to measure how long the training waits for it."""


@dataclass(frozen=True)
class Profile:
    """A request for a few steps under torch's profiler."""


@dataclass(frozen=True)
class RateRange:
    """A request for steps whose learning rate grows from `low` to `high`. Afterwards the run cannot be used any
    more.
    """

    low: float
    high: float
    steps: int


Message = Train | Load | Validate | Save | Profile | RateRange


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run before its first step.

    unit: of an item (`samples`, `tokens`). engine, number: the data engine and its number of readers; "" for a
        custom stream.
    total_steps, val_every: in steps; None without an end or without validations. layers: class names of all
        modules.
    thread_safe: whether threads may read the data. reads_ahead: whether batches are read during the training.
    one_graph: whether a step of the task can be one graph. most_readers: of an iterable source on each rank; None if
        any number can read.
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
    one_graph: bool = False
    most_readers: int | None = None


@dataclass(frozen=True)
class Turn:
    """The result of one message.

    seconds: wall clock, including the work of the device. items: of all ranks. positions: of the batches that rank 0
        read, including padding; 0 if batches have no mask. real_positions: those that are not padding.
    phases: seconds by name, of rank 0. busy_seconds: of loading, on rank 0 and its workers, including waits for a
        free core.
    peak_bytes: of the device, or of the process on a CPU. compile_seconds: since the run began. step_deviation: the
        standard deviation of the seconds of a step, relative to their mean.
    """

    seconds: float
    steps: int
    items: float
    busy_seconds: float = 0.0
    peak_bytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    positions: int = 0
    real_positions: int = 0
    step_deviation: float = 0.0

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
class ProfileResult:
    """The result of torch's profiler on rank 0. table: the operations with the most own time. trace: a gzipped trace
    file.
    """

    table: str
    trace: bytes


@dataclass
class RateLosses:
    """Learning rates of the first group, and the loss of each step. peaks: the configured rate of each group."""

    rates: list[float]
    losses: list[float]
    peaks: list[float]
    diverged: bool


Reply = Turn | ProfileResult | RateLosses | None
