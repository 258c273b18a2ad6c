"""A window that ran out of memory runs again, from the same data, in smaller micro-batches: see `smaller_pieces.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from trainrun.interfaces import MicroBatch, Parallel, Task
from trainrun.training.recovery.step_snapshot import StepSnapshot

T = TypeVar("T")
Compute = Callable[[list[MicroBatch]], T]

MARKS = ("can't allocate memory", "out of memory", "bad_alloc", "_STATUS_ALLOC_FAILED")
# cuDNN says these where its workspace does not fit, and also of a layer that it cannot compute at all.
CUDNN_MARKS = ("unable to find an engine to execute this computation", "FIND was unable to find an engine",
               "CUDNN_STATUS_INTERNAL_ERROR")  # fmt: skip
FULL = 0.05  # of a GPU's memory: with less than this free, such an error is one of memory
PREFIX = re.compile(r"\[enforce fail at [^\]]*\] [^.]*\. ")  # the line of torch's source


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
        self.mode, self.model, self.task, self.parallel, self.note = mode, model, task, parallel, note
        self._start = StepSnapshot(model, parallel.device)
        self._together = parallel.world_size > 1 and mode != "stop"
        ranks: Any = parallel  # every backend of several fills `smaller_pieces.DeferredSync`
        self.refusal: str = ranks.cannot_wait if self._together else ""
        self._off = mode == "stop" or bool(self.refusal)
        self._marked = self._looked = False
        self._mends = mends
        self.largest, self._val_pieces = 0, 1
        self.acts = not self._off or mends

    def run(self, window: list[MicroBatch], compute: Compute[T]) -> T:
        """`compute(window)`, or the same in smaller micro-batches. torch.OutOfMemoryError: neither fits."""
        if not self.acts:
            return compute(window)
        if not self._looked:
            self._look_at_model()
            return self.run(window, compute)
        if self._start.watches:
            self._start.mark()
        self._marked = True
        if self._off:
            return compute(window)
        if self._together:
            from trainrun.training.recovery.smaller_pieces import run_together

            return run_together(self, window, compute)
        found, fault = self.attempt(window, compute)
        if not fault:
            return found  # type: ignore[return-value]
        while fault:
            last = fault
            self.split(window, fault, failed_here=True)
            found, fault = self.attempt(window, compute)
        self.tell(window, last)
        return found  # type: ignore[return-value]

    def _look_at_model(self) -> None:
        """Before the first window: models with batch norm run no window again, so nothing is kept for it."""
        self._looked = True
        if self._off or self.mode == "split-batchnorm" or self.pieces > 1:
            return
        from trainrun.training.recovery.smaller_pieces import batch_norm_in, of_batch_norm

        if name := batch_norm_in(self.model):
            self.refusal, self._off, self.acts = of_batch_norm(name), True, self._mends

    def in_pieces(self, batch: MicroBatch, compute: Callable[[MicroBatch], T]) -> list[T]:
        """`compute` of a batch of a validation, or of its parts, where memory does not suffice for the whole.

        The parts' sums are those of the whole. torch.OutOfMemoryError: a single sample does not fit either.
        """
        while True:
            try:
                return [compute(part) for part in self._parts_of(batch)]
            except (MemoryError, RuntimeError) as error:
                if self.mode == "stop" or not (fault := no_memory(error)):
                    raise
            # the error is gone now, and what its frames held
            from trainrun.training.recovery.smaller_pieces import free, whole_only

            free(self.parallel.device)
            if reason := whole_only(self, batch, self._val_pieces):
                raise torch.OutOfMemoryError(f"{fault}; a batch of the validation is not cut: {reason}")
            self._val_pieces *= 2
            self.note(
                f"out of memory in a validation ({fault}): from here on its batches are cut in {self._val_pieces}; "
                "data.val_batch_size sets their size"
            )

    def _parts_of(self, batch: MicroBatch) -> list[MicroBatch]:
        if self._val_pieces == 1:
            return [batch]
        from trainrun.data.split_batch import cut

        try:
            return cut(batch, self._val_pieces)
        except ValueError:  # an earlier one could be cut; this one may fit whole
            return [batch]

    def mend_buffers(self) -> str:
        """After a step that was not finite: buffers with such values (averages of batch norm) become what they were
        before it. Says what cannot be put back."""
        from trainrun.training.recovery.put_back import mend_buffers

        return mend_buffers(self._start, self._marked)

    def state_dict(self) -> dict[str, Any]:
        return {"pieces": self.pieces} | ({"val_pieces": self._val_pieces} if self._val_pieces > 1 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.mode != "stop":
            self.pieces, self._val_pieces = state["pieces"], state.get("val_pieces", 1)

    def attempt(self, window: list[MicroBatch], compute: Compute[T]) -> tuple[T | None, str]:
        """The result, or in a few words why memory did not suffice.

        When this returns, the error and its frames are gone, and what they held of the memory with them.
        """
        try:
            if self.pieces > 1:
                from trainrun.data.split_batch import cut

                window = [piece for batch in window for piece in cut(batch, self.pieces)]
            return compute(window), ""
        except (MemoryError, RuntimeError) as error:
            if not (fault := no_memory(error)):
                raise
            return None, fault

    def split(self, window: list[MicroBatch], fault: str, failed_here: bool) -> None:
        """All as at the start of the window, and twice the pieces; torch.OutOfMemoryError: it cannot be."""
        for parameter in self.model.parameters():
            parameter.grad = None
        from trainrun.training.recovery.put_back import restore
        from trainrun.training.recovery.smaller_pieces import free, obstacle

        free(self.parallel.device)
        reasons = self.parallel.gather(restore(self._start) or obstacle(self, window, failed_here))
        if reason := next(filter(None, reasons), ""):
            raise torch.OutOfMemoryError(f"{fault}; not run again in smaller micro-batches: {reason}")
        self.pieces *= 2

    def tell(self, window: list[MicroBatch], fault: str) -> None:
        from trainrun.training.recovery.smaller_pieces import told

        self.note(told(window, self.pieces, fault))


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
