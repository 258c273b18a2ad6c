"""A call whose activations are forgotten after the forward and computed again in the backward.

The mechanism is that of `torch.utils.checkpoint` with use_reentrant=False: hooks on what autograd saves.
That function is not used because it loads torch's compiler (1 s and 80 MB in torch 2.13, on a CPU more
than it saves in a small network), and because it lets a block change its buffers twice, as batch norm its
running statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Recompute:
    """Called as the forward of a block is.

    Exact: random numbers, autocast and buffers are in the second run as they were in the first, and what
    the second run does to buffers is undone. RuntimeError: what it needs was changed in place.
    modules: whose parameters and buffers the forward uses. contexts: two for every call, entered around
    the first and the second run.
    """

    def __init__(
        self, forward: Callable[..., Any], modules: list[nn.Module], contexts: Contexts | None = None
    ) -> None:
        self._forward = forward
        self._modules = modules
        self._contexts = contexts or _no_contexts
        self.used = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.used = True
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        first, second = self._contexts()
        call = _Call(lambda: self._forward(*args, **kwargs), second)
        return call.run(first, [*tensors_in([args, kwargs])], self._modules)


class _Call:
    """One call of a block: what it was called with, and after the second run what autograd asks for."""

    def __init__(self, forward: Callable[[], Any], second: AbstractContextManager[Any]) -> None:
        self._forward = forward
        self._second = second
        self._needed: list[tuple[Tensor, int]] = []
        self._as_before: list[Callable[[], AbstractContextManager[Any]]] = []
        self._num_saved = 0
        self._found: dict[int, tuple[Tensor, int]] = {}

    def run(self, first: AbstractContextManager[Any], inputs: list[Tensor], modules: list[nn.Module]) -> Any:
        needed = [*inputs, *(parameter for module in modules for parameter in module.parameters())]
        self._needed = [(tensor, tensor._version) for tensor in needed]
        # some may lie on the host: lengths, weights that wait there
        devices = {tensor.device for tensor in needed}
        kinds = {device.type for device in devices}
        self._as_before = [kept_random(devices), *(kept_autocast(kind) for kind in sorted(kinds))]
        snapshot = Buffers(modules)
        with saved_tensors_hooks(self._number, self._unpack), first:
            output = self._forward()
        self._check_unchanged()
        snapshot.drop_unchanged()
        self._as_before.append(snapshot.put_back)
        return output

    def _number(self, _tensor: Tensor) -> int:
        self._num_saved += 1
        return self._num_saved - 1

    def _unpack(self, number: int) -> Tensor:
        if number not in self._found:
            self._run_again()
        tensor, version = self._found.pop(number)
        if tensor._version != version:
            raise RuntimeError(
                "trainer.gradient_checkpointing: a block changes a tensor in place that its backward needs"
            )
        return tensor

    def _run_again(self) -> None:
        self._check_unchanged()
        self._found.clear()
        count = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal count
            kept = tensor.detach()
            self._found[count] = kept, kept._version
            count += 1
            if count == self._num_saved:
                raise _Enough
            return kept

        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(_Enough))
            for as_before in self._as_before:
                stack.enter_context(as_before())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, _itself))
            stack.enter_context(self._second)
            self._forward()
        if count != self._num_saved:
            raise RuntimeError(
                f"trainer.gradient_checkpointing: a block saved {self._num_saved} tensors for its backward, and "
                f"{count} when it ran again; it must do the same both times, or be left as it is "
                "(trainer.gradient_checkpointing=none)"
            )

    def _check_unchanged(self) -> None:
        if any(tensor._version != version for tensor, version in self._needed):
            raise RuntimeError(
                "trainer.gradient_checkpointing: an input or a weight of a block was changed in place (as by "
                "nn.ReLU(inplace=True), or by +=), and the backward computes the block again from it; change "
                "it out of place, or use trainer.gradient_checkpointing=none"
            )


class _Enough(BaseException):
    """The second run has what it is for. No Exception, so that a block does not catch it."""


class Buffers:
    """The buffers of some modules as they are now."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._rows = [
            (module, name, buffer, buffer._version, buffer.detach().clone())
            for outer in modules
            for module in outer.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def drop_unchanged(self) -> None:
        """Forgets those that are still the same: a mask may be large. Batch norm's kernels count no version."""
        self._rows = [
            row
            for row in self._rows
            if isinstance(row[0], _NormBase)
            or row[0]._buffers[row[1]] is not row[2]
            or row[2]._version != row[3]
        ]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, copies of the old buffers take their places."""
        now = [module._buffers[name] for module, name, *_ in self._rows]
        try:
            for module, name, _, _, old in self._rows:
                module._buffers[name] = old.clone()
            yield
        finally:
            for (module, name, *_), buffer in zip(self._rows, now, strict=True):
                module._buffers[name] = buffer


def kept_random(devices: Iterable[torch.device]) -> Callable[[], AbstractContextManager[None]]:
    """A context in which torch's random numbers are those that come next now, and go on as if unused after it."""
    states: list[tuple[Callable[[], Tensor], Callable[[Tensor], None], Tensor]] = [
        (torch.get_rng_state, torch.set_rng_state, torch.get_rng_state())
    ]
    for device in devices:
        if device.type == "cuda":
            get, put = (
                partial(torch.cuda.get_rng_state, device),
                partial(torch.cuda.set_rng_state, device=device),
            )
            states.append((get, put, get()))

    @contextlib.contextmanager
    def as_before() -> Iterator[None]:
        now = [get() for get, _, _ in states]
        try:
            for _, put, then in states:
                put(then)
            yield
        finally:
            for (_, put, _), state in zip(states, now, strict=True):
                put(state)

    return as_before


def kept_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context that autocasts as is done now."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype, enabled, cache)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Those inside lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)


def _no_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _itself(tensor: Tensor) -> Tensor:
    return tensor
