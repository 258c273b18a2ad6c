"""The options of one stream: its settings of `data`, its plan, and the functions that receive its reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainrun.data.batch import Preparation
from trainrun.data.engines.stream import StreamEngine
from trainrun.data.order.sampler import Plan, StreamPlan, build_batch_size_error
from trainrun.data.tensor_dataset import Columns
from trainrun.errors import DataError
from trainrun.output import print_note

if TYPE_CHECKING:
    from trainrun.data.augment.augmented import NamedAugmentation
    from trainrun.data.order.drawn import WeightedSamples
    from trainrun.data.scale import Scale
    from trainrun.data.sequences.lengths import SequenceLengths

CPU = torch.device("cpu")
COMPOSED = (
    "bucket",
    "pack",
    "token_budget",
)  # values of data.padding that ask for lengths before a batch is read
# Batches that threads read ahead, unless one alone is asked for: 3 ms during a step of 3 ms took 3.73 with two,
# 3.44 with four.
LEAST_AHEAD = 4
Sizes = Callable[[Any], Tensor | None]  # of `CountsSamples`
Copying = Callable[[], AbstractContextManager[Any]]  # surrounds a copy to a GPU
Collate = Callable[[list[Any]], Any]
Report = Callable[[str], None]


def build_report(listeners: Sequence[Report]) -> Report:
    """Return a function that sends a line to all listeners, or to stderr if there are none, as on most ranks."""

    def report(text: str) -> None:
        for listener in listeners or (print_note,):
            listener(text)

    return report


class TokenCounter:
    """A counter of useful positions on this rank since the last read. counts: whether it counts any stream."""

    def __init__(self) -> None:
        self.counts = False
        self._sum: Tensor | None = None

    def add(self, positions: Tensor) -> None:
        self._sum = positions if self._sum is None else self._sum + positions

    def take(self) -> float:
        """Return the tokens since the last call. The host waits for the device."""
        total, self._sum = self._sum, None
        return 0.0 if total is None else float(total)


class SourceStates:
    """States that an iterable training source reported after its last batches, for a resume.

    parts: the number of readers among which the source is divided.
    """

    KEPT = 256  # batches read ahead of the training, and those of one step, at most

    def __init__(self) -> None:
        self.parts = 1
        self._known: dict[tuple[int, int], Any] = {}

    def store(self, epoch: int, batch: int, state: Any) -> None:
        """Store the state of the source after a batch. Drop the oldest state if there are more than `KEPT`."""
        self._known[epoch, batch] = state
        if len(self._known) > self.KEPT:
            del self._known[next(iter(self._known))]

    def find_position(self, epoch: int, place: int) -> Any:
        """Return the stored position of an epoch; None if it must be read again from the beginning."""
        return self._known.get((epoch, place))


class FirstInput(NamedTuple):
    """The first element of a sample. kind: `floats`, `integers`, or a type in words. shape: None if it has none."""

    kind: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class SourceFacts:
    """Facts about the samples of a source, from reading a few of them.

    first: None if no sample can be read. fault: the reason. seconds, busy_seconds: wall time and processor time to
        read and transform a sample. sample_bytes: size of a sample in a batch; 0 if unknown. drawn_from: the global
        generators that the user's code uses. draws: the calls that use them. changes: the calls that return another
        sample although all global generators are seeded equally. sequences: the parts of a sample that are sequences.
        None: only reading all samples can tell, or it is not needed.
    """

    first: FirstInput | None = None
    fault: str = ""
    seconds: float = 0.0
    busy_seconds: float = 0.0
    sample_bytes: int = 0
    drawn_from: tuple[str, ...] = ("random", "numpy.random", "torch")
    draws: dict[str, tuple[str, ...]] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    sequences: SequenceLengths | None = None


@dataclass(frozen=True)
class StreamOptions:
    """The options of one stream.

    key: its setting in messages (`data.train`). batch_size: per rank.
    transform_key: the setting of the transform, for messages.
    training: False reads every sample once in its own order. Then shuffle and drop_last do not apply, every epoch is
        epoch 0, and a batch_size above the data is lowered.
    engine: "auto", "resident", "workers" or "threads". report: receives lines for the user.
    tally: receives the useful tokens if lengths differ. sizes: the method `sizes` of the task, called on the host.
    gather: returns the values of all ranks on every rank. None: each rank works for itself.
    limit: a fraction of the micro-batches (float) or their number (int). In evaluation it is a fraction of the
        samples, or the samples of that many batches of one rank.
    may_shrink: training samples are only described, so a batch_size above the data is lowered.
    may_grow: batch_size is a suggestion, and small inputs in memory have larger batches, for evaluation.
    max_sequence_length and float_dtype: see `Preparation`. drawn: see `Plan`. shuffle_buffer and places: for an
        iterable source. accumulates: whether a step has several batches. look: the facts of a few samples, if they
        were read. beside: who reads the training samples, if this is another stream.
    """

    key: str
    training: bool
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    engine: str = "auto"
    num_workers: int | Literal["auto"] = "auto"
    pin_memory: bool = True
    persistent_workers: bool = True
    prefetch_factor: int = 2
    timeout_seconds: float = 300.0
    collate_fn: Collate | None = None
    max_sequence_length: int | None = None
    num_threads: int | Literal["auto"] = "auto"
    cache: str = "none"
    transform: Callable[[Any], Any] | None = None
    transform_key: str = "data.transform"
    augment: tuple[NamedAugmentation, ...] = ()
    on_error: str = "raise"
    max_skipped_fraction: float = 0.01
    report: Report = print_note
    truncate: str = "right"
    padding: str = "longest"
    max_tokens: int | None = None
    pad_multiple: int | None = None
    limit: float | int = 1.0
    may_grow: bool = False
    may_shrink: bool = False
    accumulates: bool = False
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    gather: Callable[[Any], list[Any]] | None = None
    device: torch.device = CPU
    copying: Copying | None = None
    float_dtype: torch.dtype = torch.float32
    tally: TokenCounter | None = None
    sizes: Sizes | None = None
    drawn: WeightedSamples | None = None
    shuffle_buffer: int | None = None
    places: SourceStates = field(default_factory=SourceStates)
    look: SourceFacts | None = None
    beside: StreamEngine | None = None

    @property
    def needs_lengths(self) -> bool:
        """Return whether batches can only be formed once the lengths of all samples are known."""
        cuts = self.max_sequence_length is not None
        if (self.training and self.padding in COMPOSED) or (cuts and self.truncate in ("drop", "split")):
            return True
        return self.padding == "max" and not cuts

    @property
    def sequences_matter(self) -> bool:
        """Return whether anything depends on the parts of a sample that are sequences."""
        return self.collate_fn is None or (self.padding, self.truncate) != ("longest", "right")

    @property
    def pins_memory(self) -> bool:
        """Return whether batches are copied to page-locked memory."""
        return self.pin_memory and self.device.type == "cuda"


@dataclass(frozen=True)
class PreparedStream:
    """A source that can be indexed, before an engine reads it.

    source: the source of the user. dataset: the data set from which single samples are read. columns: the data if it is
        in memory, else None.
    plan: forms batches from samples. scale: scales pictures that are bytes. single: the setting that needs single
        samples, or "".
    notes: lines for the start. samples: see `SequencePlan`.
    """

    source: Any
    options: StreamOptions
    dataset: Any
    columns: Columns | None
    plan: StreamPlan
    preparation: Preparation
    collate: Collate | None
    scale: Scale | None
    single: str
    notes: tuple[str, ...] = ()
    samples: Tensor | None = None

    @property
    def look(self) -> SourceFacts | None:
        """Return the facts of a few samples; None for plain tensors and arrays."""
        return self.options.look

    @property
    def runs_user_code(self) -> bool:
        """Return whether the user's code receives single samples."""
        return self.options.transform is not None or self.options.collate_fn is not None


def check_options(options: StreamOptions) -> None:
    if options.transform is not None and not callable(options.transform):
        raise DataError(
            f"{options.transform_key}: a {type(options.transform).__name__} cannot be called with a sample; give a "
            "class with __call__, or a function with _partial_: true"
        )
    limit = options.limit
    valid = limit >= 1 if isinstance(limit, int) else 0 < limit <= 1
    if isinstance(limit, bool) or not valid:
        raise DataError(
            f"{limit_key(options)}={limit}: must be a fraction above 0.0 and up to 1.0, "
            "or a whole number of batches from 1"
        )
    if options.engine == "auto" and "auto" not in (options.num_workers, options.num_threads):
        raise DataError(
            f"data.num_threads={options.num_threads}: data.num_workers={options.num_workers} is set too; leave "
            "one of them out, or choose one by data.engine=threads or data.engine=workers"
        )


def limit_key(options: StreamOptions) -> str:
    split = "train" if options.training else "val"
    return f"trainer.limit_{split}_batches"


def convert_limit_to_samples(options: StreamOptions) -> StreamOptions:
    """Convert the limit of an evaluation to samples, so that it depends neither on ranks nor on larger batches."""
    if options.training or isinstance(options.limit, float):
        return options
    return replace(options, limit=options.limit * options.batch_size)


def build_plan(num_samples: int, options: StreamOptions) -> Plan:
    """Return the plan of `num_samples` samples. Raise DataError if they form no batch."""
    if num_samples == 0:
        raise DataError(f"{options.key}: the data set is empty")
    return fit_plan_to_count(
        build_unchecked_plan(num_samples, options.batch_size, options), num_samples, options.key
    )


def fit_plan_to_count(base: Plan, count: int, key: str) -> Plan:
    """Return the plan for `count` samples (or rows). Raise DataError if they are too few for a training batch."""
    plan = replace(base, num_samples=count)
    if plan.global_size <= count:
        return plan
    if plan.training and not plan.may_shrink:
        raise build_batch_size_error(key, count, plan)
    return replace(plan, batch_size=-(-count // plan.world_size))


def build_unchecked_plan(num_samples: int, batch_size: int, options: StreamOptions) -> Plan:
    """Return a plan without checks: the batch may be larger than the data."""
    training = options.training
    return Plan(num_samples, batch_size, options.seed, options.shuffle and training,
                options.drop_last and training, training, options.limit, options.rank,
                options.world_size, options.drawn if training else None, options.may_shrink)  # fmt: skip


def count_read_ahead(number: int, prefetch_factor: int) -> int:
    """Return how many batches `number` threads read ahead.

    If reading takes as long as a step, each would wait for the other after every small delay. Batches that are ready
    make up for that.
    """
    return max(number * prefetch_factor, LEAST_AHEAD if prefetch_factor > 1 else 1)


def describe_unused_options(options: StreamOptions, *names: str) -> str:
    """Describe settings that have no effect."""
    values = {name: getattr(options, name) for name in names}
    unused = [f"data.{name}={value}" for name, value in values.items() if value not in ("auto", 0)]
    return f"; {' and '.join(unused)} {'is' if len(unused) == 1 else 'are'} not used" if unused else ""
