"""A rough bound of the memory that a step takes, told before the first one for what could fill an eighth of the free
memory: two small batches with every tensor counted, extrapolated. Where memory runs out all the same, the step is done
again in smaller micro-batches (`mishaps.retry`). What a kernel takes for itself is no tensor, and missing."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from trainrun.data.choice import free_bytes
from trainrun.data.pieces import num_rows, rows_of, tensors_in
from trainrun.mishaps.retry import batch_norm_in
from trainrun.mishaps.window_start import put_back
from trainrun.parts import Parts
from trainrun.randomness import kept_random_state

Forecast = tuple[int, int, int]  # bytes: gradients, activations at the peak, the optimizer's state


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages made inside that are alive; `moments` has the sum after each operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler to keep it away from this class

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[int] = []
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in tensors_in(list(args))}
        found = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tensors_in([found])):
            if id(storage) not in given and id(storage) not in self._sizes:
                self._sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, id(storage)).atexit = False
        self.moments.append(sum(self._sizes.values()))
        return found


def forecast(model: nn.Module, step: Callable[[Any], None], data: Any, optimizer: Optimizer,
             accumulate: bool) -> Forecast:  # fmt: skip
    """step: forward and backward of a batch. Model and random states are as before, its gradients are None."""
    count = num_rows(data)
    sizes = (2, 4) if count >= 8 else (1, 2) if count > 2 and not batch_norm_in(model) else (count, count)
    lines = []
    for size in (sizes[0], *sizes):  # the first of all makes what is kept for later, as workspaces
        kept = [(name, buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()]
        try:
            with kept_random_state(), Live() as live:
                for _ in range(1 + accumulate):
                    step(rows_of(data, 0, size, count))
        finally:
            model.zero_grad(set_to_none=True)
            for name, buffer, contents in kept:
                put_back(model, name, buffer, contents)
        lines.append(live.moments)
    if len(lines[1]) != len(lines[2]):  # other operations for other sizes
        lines = [[max(line)] for line in lines]
    ahead = (count - sizes[0]) / max(sizes[1] - sizes[0], 1)
    peak = int(max(a + (b - a) * ahead for a, b in zip(*lines[1:], strict=True)))
    gradients = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    numbers = 1 if isinstance(optimizer, SGD) else 2  # at most, for each weight
    state = sum(
        numbers * param.nbytes
        for group in optimizer.param_groups
        for param in group["params"]
        if not optimizer.state.get(param) and (numbers > 1 or group["momentum"])
    )
    return gradients, max(peak - gradients, 0), state


def rough_guess(parts: Parts) -> float:
    """An upper bound for ordinary networks, in bytes, from sizes alone."""
    params = sum(param.numel() for param in parts.model.parameters())
    numbers = parts.config.data.batch_size * math.prod(parts.data_facts.shape or (1024,))
    return 16.0 * params + 4.0 * numbers * max(1000, params / 64)


def memory_forecast(parts: Parts) -> tuple[str, float]:
    """The line for the start of a run, "" if memory is certainly enough; and how many bytes are to come, at most."""
    trainer, rough, free = parts.config.trainer, rough_guess(parts), free_bytes(parts.parallel.device)
    if rough < free / 8 or trainer.compile.scope != "off" or trainer.optimizer_in_backward:
        return "", rough

    def step(rows: Any) -> None:
        with parts.precision.autocast():
            task = copy.deepcopy(parts.task)  # as new: what it looks at once is counted too
            out = task.step(parts.model, rows)
        parts.precision.backward(out.loss_sum, 1.0)

    batches, again = parts.train.epoch(0), trainer.accumulate_grad_batches
    try:
        data = next(batches).data
        found = forecast(parts.model, step, data, parts.optimizer, again > 1)
    except (
        Exception
    ) as error:  # whatever a task of the user's cannot do with two samples is no fault of the run
        return f"memory: not forecast, {type(error).__name__}: {str(error).partition(chr(10))[0]}", rough
    finally:
        getattr(batches, "close", int)()  # a stream that is no generator has nothing to close
    return told(found, free, num_rows(data), again), sum(found)


def told(found: Forecast, free: int, rows: int, accumulate: int) -> str:
    sizes = [f"{size / 1e9:.2g}" for size in (sum(found), *found, free)]
    line = "memory: a step adds about {} GB ({} gradients, {} activations, {} optimizer), ".format(*sizes)
    if sum(found) <= free:
        return f"{line}{sizes[-1]} GB are free"
    less = f"; the same training in less: data.batch_size={rows // 2} trainer.accumulate_grad_batches={accumulate * 2}"
    return f"{line}but only {sizes[-1]} GB are free{less if rows > 1 else ''}"
