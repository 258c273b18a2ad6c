"""How one stream is read: every word of `data` that concerns it, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from trainrun.data.augment.augmented import NamedAugmentation
from trainrun.data.bad_samples import Report, to_stderr
from trainrun.data.engines.batch_reader import Collate
from trainrun.data.engines.device_feed import Copying, Sizes, unnoticed
from trainrun.data.sequences.choose import SequenceOptions
from trainrun.data.sequences.lengths import Shared
from trainrun.data.sequences.token_counter import TokenCounter
from trainrun.errors import DataError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StreamOptions:
    """How one stream is read.

    key: names it in messages (`data.train`). batch_size: per rank.
    transform_key: the setting that named the transform, for messages.
    training: False reads every sample once in its own order: shuffle and drop_last do not apply,
        every epoch is epoch 0, and a batch_size above the data is lowered.
    engine: "auto", "resident", "workers" or "threads". report: takes one line for the people who watch.
    tally: is told of the useful tokens, where lengths differ. sizes: the task's, which counts on the host.
    gather: the value of every rank, on every rank, for what they do once; None: each for itself.
    limit: a fraction of the micro-batches (float) or their number (int); in evaluation a fraction of the
        samples, or as many as so many batches of one rank hold.
    may_grow: batch_size is a suggestion, and small inputs in memory come in larger batches, for evaluation.
    max_sequence_length and float_dtype: see `Preparation`.
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
    transform_key: str = "data.transform"
    augment: tuple[NamedAugmentation, ...] = ()
    on_error: str = "raise"
    max_skipped_fraction: float = 0.01
    report: Report = to_stderr
    truncate: str = "right"
    padding: str = "longest"
    max_tokens: int | None = None
    pad_multiple: int | None = None
    limit: float | int = 1.0
    may_grow: bool = False
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    gather: Callable[[Any], list[Any]] | None = None
    device: torch.device = CPU
    copying: Copying = unnoticed
    float_dtype: torch.dtype = torch.float32
    tally: TokenCounter | None = None
    sizes: Sizes | None = None


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


def limit_key(options: StreamOptions) -> str:
    split = "train" if options.training else "test" if options.key == "data.test" else "val"
    return f"trainer.limit_{split}_batches"


def with_limit_in_samples(options: StreamOptions) -> StreamOptions:
    """In evaluation, before batches grow: what is evaluated depends on no number of ranks and no batch of ours."""
    if options.training or isinstance(options.limit, float):
        return options
    return replace(options, limit=options.limit * options.batch_size)


def sequence_options(options: StreamOptions) -> SequenceOptions:
    """DataError: what needs the lengths of samples, together with a transform that may change them.

    In evaluation samples keep their order, because predictions are rows in the order of the data.
    """
    padding, max_tokens = options.padding, options.max_tokens
    needy = {"data.padding": padding in ("pack", "token_budget"),
             "data.truncate": options.truncate in ("drop", "split")}  # fmt: skip
    for key, needs in needy.items():
        if needs and options.transform is not None:
            value = getattr(options, key.removeprefix("data."))
            raise DataError(
                f"{key}={value}: needs the lengths of samples, which {options.transform_key} may change; leave one of "
                "them out"
            )
    if not options.training and padding in ("bucket", "pack", "token_budget"):
        padding, max_tokens = "longest", None
    shared = Shared(say=options.report)
    if options.gather is not None:
        shared = Shared(options.rank, options.gather, options.report)
    return SequenceOptions(options.key, padding, max_tokens, options.max_sequence_length, options.truncate,
                           options.pad_multiple, options.collate_fn,
                           shared)  # fmt: skip


def needs_samples(options: StreamOptions, collate: Collate | None) -> str:
    """The option that keeps whole columns from being gathered (engine resident); "" if there is none."""
    if options.transform is not None:
        return options.transform_key
    if options.collate_fn is not None:
        return "data.collate_fn"
    return f"data.padding={options.padding}" if collate is not None else ""
