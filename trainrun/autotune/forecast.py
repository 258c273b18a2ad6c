"""A rough upper bound of the memory of a step, printed at the start if a step could fill an eighth of the memory.

what: the bytes that autograd keeps for the backward pass of a small batch, multiplied up to a whole batch;
    gradients; and the state of the optimizer. Memory inside kernels is not included. If memory runs out
    nevertheless, the step is repeated with smaller micro-batches (`trainrun.training.recovery.oom`). Not on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD, Optimizer

from trainrun.data.split_batch import count_rows, list_tensors, select_rows
from trainrun.runtime.child_process import can_fork_safely
from trainrun.runtime.machine import read_free_bytes
from trainrun.training.components import Components
from trainrun.training.recovery.oom import read_stored_values
from trainrun.training.without_trace import read_first_batches, run_trial

Forecast = tuple[int, int, int]  # bytes: gradients, what the forward keeps, the optimizer's state
ROWS = 4  # of the small batch


def forecast(model: nn.Module, step: Callable[[Any], None], data: Any, optimizer: Optimizer) -> Forecast:
    """Return the bytes of a step. step: forward and backward of a batch, whose traces stay in the model."""
    count = count_rows(data)
    rows = select_rows(data, 0, min(ROWS, count), count)
    there = {
        read_storage_address(tensor)
        for tensor in [*model.parameters(), *model.buffers(), *list_tensors([data, rows])]
    }
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if read_storage_address(tensor) not in there:
            saved[read_storage_address(tensor)] = read_stored_values(tensor).untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        step(rows)
    numbers = 1 if isinstance(optimizer, SGD) else 2  # at most, for each weight
    state = sum(
        numbers * param.nbytes
        for group in optimizer.param_groups
        for param in group["params"]
        if not optimizer.state.get(param) and (numbers > 1 or group["momentum"])
    )
    gradients = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    return gradients, sum(saved.values()) * count // min(ROWS, count), state


def read_storage_address(tensor: Tensor) -> int:
    return read_stored_values(tensor).untyped_storage().data_ptr()


def memory_forecast(run: Components, rough: float) -> tuple[str, float]:
    """Return a line for the start of a run (empty if memory is certainly enough), and the estimated bytes still to
    come.

    rough: an upper bound of these bytes.
    """
    trainer, device = run.config.trainer, run.parallel.device
    free = read_free_bytes(device)
    if rough < free / 8 or trainer.compile.scope != "off":
        return "", rough
    reads = getattr(run.train, "may_be_read_before", True)
    if device.type != "cpu" or not can_fork_safely() or not reads:
        return "", rough

    def step(rows: Any) -> None:
        with run.precision.autocast():
            out = run.task.step(run.model, rows)
        run.precision.backward(out.loss_sum, 1.0)

    def measure() -> tuple[Forecast, int]:
        (data,) = read_first_batches(run.train)
        return forecast(run.model, step, data, run.optimizer), count_rows(data)

    try:
        sizes, rows = run_trial(measure, device)
    # Whatever a task of the user's cannot do with few samples is no fault of the run.
    except Exception as error:
        return f"memory: not forecast, {type(error).__name__}: {str(error).partition(chr(10))[0]}", rough
    return describe_memory(sizes, free, rows, trainer.accumulate_grad_batches), sum(sizes)


def describe_memory(forecast_bytes: Forecast, free: int, rows: int, accumulate: int) -> str:
    sizes = [f"{size / 1e9:.2g}" for size in (sum(forecast_bytes), *forecast_bytes, free)]
    line = "memory: a step adds about {} GB ({} gradients, {} activations, {} optimizer), ".format(*sizes)
    if sum(forecast_bytes) <= free:
        return f"{line}{sizes[-1]} GB are free"
    less = f"; the same training in less: data.batch_size={rows // 2} trainer.accumulate_grad_batches={accumulate * 2}"
    return f"{line}but only {sizes[-1]} GB are free{less if rows > 1 else ''}"
