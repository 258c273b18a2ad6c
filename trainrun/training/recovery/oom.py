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
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from trainrun.data.split_batch import cut, num_rows, rows_of, tensors_in
from trainrun.errors import PluginError
from trainrun.formatting import counted
from trainrun.interfaces import DeferredSync, KeepsState, MicroBatch, Parallel, Task, counts_before
from trainrun.seeding import kept_random_state
from trainrun.training.recovery.step_snapshot import StepSnapshot

T = TypeVar("T")
Compute = Callable[[list[MicroBatch]], T]

MARKS = ("can't allocate memory", "out of memory", "bad_alloc", "_STATUS_ALLOC_FAILED")
# cuDNN says these where its workspace does not fit, and also of a layer that it cannot compute at all.
CUDNN_MARKS = ("unable to find an engine to execute this computation", "FIND was unable to find an engine",
               "CUDNN_STATUS_INTERNAL_ERROR")  # fmt: skip
FULL = 0.05  # of a GPU's memory: with less than this free, such an error is one of memory
ONE_SAMPLE = "one sample at a time does not fit either"
PREFIX = re.compile(r"\[enforce fail at [^\]]*\] [^.]*\. ")  # the line of torch's source
COUPLED = 0.02  # of the loss: far above rounding, also of bfloat16


class OomRetry:
    """mode: split, split-batchnorm, stop. note: told once of each choice.

    mends: whether `mend_buffers` will be asked, also where nothing runs again.
    acts: whether `run` does more than to compute.
    pieces: in how many parts every micro-batch is cut. refusal: why nothing runs again here, "" if it does.
    """

    def __init__(
        self,
        mode: str,
        model: nn.Module,
        task: Task,
        parallel: Parallel,
        note: Callable[[str], None],
        mends: bool = False,
    ) -> None:
        self.pieces = 1
        self._mode, self._model, self._task, self._parallel, self._note = mode, model, task, parallel, note
        self._start = StepSnapshot(model, parallel.device)
        self._ranks = parallel if isinstance(parallel, DeferredSync) else None
        self.refusal = refusal(mode, parallel)
        self._off = mode == "stop" or bool(self.refusal)
        self._marked = False
        self._largest, self._val_pieces = 0, 1
        self.acts = not self._off or mends
        self._fault = ""

    def run(self, window: list[MicroBatch], compute: Compute[T]) -> T:
        """`compute(window)`, or the same in smaller micro-batches. torch.OutOfMemoryError: neither fits."""
        if not self.acts:
            return compute(window)
        if self._start.watches:
            self._start.mark()
        self._marked = True
        if self._off:
            return compute(window)
        if self._ranks is not None:
            return self._run_together(self._ranks, window, compute)
        found, fault = self._attempt(window, compute)
        if not fault:
            return found  # type: ignore[return-value]
        while fault:
            self._split(window, fault, failed_here=True)
            found, fault = self._attempt(window, compute)
        self._tell(window)
        return found  # type: ignore[return-value]

    def in_pieces(self, batch: MicroBatch, compute: Callable[[MicroBatch], T]) -> list[T]:
        """`compute` of a batch of a validation, or of its parts, where memory does not suffice for the whole.

        The parts' sums are those of the whole. torch.OutOfMemoryError: a single sample does not fit either.
        """
        while True:
            try:
                return [compute(part) for part in self._parts_of(batch)]
            except (MemoryError, RuntimeError) as error:
                if self._mode == "stop" or not (fault := no_memory(error)):
                    raise
            self._free()  # the error is gone now, and what its frames held
            if reason := self._whole_only(batch):
                raise torch.OutOfMemoryError(f"{fault}; a batch of the validation is not cut: {reason}")
            self._val_pieces *= 2
            self._note(
                f"out of memory in a validation ({fault}): from here on its batches are cut in {self._val_pieces}; "
                "data.val_batch_size sets their size"
            )

    def _parts_of(self, batch: MicroBatch) -> list[MicroBatch]:
        try:
            return cut(batch, self._val_pieces) if self._val_pieces > 1 else [batch]
        except ValueError:  # an earlier one could be cut; this one may fit whole
            return [batch]

    def _whole_only(self, batch: MicroBatch) -> str:
        try:
            if self._val_pieces >= num_rows(batch.data):
                return ONE_SAMPLE
            return self._coupled([batch])
        except ValueError as error:
            return str(error)

    def _free(self) -> None:
        gc.collect()
        if self._parallel.device.type == "cuda":
            torch.cuda.empty_cache()

    def mend_buffers(self) -> str:
        """After a step that was not finite: buffers with such values (averages of batch norm) become what they were
        before it. Says what cannot be put back."""
        return self._start.mend_buffers(self._marked)

    def state_dict(self) -> dict[str, Any]:
        return {"pieces": self.pieces} | ({"val_pieces": self._val_pieces} if self._val_pieces > 1 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pieces, self._val_pieces = (
            (1, 1) if self._mode == "stop" else (state["pieces"], state.get("val_pieces", 1))
        )

    def _run_together(self, ranks: DeferredSync, window: list[MicroBatch], compute: Compute[T]) -> T:
        """Several ranks: those that computed all their gradients wait for those that could not."""
        size = sum(leaf.numel() for batch in window for leaf in tensors_in(batch.data))
        ranks.ask_to_wait(size > self._largest)
        self._largest = max(size, self._largest)
        found, fault = self._attempt(window, compute)
        if not ranks.waits:
            if fault:
                raise torch.OutOfMemoryError(
                    f"{fault}; with several ranks only a window larger than all before it can run again in "
                    "smaller micro-batches, because the others exchange gradients already"
                )
            return found  # type: ignore[return-value]
        split = False
        while any(faults := self._parallel.gather(fault)):
            self._split(window, next(filter(None, faults)), failed_here=bool(fault))
            ranks.ask_to_wait(True)
            found, fault = self._attempt(window, compute)
            split = True
        ranks.exchange()
        if split:
            self._tell(window)
        return found  # type: ignore[return-value]

    def _attempt(self, window: list[MicroBatch], compute: Compute[T]) -> tuple[T | None, str]:
        """The result, or in a few words why memory did not suffice.

        When this returns, the error and its frames are gone, and what they held of the memory with them.
        """
        try:
            return compute(window if self.pieces == 1 else self._cut(window)), ""
        except (MemoryError, RuntimeError) as error:
            if not (fault := no_memory(error)):
                raise
            return None, fault

    def _cut(self, window: list[MicroBatch]) -> list[MicroBatch]:
        return [piece for batch in window for piece in cut(batch, self.pieces)]

    def _split(self, window: list[MicroBatch], fault: str, failed_here: bool) -> None:
        """All as at the start of the window, and twice the pieces; torch.OutOfMemoryError: it cannot be."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._free()
        reasons = self._parallel.gather(self._start.restore() or self._obstacle(window, failed_here))
        if reason := next(filter(None, reasons), ""):
            raise torch.OutOfMemoryError(f"{fault}; not run again in smaller micro-batches: {reason}")
        self.pieces *= 2
        self._fault = fault

    def _tell(self, window: list[MicroBatch]) -> None:
        rows = -(-max(num_rows(batch.data) for batch in window) // self.pieces)
        self._note(
            f"out of memory ({self._fault}): from here on every micro-batch is cut in {self.pieces}, "
            f"{counted(rows, 'sample')} at a time, with the same global batch and the same gradient "
            "(trainer.out_of_memory)"
        )

    def _obstacle(self, window: list[MicroBatch], failed_here: bool) -> str:
        """Why smaller micro-batches would compute something else, or cannot be had; "" if they can."""
        if self._mode != "split-batchnorm" and (name := batch_norm_in(self._model)):
            return (
                f"the model has batch norm ({name}), whose statistics would be those of fewer samples; "
                "trainer.out_of_memory=split-batchnorm allows it"
            )
        if isinstance(self._task, KeepsState) and self._task.state_dict():
            return "the task keeps state, which the attempt that failed may have changed"
        try:
            rows = max(num_rows(batch.data) for batch in window)
            if failed_here and self.pieces >= rows:
                return ONE_SAMPLE
            if self._mode == "split-batchnorm" and 4 * self.pieces > rows and batch_norm_in(self._model):
                return "batch norm needs at least two samples"
            if self.pieces > 1:
                return ""  # looked at before
            return self._coupled(window)
        except ValueError as error:
            return str(error)

    def _coupled(self, batches: list[MicroBatch]) -> str:
        """Why the parts of these batches would not add up to them; "" if they do. ValueError: they have no parts."""
        for batch in batches:
            pieces = cut(batch, num_rows(batch.data))
            if not counts_before(self._task):
                break  # the outputs of the pieces say their counts
            whole, parts = (sum(self._task.count(one.data) for one in some) for some in ([batch], pieces))
            if whole != parts:
                return f"task.count says {whole} for a batch and {parts} for its samples one by one"
        largest = max(batches, key=lambda batch: num_rows(batch.data))
        return coupling(self._model, self._task, largest.data) if num_rows(largest.data) > 1 else ""


def refusal(mode: str, parallel: Parallel) -> str:
    if mode == "stop" or parallel.world_size == 1:
        return ""
    if not isinstance(parallel, DeferredSync):
        return "these ranks cannot wait for each other before they exchange gradients"
    return parallel.cannot_wait


def no_memory(error: Exception, free: Callable[[], float] | None = None) -> str:
    """The first line of what an allocator said; "" of any other error. free: the fraction of the GPU that is free."""
    text = PREFIX.sub("", str(error).partition("\n")[0])
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(mark in text for mark in MARKS):
        return text.partition(". Including non-PyTorch memory")[0] or type(error).__name__
    if any(mark in text for mark in CUDNN_MARKS) and (free or free_fraction)() < FULL:
        return text
    return ""


def free_fraction() -> float:
    """Return the share of the current GPU's memory that an operation could still get; 1 without a GPU."""
    if not torch.cuda.is_available():
        return 1.0
    free, total = torch.cuda.mem_get_info()
    return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / total


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norm_in(model: nn.Module) -> str:
    """The first module that normalises by its batch, "" if there is none."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            return name or type(module).__name__
    return ""


@torch.no_grad()
def coupling(model: nn.Module, task: Task, data: Any) -> str:
    """Whether the loss of two samples is another than their two losses: a contrastive one, for instance."""
    count = num_rows(data)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with kept_random_state():
            one, other, both, again = (
                float(task.step(model, rows_of(data, *rows, count)).loss_sum)
                for rows in ((0, 1), (1, 2), (0, 2), (0, 2))
            )
    except (PluginError, MemoryError, RuntimeError) as error:
        return f"the task cannot compute single samples: {str(error).partition(chr(10))[0]}"
    finally:
        for module, training in modes:
            module.training = training
    tolerance = COUPLED * (abs(one) + abs(other) + abs(both))
    if abs(both - again) > tolerance or abs(both - one - other) <= tolerance:
        return ""  # drawn at random, so that nothing can be compared; or the sum that it should be
    return (
        f"the task's loss of two samples ({both:.4g}) is not the sum of their losses ({one:.4g} and {other:.4g}), "
        "so it depends on which samples come together"
    )
