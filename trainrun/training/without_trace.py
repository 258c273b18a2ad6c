"""Run the user's model and task for a trial without lasting effects on the run.

what: `run_trial` runs the work on the objects of the run themselves. On a CPU it does so in a forked child process
    that is discarded. If no fork is possible (after CUDA was started), everything that the work can change is copied
    before and restored afterwards: the memory of tensors, gradients, optimizer state, random states, and all
    attributes of model, task and hooks.
when: before user code is used by the run itself. `trainrun.training.recovery.oom` restores much less, because it
    runs in every step. when not: user functions that change global variables of their module, if no fork is
    possible.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from trainrun.interfaces import Batches, MicroBatch
from trainrun.runtime.child_process import LIMIT_SECONDS, can_fork_safely, run_in_child
from trainrun.runtime.machine import read_free_bytes
from trainrun.seeding import restore_random_state

T = TypeVar("T")

MOST_OBJECTS: Final = 200_000
PLAIN: Final = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    torch.dtype,
    torch.device,
)


class TrialNotPossible(Exception):
    """The exception for a trial whose effects could not be undone."""


def read_first_batches(batches: Batches, count: int = 1, epoch: int = 0, start: int = 0) -> list[Any]:
    """Return the data of `count` batches from `start` on. Close the files that were opened to read them."""
    opened = batches.epoch(epoch, start)
    try:
        return [batch.data for batch in islice(opened, count)]
    finally:
        getattr(opened, "close", lambda: None)()


def iterate_endlessly(batches: Batches, place: list[int]) -> Generator[MicroBatch]:
    """Yield batches endlessly, starting at `place` (epoch, number of the batch), which is updated."""
    while True:
        epoch, start = place
        epoch_batches = batches.epoch(epoch, start)
        try:
            for number, batch in enumerate(epoch_batches, start + 1):
                place[:] = (epoch + 1, 0) if batch.last else (epoch, number)
                yield batch
        finally:
            getattr(epoch_batches, "close", lambda: None)()
        place[:] = epoch + 1, 0


def run_trial(
    work: Callable[[], T], device: torch.device, *owners: Any, limit_seconds: float = LIMIT_SECONDS
) -> T:
    """Run `work` without lasting effects and return its plain result.

    owners: the objects that the work may change if it cannot run in a child process. limit_seconds: of the child.
        Raises the errors of the work, ChildError for a child that died or is late, and TrialNotPossible.
    """
    if any(is_sharded(owner) for owner in owners):
        raise TrialNotPossible("the ranks exchange weights in each forward")
    if device.type == "cpu" and can_fork_safely():
        return run_in_child(functools.partial(_run_without_ranks, work), limit_seconds)
    with restore_state(owners, device):
        return work()


def is_sharded(owner: Any) -> bool:
    """Return whether an object is a model whose parameters are parts of tensors."""
    return isinstance(owner, nn.Module) and any(
        type(param) not in (Tensor, nn.Parameter) and hasattr(param, "placements")
        for param in owner.parameters()
    )


def _run_without_ranks(work: Callable[[], T]) -> T:
    """Run the work as the only rank: a forked process cannot exchange anything with other ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.GroupMember.WORLD = None
    return work()


@contextmanager
def restore_state(owners: Iterable[Any], device: torch.device) -> Iterator[None]:
    """Restore everything that the owners hold, and the random states of this process, at the end of the block.

    Raise TrialNotPossible if the device's memory does not suffice for a copy.
    """
    record = _StateRecord()
    record.record_objects(owners)
    if 2 * record.num_bytes > read_free_bytes(device):
        raise TrialNotPossible("the model fills the memory")
    record.copy_memory()
    with restore_random_state():
        try:
            yield
        finally:
            record.restore_all_values()


class _StateRecord:
    """A record of what objects hold: the memory of their tensors, and the contents of their containers and
    attributes.

    Objects are kept by reference, so that each stays the same object.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def record_objects(self, owners: Iterable[Any]) -> None:
        """Record everything that can be reached from the owners."""
        waiting = list(owners)
        while waiting:
            value = waiting.pop()
            if isinstance(value, PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if len(self._seen) > MOST_OBJECTS:
                raise TrialNotPossible("model and task hold too many objects")
            waiting.extend(self._record_value(value))

    def copy_memory(self) -> None:
        for storage in self._storages.values():
            contents = storage.clone()  # type: ignore[no-untyped-call]
            self._undo.append(functools.partial(storage.copy_, contents))

    def restore_all_values(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _record_value(self, value: Any) -> Iterable[Any]:
        """Record how to restore the value. Return the objects that it holds."""
        if isinstance(value, Tensor):
            return self._record_tensor(value)
        if isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
            return ()
        if isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
            return ()
        if type(value).__module__.partition(".")[0] == "numpy":
            return self._record_numpy(value)
        held = [*self._record_container(value), *self._record_function(value), *self._record_slots(value)]
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            held.append(attributes)
        return held

    def _record_tensor(self, tensor: Tensor) -> Iterable[Any]:
        if tensor.layout is torch.strided and not tensor.is_meta and not nn.parameter.is_lazy(tensor):
            storage = tensor.untyped_storage()
            self._storages.setdefault(storage.data_ptr(), storage)
        gradient = tensor.grad if tensor.is_leaf else None
        memory = tensor.detach()

        def restore_tensor() -> None:
            if tensor.is_leaf:
                tensor.grad = gradient
            if type(tensor) in (Tensor, nn.Parameter) and tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory

        self._undo.append(restore_tensor)
        return [gradient, vars(tensor)]

    def _record_numpy(self, value: Any) -> Iterable[Any]:
        generator = getattr(value, "bit_generator", None)
        if generator is not None:
            self._undo.append(functools.partial(setattr, generator, "state", generator.state))
        elif hasattr(value, "set_state"):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif hasattr(value, "flags") and value.flags.writeable:
            self._undo.append(functools.partial(value.__setitem__, ..., value.copy()))
        return ()

    def _record_container(self, value: Any) -> Iterable[Any]:
        if isinstance(value, tuple | frozenset):
            return value
        if not isinstance(value, dict | list | set | deque | bytearray):
            return ()
        contents = value.copy()

        def refill() -> None:
            value.clear()
            add: Any = value.update if isinstance(value, dict | set) else value.extend
            add(contents)

        self._undo.append(refill)
        return contents.values() if isinstance(contents, dict) else contents

    def _record_function(self, value: Any) -> Iterable[Any]:
        """Record how to restore a closure cell. Return the objects that a function, method or partial refers to."""
        if isinstance(value, types.CellType):
            try:
                contents = value.cell_contents
            except ValueError:  # not filled yet
                return ()
            self._undo.append(functools.partial(setattr, value, "cell_contents", contents))
            return [contents]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        return value.__closure__ or () if isinstance(value, types.FunctionType) else ()

    def _record_slots(self, value: Any) -> Iterable[Any]:
        held = []
        classes = [cls for cls in type(value).__mro__ if "__slots__" in vars(cls)]
        for member in (class_member for cls in classes for class_member in vars(cls).values()):
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, member.__name__):
                contents = member.__get__(value)
                self._undo.append(functools.partial(member.__set__, value, contents))
                held.append(contents)
        return held
