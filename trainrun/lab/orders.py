"""What the lab and a run under test say to each other. Plain values: they go through a socket, and to all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from trainrun.data.stages import Stages
from trainrun.ledger import ACCOUNTS, COMPILE

WHOLE: Final = "whole"  # in place of a removal: validations and checkpoints come as in the run
SAVING: Final = "saving"  # checkpoints alone do


@dataclass(frozen=True)
class Train:
    """Some steps of the run, after `warm` steps that are not timed. variant: with something taken away, see
    `trainrun.lab.removals`; or WHOLE or SAVING. again: from the weights and averages of the first such order, see
    `trainrun.lab.kept_state`. most_seconds: after which the steps end, with one at least; only where one rank trains,
    since several had to agree on it."""

    steps: int
    warm: int = 2
    variant: str = ""
    again: bool = False
    most_seconds: float = math.inf


@dataclass(frozen=True)
class Trace:
    """Steps from the very beginning, whose losses and update are written down. To be asked first, and once."""

    steps: int


@dataclass(frozen=True)
class Load:
    """Batches of the training stream, with nobody to train on them."""

    batches: int
    warm: int = 2


@dataclass(frozen=True)
class Validate:
    """One validation, as the run does it; of a long one its first batches, and the rest is computed."""


@dataclass(frozen=True)
class Save:
    """One step, and its checkpoint: how long the training waits for it. Nothing where none are saved."""


@dataclass(frozen=True)
class Measure:
    """What the machine could do with this work; see `trainrun.lab.limits`."""


@dataclass(frozen=True)
class Divide:
    """Where the time of loading goes, stage by stage, in about so many seconds. To be asked last: the stream is
    closed."""

    seconds: float


@dataclass(frozen=True)
class Profile:
    """A few steps under torch's profiler."""


Order = Train | Trace | Load | Validate | Save | Measure | Divide | Profile


@dataclass(frozen=True)
class Ready:
    """What a run says of itself before its first step.

    unit: what items are (`samples`, `tokens`). engine, number: how the data is read, and by how many threads
    or workers. total_steps: None without an end. val_every: steps between validations; None without any. layers:
    the names of the model's classes of modules. memory_bytes: all that the device has. precision, attention: what
    was decided for them; no attention where the model has none of ours. thread_safe: several threads may read the
    data, by its own word or by that of the run. reads_ahead: batches are read during the training. positions:
    of an average step of a whole epoch, padding included, by `data.padding`; empty if that is not known.
    """

    unit: str
    engine: str
    number: int
    num_threads: int
    num_parameters: int
    device: str
    world_size: int
    steps_per_epoch: int | None
    total_steps: int | None
    val_every: float | None
    layers: tuple[str, ...] = ()
    memory_bytes: int = 0
    precision: str = ""
    attention: str = ""
    thread_safe: bool = False
    reads_ahead: bool = False
    positions: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What one order took. seconds: of the clock, the device's work included. items: of all ranks.

    accounts: seconds by name, of rank 0 (see `trainrun.ledger`). cpu_seconds: of loading, by all threads of rank
    0's process and its workers. peak_bytes: the most memory so far, of the device, or of the process on a CPU.
    compile_seconds: since the run began. ahead_data_seconds, ahead_items: of the steps ahead of it, of loading.
    positions: of its batches, padding included, of rank 0 times the ranks; 0 if not all of them say how many.
    """

    seconds: float
    steps: int
    items: float
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    accounts: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    ahead_data_seconds: float = 0.0
    ahead_items: float = 0.0
    positions: float = 0.0

    @property
    def speed(self) -> float:
        """Items a second."""
        return self.items / self.seconds

    @property
    def running_seconds(self) -> float:
        """Without those of compilation, which the first turn with a new shape pays for."""
        return self.seconds - self.booked(COMPILE)

    def booked(self, account: int) -> float:
        """Seconds."""
        return self.accounts.get(ACCOUNTS[account], 0.0)


@dataclass(frozen=True)
class Path:
    """The first steps of a run. losses: means, one a step. items: of each step, over all ranks. update: the name
    of a file with the change of every parameter since the beginning, as safetensors."""

    losses: tuple[float, ...]
    items: tuple[float, ...]
    update: str


@dataclass(frozen=True)
class Limits:
    """The most items a second of all ranks that each part of the machine allows, by its name, and how that is known.

    padding: the share of positions that are padding, in batches of sequences; 0 in others.
    """

    items_per_second: dict[str, float]
    reasons: dict[str, str]
    padding: float = 0.0


class Operation(NamedTuple):
    """dtype: of its first tensor. calls, seconds: in a step; of its own, without what it calls."""

    name: str
    dtype: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class Profiled:
    """What the profiler found on rank 0.

    step_seconds: with the profiler's own work. idle: share of the time in which a GPU ran nothing; None on a CPU.
    trace: a gzipped file for a trace viewer.
    """

    step_seconds: float
    operations: tuple[Operation, ...]
    idle: float | None
    trace: bytes


Answer = Turn | Path | Limits | Stages | Profiled | None
