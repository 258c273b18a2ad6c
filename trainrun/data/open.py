"""The door of this room: from a user's data to a stream of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainrun.data.augment.augmented import NamedAugmentation, augmented
from trainrun.data.batch import Preparation, as_tensor, is_integer
from trainrun.data.choice import choose, describe_workers, roomy_batch_size, worker_numbers
from trainrun.data.columns import Columns, columns_of
from trainrun.data.iterable import IterableBatches, StreamReader
from trainrun.data.loader import LoaderBatches
from trainrun.data.order import Plan, batch_too_large
from trainrun.data.resident import ResidentBatches
from trainrun.data.undecided import Undecided, Way
from trainrun.data.workers import WorkerOptions
from trainrun.errors import DataError
from trainrun.interfaces import Batches, DataFacts
from trainrun.randomness import kept_random_state
from trainrun.usercode import line_of

CPU = torch.device("cpu")
IGNORED_LABEL = -100  # torch's ignore_index
ALLOWED = (
    "allowed: a data set with __len__ and __getitem__, a torch IterableDataset, "
    "or a tuple, list or mapping of tensors or arrays"
)


@dataclass(frozen=True)
class StreamOptions:
    """How one stream is read.

    key: names it in messages (`data.train`). batch_size: per rank.
    training: False reads every sample once in its own order: shuffle and drop_last do not apply,
        every epoch is epoch 0, and a batch_size above the data is lowered.
    engine: "auto", "resident" or "workers". limit: a fraction of the micro-batches (float) or their
        number (int). may_grow: batch_size is a suggestion, and small inputs in memory come in larger
        batches, for evaluation. max_sequence_length and float_dtype: see `Preparation`.
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
    collate_fn: Callable[[list[Any]], Any] | None = None
    max_sequence_length: int | None = None
    num_threads: int | Literal["auto"] = "auto"
    cache: str = "none"
    transform: Callable[[Any], Any] | None = None
    augment: tuple[NamedAugmentation, ...] = ()
    on_error: str = "raise"
    max_skipped_share: float = 0.01
    truncate: str = "right"
    padding: str = "longest"
    max_tokens: int | None = None
    pad_multiple: int | None = None
    limit: float | int = 1.0
    may_grow: bool = False
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    float_dtype: torch.dtype = torch.float32


def open_batches(source: Any, options: StreamOptions) -> tuple[Batches, str]:
    """The stream, and one line with the engine that was chosen and why."""
    batches, line = _open(source, options)
    return augmented(batches, options.augment, options.seed, options.training, options.float_dtype), line


def _open(source: Any, options: StreamOptions) -> tuple[Batches, str]:
    _check_limit(options)
    if isinstance(source, IterableDataset):
        return _open_iterable(source, options)
    columns = columns_of(source, options.key)
    if options.may_grow and columns is not None:
        options = replace(options, batch_size=roomy_batch_size(columns, options.batch_size))
    plan = _plan(_length(source if columns is None else columns, options.key), options)
    preparation = Preparation(options.float_dtype, options.max_sequence_length)
    collates = options.collate_fn is not None
    choice = choose(options.key, columns, options.engine, options.num_workers, collates, preparation,
                    options.device, options.world_size)  # fmt: skip
    line = f"{options.key}: {choice.reason}"
    if options.training and options.num_workers == "auto" and options.engine in ("auto", "workers"):
        ways = _ways(source, columns, plan, preparation, options, choice.workers is None)
        ways.sort(
            key=lambda way: (
                (way.engine == "resident", way.number) != (choice.workers is None, choice.workers or 0)
            )
        )
        return Undecided(ways, options.prefetch_factor, source), line
    if choice.workers is None and columns is not None:
        return ResidentBatches(columns, plan, preparation, options.device), line
    workers = _worker_options(choice.workers or 0, options)
    dataset = source if columns is None else columns.on_host()
    return LoaderBatches(dataset, plan, preparation, options.device, workers, options.collate_fn,
                         options.key), line  # fmt: skip


def _ways(source: Any, columns: Columns | None, plan: Plan, preparation: Preparation,
          options: StreamOptions, fits: bool) -> list[Way]:  # fmt: skip
    """All engines that could read it, the simplest first."""
    dataset = source if columns is None else columns.on_host()

    def loader(number: int) -> Batches:
        workers = _worker_options(number, options)
        return LoaderBatches(dataset, plan, preparation, options.device, workers, options.collate_fn,
                             options.key)  # fmt: skip

    ways = []
    if fits and columns is not None:
        ways.append(Way("resident", "resident", 0,
                        partial(ResidentBatches, columns, plan, preparation, options.device)))  # fmt: skip
    numbers = worker_numbers(options.world_size)
    return ways + [Way(f"workers={n}", "workers", n, partial(loader, n)) for n in numbers]


def _open_iterable(source: Any, options: StreamOptions) -> tuple[Batches, str]:
    number = 0 if options.num_workers == "auto" else options.num_workers
    if number > 1:
        raise DataError(
            f"data.num_workers={number}: {options.key} is an IterableDataset, "
            "which at most 1 worker can read in order; use 0 or 1"
        )
    if options.engine == "resident":
        raise DataError(f"data.engine=resident: {options.key} is an IterableDataset; use data.engine=auto")
    try:
        length: int | None = len(source)
    except TypeError:  # it has no __len__
        length = None
    plan = _plan(length, options) if length is not None else _new_plan(0, options.batch_size, options)
    max_batches = _max_batches(plan, length, options)
    preparation = Preparation(options.float_dtype, options.max_sequence_length)
    reader = StreamReader(source, plan, length, max_batches, preparation, options.collate_fn, options.key)
    reason = "asked for" if options.num_workers != "auto" else "an IterableDataset"
    line = f"{options.key}: {describe_workers(number)} ({reason})"
    return IterableBatches(reader, options.device, _worker_options(number, options)), line


def _max_batches(plan: Plan, length: int | None, options: StreamOptions) -> int | None:
    """Where to cut an IterableDataset; None reads to its end."""
    if isinstance(options.limit, float) and options.limit == 1:
        return None
    if length is not None:
        return plan.num_batches
    if isinstance(options.limit, int):
        return options.limit
    raise DataError(
        f"{_limit_key(options)}={options.limit}: {options.key} has no length that a fraction could be "
        "taken of; give a number of batches"
    )


def _length(source: Any, key: str) -> int:
    """Of a source that can be indexed; refuses all others."""
    if isinstance(source, DataLoader):
        raise DataError(f"{key}: a DataLoader already makes batches; give its dataset instead")
    if isinstance(source, type):
        raise DataError(f"{key}: {source.__name__} is a class, not a data set; {ALLOWED}")
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")) or isinstance(source, str | bytes):
        raise DataError(f"{key}: cannot read a {type(source).__name__}; {ALLOWED}")
    return len(source)


def _plan(num_samples: int, options: StreamOptions) -> Plan:
    if num_samples == 0:
        raise DataError(f"{options.key}: the data set is empty")
    plan = _new_plan(num_samples, options.batch_size, options)
    if plan.global_size <= num_samples:
        return plan
    if options.training:
        raise batch_too_large(options.key, num_samples, plan)
    return _new_plan(num_samples, -(-num_samples // options.world_size), options)


def _new_plan(num_samples: int, batch_size: int, options: StreamOptions) -> Plan:
    training = options.training
    return Plan(num_samples, batch_size, options.seed, options.shuffle and training,
                options.drop_last and training, training, options.limit, options.rank,
                options.world_size)  # fmt: skip


def _worker_options(number: int, options: StreamOptions) -> WorkerOptions:
    pin = options.pin_memory and options.device.type == "cuda"
    return WorkerOptions(number, pin, options.persistent_workers, options.prefetch_factor,
                         options.timeout_seconds)  # fmt: skip


def _check_limit(options: StreamOptions) -> None:
    limit = options.limit
    valid = limit >= 1 if isinstance(limit, int) else 0 < limit <= 1
    if isinstance(limit, bool) or not valid:
        raise DataError(
            f"{_limit_key(options)}={limit}: must be a fraction above 0.0 and up to 1.0, "
            "or a whole number of batches from 1"
        )


def _limit_key(options: StreamOptions) -> str:
    return f"trainer.limit_{'train' if options.training else 'val'}_batches"


def facts_of(source: Any, key: str = "data.train") -> DataFacts:
    """What can be learnt without reading all of it: in-memory data, or its attributes and first sample.

    The input is the first element of a sample. An IterableDataset is not read: a sample taken from it
    might be lost. Attributes: `num_classes`, `class_names` (or torchvision's `classes`).
    """
    given = getattr(source, "class_names", None) or getattr(source, "classes", None) or ()
    names = tuple(str(name) for name in given)
    columns = None if isinstance(source, IterableDataset) else columns_of(source, key)
    num_classes = getattr(source, "num_classes", None) or len(names) or None
    if columns is not None:
        return DataFacts(tuple(columns.values[0].shape[1:]), num_classes or _classes_in(columns), names)
    shape = None if isinstance(source, IterableDataset) else _first_shape(source, key)
    return DataFacts(shape, num_classes, names)


def _classes_in(columns: Columns) -> int | None:
    """One more than the largest label; None where the targets are no labels."""
    target = columns.target()
    if target is None or len(target) == 0 or not is_integer(target) or target.dtype in (torch.bool, np.bool_):
        return None
    largest = int(target.max())
    return largest + 1 if largest >= 0 else None


def _first_shape(source: Any, key: str) -> tuple[int, ...] | None:
    if _length(source, key) == 0:
        raise DataError(f"{key}: the data set is empty")
    with kept_random_state():
        try:
            sample = source[0]
        except Exception as error:
            raise DataError(
                f"{key}: sample 0 of {type(source).__name__} cannot be read: "
                f"{type(error).__name__}: {error}{line_of(error)}"
            ) from error
    while isinstance(sample, tuple | list | dict) and sample:
        sample = next(iter(sample.values() if isinstance(sample, dict) else sample))
    return tuple(sample.shape) if isinstance(sample, Tensor | np.ndarray) else None


def check_labels(source: Any, key: str, num_classes: int) -> None:
    """Refuses integer targets in memory outside 0..num_classes-1; other sources cannot be checked ahead."""
    columns = None if isinstance(source, IterableDataset) else columns_of(source, key)
    target = None if columns is None else columns.target()
    if target is None or not is_integer(target):
        return
    labels = as_tensor(target).long()
    wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= num_classes))
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        raise DataError(
            f"{key}: sample {first[0]} has label {int(labels[tuple(first)])}, but "
            f"data.num_classes={num_classes} allows 0 to {num_classes - 1}; correct one of the two"
        )
