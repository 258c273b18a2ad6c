"""Repeat a window that runs out of memory, with the same data in smaller micro-batches.

what: when memory runs out, the gradients of the window are discarded, and random states (torch, Python, NumPy) and
    buffers are restored. The same samples then run in micro-batches of half the size, repeatedly if needed. Losses
    are sums divided once by the count of the whole window, so the gradient is the same up to rounding. The size
    stays for the rest of the run and for its resumes.
when: always. `trainer.out_of_memory=stop` ends the run instead, and a resume then starts with whole batches. when
    not: several ranks, because the others already exchange gradients; models with BatchNorm, whose statistics would
    be those of fewer samples (`split-batchnorm` allows it); losses that couple samples of a batch, which a trial
    with two samples detects; memory that runs out in the update, which must not be repeated. Random numbers
    (dropout) differ from those of one large batch.
source: Composer's automatic micro-batching (docs.mosaicml.com, "auto microbatching").
gain: the run continues. Cost without a failure: 0.3 us per window on a CPU, 2 if the model uses random numbers of
    torch, 18 of Python, 70 of NumPy; nothing if splitting is refused in advance.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainrun.data.split_batch import count_rows, select_rows, split_micro_batch
from trainrun.errors import PluginError
from trainrun.interfaces import KeepsState, MicroBatch, Parallel, Task, has_count_method
from trainrun.output import format_count
from trainrun.runtime.foreach_copy import Lists, copy_tensors, group_by_type
from trainrun.seeding import NUMPY_GENERATOR, PYTHON_GENERATOR, Generator, TorchGenerator, evaluation_mode

T = TypeVar("T")
Compute = Callable[[list[MicroBatch]], T]

MARKS = ("can't allocate memory", "out of memory", "bad_alloc", "_STATUS_ALLOC_FAILED")
# cuDNN says these where its workspace does not fit, and also of a layer that it cannot compute at all.
CUDNN_MARKS = ("unable to find an engine to execute this computation", "FIND was unable to find an engine",
               "CUDNN_STATUS_INTERNAL_ERROR")  # fmt: skip
FULL = 0.05  # of a GPU's memory: with less than this free, such an error is one of memory
PREFIX = re.compile(r"\[enforce fail at [^\]]*\] [^.]*\. ")  # the line of torch's source
READ_EVERY = 64  # windows
ONE_SAMPLE = "one sample at a time does not fit either"
RANKS = "with several ranks the others exchange the gradients of this step already"
FORWARDS = "the other ranks exchange weights in this forward already"
COUPLED = 0.02  # of the loss: far above rounding, also of bfloat16
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class RandomStates:
    """The states of the random generators of torch, Python and NumPy at the start of the newest step.

    Reading all of them takes up to 80 us. So all are read in the first two steps and in every 64th. A generator that
    was used between two such readings is read in every step from then on. For any other generator, the last reading
    is still valid unless it was used since. This is checked when a step fails.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators: dict[str, Generator] = {
            "torch": TorchGenerator(torch.default_generator),
            "Python": PYTHON_GENERATOR,
            "NumPy": NUMPY_GENERATOR,
        }
        if device.type == "cuda":
            of_device = torch.cuda.default_generators[device.index or 0]
            self._generators["CUDA"] = TorchGenerator(of_device)
        self._states: dict[str, Any] = {}
        self._read_always: dict[str, Generator] = {}  # they moved once
        self._window = 0  # the number of the next one
        self._last_reading = 0

    def mark(self) -> None:
        """Read the states at the start of a window. Generators that never moved are read only now and then."""
        if self._window < 2 or self._window % READ_EVERY == 0:
            self._read_all()
        else:
            for name, generator in self._read_always.items():
                self._states[name] = generator.state()
        self._window += 1

    def restore(self) -> str:
        """Restore the states that `mark` read. Return the names of unknown states; "" if all states are known."""
        if self._last_reading != self._window - 1:
            unknown = [name for name in self._generators if self._has_unread_draws(name)]
            if unknown:
                return (
                    f"the first random numbers of {' and '.join(unknown)} were drawn in this step or shortly before "
                    "it, so their state at the start of this step is not known"
                )
        for name, generator in self._generators.items():
            generator.set_state(self._states[name])
        return ""

    def _read_all(self) -> None:
        for name, generator in self._generators.items():
            state = generator.state()
            if self._window and state is not self._states[name]:
                self._read_always[name] = generator
            self._states[name] = state
        self._last_reading = self._window

    def _has_unread_draws(self, name: str) -> bool:
        return name not in self._read_always and self._generators[name].state() is not self._states[name]


class OomRetry:
    """A runner of windows that repeats them in smaller micro-batches when memory runs out.

    mode: split, split-batchnorm or stop. note: receives a line for each choice. mends: whether `repair_buffers` will
        be called.
    acts: whether `run` does more than compute. pieces: the number of parts of every micro-batch. refusal: why
        windows are not repeated; "" if they are.
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
        self.pieces, self._val_pieces = 1, 1
        self.mode, self.model, self.task, self.parallel, self.note = mode, model, task, parallel, note
        is_alone = parallel.world_size == 1 and not parallel.forward_is_collective
        self.refusal = "" if is_alone or mode == "stop" else RANKS
        self._buffers = BufferCopies(model)
        self._random_states = RandomStates(parallel.device)
        self.acts = mode != "stop" or mends
        self._mends, self._began = mends, False
        self._runs_again = self._marks = False

    def run(self, window: list[MicroBatch], compute: Compute[T]) -> T:
        """Return `compute(window)`, split into smaller micro-batches if memory does not suffice.

        Raise torch.OutOfMemoryError if the smaller ones do not fit either.
        """
        if not self._began:
            self._begin()
        if self._marks and self._buffers.watches:
            self._buffers.mark()
        if not self._runs_again:
            return compute(self._cut_window(window))
        self._random_states.mark()
        result, fault = self._try_window(window, compute)
        if not fault:
            return result  # type: ignore[return-value]
        while fault:
            last = fault
            self._prepare_smaller(window, fault)
            result, fault = self._try_window(window, compute)
        self.note(
            f"out of memory ({last}): from now on every micro-batch is split into {self.pieces}, "
            f"{format_count(-(-count_most_rows(window) // self.pieces), 'sample')} at a time, with the same global "
            "batch and the "
            "same gradient (trainer.out_of_memory)"
        )
        return result  # type: ignore[return-value]

    def compute_in_pieces(self, batch: MicroBatch, compute: Callable[[MicroBatch], T]) -> list[T]:
        """Compute a validation batch, in parts if memory does not suffice. Return the results of the parts.

        Raise torch.OutOfMemoryError if a single sample does not fit.
        """
        while True:
            try:
                return [compute(part) for part in self._cut_validation_batch(batch)]
            except (MemoryError, RuntimeError) as error:
                if self.mode == "stop" or not (fault := describe_out_of_memory(error)):
                    raise
            # the error is gone now, and what its frames held
            free_memory(self.parallel.device)
            if self.parallel.forward_is_collective:
                reason = FORWARDS
            else:
                reason = self._explain_no_cut([batch], self._val_pieces)
            if reason:
                raise torch.OutOfMemoryError(f"{fault}; a batch of the validation is not cut: {reason}")
            self._val_pieces *= 2
            self.note(
                f"out of memory in a validation ({fault}): from now on its batches are split into {self._val_pieces}; "
                "data.val_batch_size sets their size"
            )

    def repair_buffers(self) -> str:
        """Restore buffers with values that are not finite, such as the averages of BatchNorm after a bad step.

        Return the reason if that is impossible, else "".
        """
        return self._buffers.repair_buffers()

    def state_dict(self) -> dict[str, Any]:
        return {"pieces": self.pieces} | ({"val_pieces": self._val_pieces} if self._val_pieces > 1 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.mode != "stop":
            self.pieces, self._val_pieces = state["pieces"], state.get("val_pieces", 1)

    def _begin(self) -> None:
        """Decide before the first window whether windows can be repeated. If not, nothing is copied for it."""
        self._began = True
        if not self.refusal and self.mode == "split" and (name := find_batch_norm(self.model)):
            self.refusal = (
                f"the model has batch norm ({name}), whose statistics would be those of fewer samples; "
                "trainer.out_of_memory=split-batchnorm allows it"
            )
        self._runs_again = self.mode != "stop" and not self.refusal
        self._marks = self._runs_again or self._mends

    def _cut_window(self, window: list[MicroBatch]) -> list[MicroBatch]:
        if self.pieces == 1:
            return window
        return [piece for batch in window for piece in split_micro_batch(batch, self.pieces)]

    def _cut_validation_batch(self, batch: MicroBatch) -> list[MicroBatch]:
        if self._val_pieces == 1 or self.parallel.forward_is_collective:
            return [batch]
        try:
            return split_micro_batch(batch, self._val_pieces)
        except ValueError:  # an earlier one could be cut; this one may fit whole
            return [batch]

    def _try_window(self, window: list[MicroBatch], compute: Compute[T]) -> tuple[T | None, str]:
        """Return the result; if memory did not suffice, None and a short description of the error.

        The error and its frames are dropped, so the memory that they refer to is free.
        """
        try:
            return compute(self._cut_window(window)), ""
        except (MemoryError, RuntimeError) as error:
            if not (fault := describe_out_of_memory(error)):
                raise
            return None, fault

    def _prepare_smaller(self, window: list[MicroBatch], fault: str) -> None:
        """Restore buffers and random states, and double the number of parts.

        Raise torch.OutOfMemoryError if this window cannot be split further.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        free_memory(self.parallel.device)
        reason = self._buffers.restore() or self._random_states.restore() or self._explain_no_split(window)
        if reason:
            raise torch.OutOfMemoryError(f"{fault}; not repeated in smaller micro-batches: {reason}")
        self.pieces *= 2

    def _explain_no_split(self, window: list[MicroBatch]) -> str:
        """Return why smaller micro-batches would compute something else, or are impossible; "" if they are fine."""
        if isinstance(self.task, KeepsState) and self.task.state_dict():
            return "the task keeps state, which the attempt that failed may have changed"
        if (
            self.mode == "split-batchnorm"
            and 4 * self.pieces > count_most_rows(window)
            and find_batch_norm(self.model)
        ):
            return "batch norm needs at least two samples"
        return self._explain_no_cut(window, self.pieces)

    def _explain_no_cut(self, batches: list[MicroBatch], pieces: int) -> str:
        """Return why batches in `pieces` parts cannot be split further; "" if they can."""
        try:
            if pieces >= count_most_rows(batches):
                return ONE_SAMPLE
            return "" if pieces > 1 else describe_coupling(self.model, self.task, batches)
        except ValueError as error:
            return str(error)


def count_most_rows(batches: list[MicroBatch]) -> int:
    """Return the samples of the largest batch. Raise ValueError if one has no tensor that could be split."""
    return max(count_rows(batch.data) for batch in batches)


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe_coupling(model: nn.Module, task: Task, batches: list[MicroBatch]) -> str:
    """Return why the results of the parts would not add up to the result of the batches; "" if they do. Raise
    ValueError if a batch cannot be divided into samples.
    """
    for batch in batches:
        pieces = split_micro_batch(batch, count_rows(batch.data))
        if not has_count_method(task):
            break  # the outputs of the pieces say their counts
        count_whole, parts = (
            sum(task.count(batch_part.data) for batch_part in some) for some in ([batch], pieces)
        )
        if count_whole != parts:
            return f"task.count says {count_whole} for a batch and {parts} for its samples one by one"
    largest = max(batches, key=lambda batch: count_rows(batch.data))
    return compare_two_samples(model, task, largest.data) if count_rows(largest.data) > 1 else ""


def find_batch_norm(model: nn.Module) -> str:
    """Return the name of the first batch norm in training mode; "" if the model has none."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            return name or type(module).__name__
    return ""


def compare_two_samples(model: nn.Module, task: Task, data: Any) -> str:
    """Return a message if the loss of two samples differs from the sum of their losses, as a contrastive loss does;
    else "".
    """
    count = count_rows(data)
    try:
        with evaluation_mode(model):
            first, other, both, again = (
                float(task.step(model, select_rows(data, *rows, count)).loss_sum)
                for rows in ((0, 1), (1, 2), (0, 2), (0, 2))
            )
    except (PluginError, MemoryError, RuntimeError) as error:
        return f"the task cannot compute single samples: {str(error).partition(chr(10))[0]}"
    tolerance = COUPLED * (abs(first) + abs(other) + abs(both))
    if abs(both - again) > tolerance or abs(both - first - other) <= tolerance:
        return ""  # drawn at random, so that nothing can be compared; or the sum that it should be
    return (
        f"the task's loss of two samples ({both:.4g}) is not the sum of their losses ({first:.4g} and {other:.4g}), "
        "so it depends on which samples come together"
    )


def describe_out_of_memory(error: Exception, free: Callable[[], float] | None = None) -> str:
    """Return the first line of an out-of-memory error; "" for any other error.

    free: returns the free fraction of the GPU's memory, for errors of cuDNN that do not name memory.
    """
    text = PREFIX.sub("", str(error).partition("\n")[0])
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(mark in text for mark in MARKS):
        return text.partition(". Including non-PyTorch memory")[0] or type(error).__name__
    if any(mark in text for mark in CUDNN_MARKS) and (free or read_free_fraction)() < FULL:
        return text
    return ""


def read_free_fraction() -> float:
    """Return the fraction of the current GPU's memory that is still available; 1 without a GPU."""
    if not torch.cuda.is_available():
        return 1.0
    free, total = torch.cuda.mem_get_info()
    return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / total


class BufferCopies:
    """Copies of the buffers that windows change. watches: whether `mark` has anything to copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.watches = True
        self._num_marks = 0
        self._never_finite: list[str] = []
        self._still: dict[str, tuple[Tensor, int]] = {}  # buffers, with the version of their contents
        self._copies: dict[
            str, tuple[Tensor, Tensor]
        ] = {}  # buffers that windows write into, and their contents
        self._lists: list[Lists] = []  # the same, copies first

    def mark(self) -> None:
        """Copy the changing buffers at the start of a window."""
        if self._num_marks < 2:
            self._num_marks += 1
            self._choose_copied_buffers(self._num_marks == 1)
            self.watches = self._num_marks == 1 or bool(self._copies)
        elif self._copies:
            self._update_copies()

    @torch.no_grad()
    def restore(self) -> str:
        """Restore the buffers from the copies. Return the reason if that is impossible, else ""."""
        for name, buffer in self.model.named_buffers():
            if self._is_unchanged(name, buffer):
                continue
            if name not in self._copies:
                return f"the model's buffer {name} was written into, which the first window did not do"
            restore_buffer(self.model, name, *self._copies[name])
        return ""

    @torch.no_grad()
    def repair_buffers(self) -> str:
        """Restore all buffers if one of them is not finite now. Return the reason if that is impossible, else "".

        Buffers that were never finite (a mask) are ignored.
        """
        poisoned = [name for name in list_non_finite_buffers(self.model) if name not in self._never_finite]
        for name in poisoned:
            if name not in self._copies or not has_finite_values(self._copies[name][1]):
                return f"the model's buffer {name} is not finite any more, and no copy of it from before is there"
        if poisoned:
            for name, (buffer, contents) in self._copies.items():
                restore_buffer(self.model, name, buffer, contents)
        return ""

    def _choose_copied_buffers(self, first: bool) -> None:
        """Copy all buffers before the first window; after a window, copy the buffers that it changed."""
        buffers = dict(self.model.named_buffers())
        if first:
            self._never_finite = list_non_finite_buffers(self.model)
            self._still = {name: (buffer, buffer._version) for name, buffer in buffers.items()}
            self._copy_buffers(buffers)
            return
        # by contents too: batch norm writes into its averages without a new version (torch 2.13)
        moved = [
            name
            for name, buffer in buffers.items()
            if not self._is_unchanged(name, buffer)
            or (buffer.layout is torch.strided and not torch.equal(buffer, self._copies[name][1]))
        ]
        self._still = {name: still for name, still in self._still.items() if name not in moved}
        self._copy_buffers(moved)

    def _is_unchanged(self, name: str, buffer: Tensor) -> bool:
        still = self._still.get(name)
        return still is not None and still[0] is buffer and still[1] == buffer._version

    def _copy_buffers(self, names: Iterable[str]) -> None:
        buffers = dict(self.model.named_buffers())
        self._copies = {name: (buffers[name], buffers[name].detach().clone()) for name in names}
        self._lists = group_by_type((copy, buffer) for buffer, copy in self._copies.values())

    @torch.no_grad()
    def _update_copies(self) -> None:
        """Update the copies in place. Make new ones if the model has replaced a buffer."""
        buffers = dict(self.model.named_buffers())
        for name, (buffer, copy) in self._copies.items():
            if buffers[name] is not buffer or buffer.shape != copy.shape:
                self._copy_buffers(list(self._copies))
                return
        for copies, sources in self._lists:
            copy_tensors(copies, sources)


def restore_buffer(model: nn.Module, name: str, buffer: Tensor, contents: Tensor) -> None:
    """Restore the contents of a buffer, and the tensor itself if the model has replaced it."""
    module, _, buffer_name = name.rpartition(".")
    buffer.copy_(contents)
    setattr(model.get_submodule(module), buffer_name, buffer)


def list_non_finite_buffers(model: nn.Module) -> list[str]:
    return [name for name, buffer in model.named_buffers() if not has_finite_values(buffer)]


def has_finite_values(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(read_stored_values(tensor).isfinite().all())


def read_stored_values(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the stored values of a sparse tensor."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
