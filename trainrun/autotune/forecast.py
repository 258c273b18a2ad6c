"""A rough bound of the memory that a step takes, for the first lines of a run that could fill an eighth of it.

what: a small batch with all that autograd keeps for the backward counted, times the rows of a whole one; gradients; the
    optimizer's state. What kernels take for themselves is missing. Where memory runs out all the same, the step is done
    again in smaller micro-batches (`trainrun.training.recovery.oom`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD, Optimizer

from trainrun.data.split_batch import num_rows, rows_of, tensors_in
from trainrun.runtime.machine import free_bytes
from trainrun.training.components import Components
from trainrun.training.recovery.step_snapshot import numbers_in

Forecast = tuple[int, int, int]  # bytes: gradients, what the forward keeps, the optimizer's state
ROWS = 4  # of the small batch


def forecast(model: nn.Module, step: Callable[[Any], None], data: Any, optimizer: Optimizer) -> Forecast:
    """step: forward and backward of a batch. Model and random states are as before, its gradients are None."""
    count = num_rows(data)
    rows = rows_of(data, 0, min(ROWS, count), count)
    from trainrun.training.without_trace import snapshot

    there = {
        start_of(tensor) for tensor in [*model.parameters(), *model.buffers(), *tensors_in([data, rows])]
    }
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if start_of(tensor) not in there:
            kept[start_of(tensor)] = numbers_in(tensor).untyped_storage().nbytes()
        return tensor

    try:
        with snapshot(model), saved_tensors_hooks(keep, lambda tensor: tensor):
            step(rows)
    finally:
        model.zero_grad(set_to_none=True)
    numbers = 1 if isinstance(optimizer, SGD) else 2  # at most, for each weight
    state = sum(
        numbers * param.nbytes
        for group in optimizer.param_groups
        for param in group["params"]
        if not optimizer.state.get(param) and (numbers > 1 or group["momentum"])
    )
    gradients = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    return gradients, sum(kept.values()) * count // min(ROWS, count), state


def start_of(tensor: Tensor) -> int:
    return numbers_in(tensor).untyped_storage().data_ptr()


def memory_forecast(run: Components, rough: float) -> tuple[str, float]:
    """The line for the start of a run, "" if memory is certainly enough; and how many bytes are to come, about.

    rough: an upper bound of those.
    """
    trainer, free = run.config.trainer, free_bytes(run.parallel.device)
    if rough < free / 8 or trainer.compile.scope != "off" or trainer.optimizer_in_backward:
        return "", rough

    def step(rows: Any) -> None:
        with run.precision.autocast():
            out = copy.deepcopy(run.task).step(
                run.model, rows
            )  # as new: what it looks at once is counted too
        run.precision.backward(out.loss_sum, 1.0)

    from trainrun.training.without_trace import first_batches

    try:
        (data,) = first_batches(run.train)
        found = forecast(run.model, step, data, run.optimizer)
    # Whatever a task of the user's cannot do with few samples is no fault of the run.
    except Exception as error:
        return f"memory: not forecast, {type(error).__name__}: {str(error).partition(chr(10))[0]}", rough
    return described_memory(found, free, num_rows(data), trainer.accumulate_grad_batches), sum(found)


def described_memory(found: Forecast, free: int, rows: int, accumulate: int) -> str:
    sizes = [f"{size / 1e9:.2g}" for size in (sum(found), *found, free)]
    line = "memory: a step adds about {} GB ({} gradients, {} activations, {} optimizer), ".format(*sizes)
    if sum(found) <= free:
        return f"{line}{sizes[-1]} GB are free"
    less = f"; the same training in less: data.batch_size={rows // 2} trainer.accumulate_grad_batches={accumulate * 2}"
    return f"{line}but only {sizes[-1]} GB are free{less if rows > 1 else ''}"
