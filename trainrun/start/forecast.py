"""How much memory a step will take, told before the first one.

what: forward and backward of one and of two samples (or two and four), with every tensor counted when it is
    made and when it goes. Each moment is a line through its two sizes; the peak is the highest of these
    lines at the batch that the run will have. The optimizer's state is counted on a tensor of 67 numbers.
when: whatever could fill an eighth of the free memory by a rough rule; smaller runs are not looked at.
when not: a compiled model; a model that works otherwise on fewer samples. What a kernel takes for itself
    (a convolution's workspace) is no tensor, and missing, but for the LSTM's (`forecast_kernels`).
source: torch.distributed._tools.mem_tracker counts storages in the same way.
gain: none in speed. Predicted against measured peaks: scripts/bench_memory.py.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from trainrun.data.choice import free_bytes
from trainrun.data.pieces import num_rows, rows_of, tensors_in
from trainrun.eager import plain_step
from trainrun.interfaces import StepOutput, Task
from trainrun.mishaps.retry import batch_norm_in
from trainrun.mishaps.window_start import put_back
from trainrun.parts import Parts
from trainrun.randomness import kept_random_state
from trainrun.start.forecast_kernels import inside

PROBE = 67  # numbers; no other tensor of an optimizer's state is likely to have as many
NOT_SMALL = 1 / 8  # of the free memory
SPREAD = 1000  # activations for one number of a batch, at least; a rough upper bound


@dataclass(frozen=True)
class Forecast:
    """In bytes, of what the first steps add: gradients and activations at their peak, the optimizer's state.

    update: the largest that the update adds to gradients and state.
    """

    gradients: int
    activations: int
    state: int
    update: int

    @property
    def coming(self) -> int:
        return self.state + max(self.gradients + self.activations, self.gradients + self.update)


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages made inside that are alive; `moments` has the sum after each operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler to keep it away from this class

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[int] = []
        self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in tensors_in(list(args))} if _views(func) else set()
        results = found if isinstance(found, (list, tuple)) else [found]
        for tensor in tensors_in(results):
            self._count(tensor.untyped_storage(), given)
        kernel = inside(func, args, results)
        if kernel is not None:
            self._resize(kernel.workspace.untyped_storage(), kernel.written)
        self.moments.append(self._now + (kernel.beside if kernel is not None else 0))
        return found

    def _count(self, storage: Any, given: set[int]) -> None:
        key = id(storage)
        if key in given or key in self._known:
            return

        def gone(_: Any) -> None:
            self._now -= self._sizes.pop(key)
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()

    def _resize(self, storage: Any, size: int) -> None:
        """Counts so much of it, and not all; nothing of what was there before."""
        key = id(storage)
        if key in self._sizes:
            size = min(size, storage.nbytes())
            self._now += size - self._sizes[key]
            self._sizes[key] = size


def _views(func: Any) -> bool:
    """Whether what it returns may lie in what it was given."""
    return any(value.alias_info is not None for value in func._schema.returns)


def forecast(model: nn.Module, step: Callable[[Any], None], data: Any, optimizer: Optimizer,
             accumulate: bool) -> Forecast:  # fmt: skip
    """step: forward and backward of a batch. Model and random states are as before, its gradients are None."""
    count = num_rows(data)
    sizes = (2, 4) if count >= 8 else (1, 2) if count > 2 and not batch_norm_in(model) else (count,)

    def moments(size: int) -> list[int]:
        with left_alone(model), Live() as live:
            for _ in range(1 + accumulate):
                step(rows_of(data, 0, size, count))
        found: list[int] = live.moments
        return found

    moments(sizes[0])  # the first of all makes what is kept for later: shares of the loss, workspaces
    timelines = [moments(size) for size in sizes]
    if len({len(timeline) for timeline in timelines}) > 1:  # other operations: only large batches can tell
        sizes = (count // 4, count // 2)
        timelines = [[max(moments(size))] for size in sizes]
    peak = extrapolated(timelines, sizes, count)
    gradients = sum(
        param.numel() * param.element_size() for param in model.parameters() if param.requires_grad
    )
    state, update = update_bytes(optimizer)
    return Forecast(gradients, max(peak - gradients, 0), state, update)


def extrapolated(timelines: list[list[int]], sizes: tuple[int, ...], count: int) -> int:
    """The peak for `count` samples, moment by moment."""
    if len(timelines) == 1:
        return max(timelines[0])
    first, second = timelines
    ahead = (count - sizes[0]) / (sizes[1] - sizes[0])
    return int(max(a + (b - a) * ahead for a, b in zip(first, second, strict=True)))


def update_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """What the state will take beside what is there, and the rest of the update at its peak."""
    state = update = 0.0
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if not optimizer.state.get(param)]
        for kind in {(param.dtype, param.ndim, param.device) for param in params}:
            dtype, ndim, device = kind
            probe = nn.Parameter(torch.zeros([PROBE] + [1] * (max(ndim, 1) - 1), dtype=dtype, device=device))
            build: Callable[..., Optimizer] = type(optimizer)
            twin = build([{**group, "params": [probe]}])
            probe.grad = torch.ones_like(probe)
            with Live() as live:
                plain_step(twin)()
            kept = sum(
                value.numel() * value.element_size()
                for value in twin.state[probe].values()
                if isinstance(value, Tensor) and value.numel() == PROBE
            )
            share = sum(p.numel() for p in params if (p.dtype, p.ndim, p.device) == kind) / PROBE
            state += kept * share
            if group.get("foreach"):  # all tensors at once; else one after the other
                update += max(max(live.moments) - kept, 0) * share
    return int(state), int(update)


@contextlib.contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """Buffers and random states are as before at the end, and there are no gradients."""
    kept = [(name, buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()]
    try:
        with kept_random_state():
            yield
    finally:
        for name, buffer, contents in kept:
            put_back(model, name, buffer, contents)
        for param in model.parameters():
            param.grad = None


def rough_guess(parts: Parts) -> float:
    """An upper bound for ordinary networks, in bytes, from sizes alone."""
    params = sum(param.numel() for param in parts.model.parameters())
    numbers = parts.config.data.batch_size * math.prod(parts.data_facts.shape or (1024,))
    return 16.0 * params + 4.0 * numbers * max(SPREAD, params / 64)


def memory_forecast(parts: Parts) -> tuple[str, float]:
    """For the first lines of a run: what a step will take and what is free, "" where it is certainly enough; and how
    many bytes are to come, at most."""
    device = parts.parallel.device
    free = free_bytes(device)
    trainer, rough = parts.config.trainer, rough_guess(parts)
    if rough < NOT_SMALL * free or trainer.compile.scope != "off":
        return "", rough
    if trainer.optimizer_in_backward:  # a trial would update the weights
        return "", rough
    batches = parts.train.epoch(0)
    try:
        data = next(batches).data

        def step(rows: Any) -> None:
            task: Task = copy.deepcopy(parts.task)  # each time as new: what it looks at once is counted too
            with parts.precision.autocast():
                out: StepOutput = task.step(parts.model, rows)
            parts.precision.backward(out.loss_sum, 1.0)

        found = forecast(
            parts.model, step, data, parts.optimizer, parts.config.trainer.accumulate_grad_batches > 1
        )
    # Whatever a task of the user's cannot do with two samples is no fault of the run.
    except Exception as error:
        return f"memory: not forecast, {type(error).__name__}: {str(error).partition(chr(10))[0]}", rough
    finally:
        with contextlib.suppress(AttributeError):  # a stream that is no generator has nothing to close
            batches.close()  # type: ignore[attr-defined]
    line = told(found, free, num_rows(data), parts.config.trainer.accumulate_grad_batches)
    return line, found.coming


def told(found: Forecast, free: int, rows: int, accumulate: int) -> str:
    parts = f"{found.gradients / 1e9:.2g} gradients, {found.activations / 1e9:.2g} activations"
    line = (
        f"memory: a step adds about {found.coming / 1e9:.2g} GB ({parts}, {found.state / 1e9:.2g} optimizer)"
    )
    if found.coming <= free:
        return f"{line}, {free / 1e9:.2g} GB are free"
    line += f", but only {free / 1e9:.2g} GB are free"
    less = f"data.batch_size={rows // 2} trainer.accumulate_grad_batches={accumulate * 2}"
    return f"{line}; the same training in less: {less}" if rows > 1 else line
