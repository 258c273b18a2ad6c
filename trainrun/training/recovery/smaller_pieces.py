"""A window that ran out of memory runs again, from the same data, in smaller micro-batches.

what: forward and backward of a window are thrown away where memory ends, random states and buffers are put
    back, and the same samples run in half as many at a time, again and again if needed. Losses are sums
    that are divided once, by the count of the whole window, so the gradient is the same up to rounding.
    The choice holds for the rest of the run and for its resumes.
when: always on; `trainer.out_of_memory=stop` ends the run instead, and after a resume starts with whole batches.
when not: models with BatchNorm, whose statistics would be those of fewer samples (`split-batchnorm` allows
    it); losses that couple samples of a batch, which a trial with two samples finds; memory that ends in
    the update, where nothing may be repeated. Random draws (dropout) are others than in one large batch.
    With several ranks all must know of a failure before gradients are exchanged: windows that are
    larger than all before them wait for that, and no others can run again.
source: Composer's automatic micro-batching (docs.mosaicml.com, "auto microbatching").
gain: the run goes on. Cost while nothing fails: 0.5 us a window on a CPU, 1.5 us where the model draws random numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from trainrun.data.split_batch import cut, num_rows, rows_of, tensors_in
from trainrun.errors import PluginError
from trainrun.interfaces import KeepsState, MicroBatch, Parallel, Task, counts_before
from trainrun.output import counted
from trainrun.seeding import evaluating

T = TypeVar("T")
Compute = Callable[[list[MicroBatch]], T]

ONE_SAMPLE = "one sample at a time does not fit either"
COUPLED = 0.02  # of the loss: far above rounding, also of bfloat16
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class DeferredSync(Protocol):
    """A backend whose ranks can wait with the exchange until every one of them has its gradients.

    cannot_wait: why it cannot, with these options; "" if it can.
    waits: whether the window at hand does, by what any rank asked for; known after `agree`.
    """

    @property
    def cannot_wait(self) -> str: ...

    @property
    def waits(self) -> bool: ...

    def ask_to_wait(self, wanted: bool) -> None:
        """Told to the others with the next `agree`."""

    def exchange(self) -> None:
        """The exchange of a window that waited, equal to that of the last micro-batch of any other."""


class Retry(Protocol):
    """What `OomRetry` is to the functions here."""

    mode: str
    model: nn.Module
    task: Task
    parallel: Parallel
    pieces: int
    largest: int  # numbers of a window so far

    def attempt(self, window: list[MicroBatch], compute: Compute[T]) -> tuple[T | None, str]: ...

    def split(self, window: list[MicroBatch], fault: str, failed_here: bool) -> None: ...

    def tell(self, window: list[MicroBatch], fault: str) -> None: ...


def run_together(retry: Retry, window: list[MicroBatch], compute: Compute[T]) -> T:
    """Several ranks: those that computed all their gradients wait for those that could not."""
    ranks = cast(DeferredSync, retry.parallel)
    size = sum(leaf.numel() for batch in window for leaf in tensors_in(batch.data))
    ranks.ask_to_wait(size > retry.largest)
    retry.largest = max(size, retry.largest)
    found, fault = retry.attempt(window, compute)
    if not ranks.waits:
        if fault:
            raise torch.OutOfMemoryError(
                f"{fault}; with several ranks only a window larger than all before it can run again in "
                "smaller micro-batches, because the others exchange gradients already"
            )
        return found  # type: ignore[return-value]
    last = ""
    while any(faults := retry.parallel.gather(fault)):
        last = next(filter(None, faults))
        retry.split(window, last, failed_here=bool(fault))
        ranks.ask_to_wait(True)
        found, fault = retry.attempt(window, compute)
    ranks.exchange()
    if last:
        retry.tell(window, last)
    return found  # type: ignore[return-value]


def told(window: list[MicroBatch], pieces: int, fault: str) -> str:
    rows = -(-max(num_rows(batch.data) for batch in window) // pieces)
    return (
        f"out of memory ({fault}): from here on every micro-batch is cut in {pieces}, "
        f"{counted(rows, 'sample')} at a time, with the same global batch and the same gradient "
        "(trainer.out_of_memory)"
    )


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def whole_only(retry: Retry, batch: MicroBatch, pieces: int) -> str:
    """Why a batch of a validation cannot be cut further; "" if it can."""
    try:
        return ONE_SAMPLE if pieces >= num_rows(batch.data) else coupled(retry, [batch])
    except ValueError as error:
        return str(error)


def obstacle(retry: Retry, window: list[MicroBatch], failed_here: bool) -> str:
    """Why smaller micro-batches would compute something else, or cannot be had; "" if they can."""
    if retry.mode != "split-batchnorm" and (name := batch_norm_in(retry.model)):
        return of_batch_norm(name)
    if isinstance(retry.task, KeepsState) and retry.task.state_dict():
        return "the task keeps state, which the attempt that failed may have changed"
    try:
        rows = max(num_rows(batch.data) for batch in window)
        if failed_here and retry.pieces >= rows:
            return ONE_SAMPLE
        if retry.mode == "split-batchnorm" and 4 * retry.pieces > rows and batch_norm_in(retry.model):
            return "batch norm needs at least two samples"
        return "" if retry.pieces > 1 else coupled(retry, window)  # looked at before
    except ValueError as error:
        return str(error)


def of_batch_norm(name: str) -> str:
    """Return why a model with batch norm runs no window again. name: of the module."""
    return (
        f"the model has batch norm ({name}), whose statistics would be those of fewer samples; "
        "trainer.out_of_memory=split-batchnorm allows it"
    )


def coupled(retry: Retry, batches: list[MicroBatch]) -> str:
    """Why the parts of these batches would not add up to them; "" if they do. ValueError: they have no parts."""
    for batch in batches:
        pieces = cut(batch, num_rows(batch.data))
        if not counts_before(retry.task):
            break  # the outputs of the pieces say their counts
        whole, parts = (sum(retry.task.count(one.data) for one in some) for some in ([batch], pieces))
        if whole != parts:
            return f"task.count says {whole} for a batch and {parts} for its samples one by one"
    largest = max(batches, key=lambda batch: num_rows(batch.data))
    return coupling(retry.model, retry.task, largest.data) if num_rows(largest.data) > 1 else ""


def batch_norm_in(model: nn.Module) -> str:
    """The first module that normalises by its batch, "" if there is none."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            return name or type(module).__name__
    return ""


def coupling(model: nn.Module, task: Task, data: Any) -> str:
    """Whether the loss of two samples is another than their two losses: a contrastive one, for instance."""
    count = num_rows(data)
    try:
        with evaluating(model):
            one, other, both, again = (
                float(task.step(model, rows_of(data, *rows, count)).loss_sum)
                for rows in ((0, 1), (1, 2), (0, 2), (0, 2))
            )
    except (PluginError, MemoryError, RuntimeError) as error:
        return f"the task cannot compute single samples: {str(error).partition(chr(10))[0]}"
    tolerance = COUPLED * (abs(one) + abs(other) + abs(both))
    if abs(both - again) > tolerance or abs(both - one - other) <= tolerance:
        return ""  # drawn at random, so that nothing can be compared; or the sum that it should be
    return (
        f"the task's loss of two samples ({both:.4g}) is not the sum of their losses ({one:.4g} and {other:.4g}), "
        "so it depends on which samples come together"
    )
