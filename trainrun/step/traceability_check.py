"""What a graph would not notice: forward passes that change Python's own state.

A trace keeps the path of the one forward pass it saw. A counter in an attribute, or a choice drawn from
Python's or NumPy's random numbers, would be frozen without a word, so two passes are compared before.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import nn

from trainrun.errors import PluginError
from trainrun.training.checks.task_watch import changed, values_of
from trainrun.training.components import Components
from trainrun.training.without_trace import snapshot

PLAIN = (bool, int, float, str, type(None))


def rehearse(run: Components, batch: Any) -> None:
    """Forward and loss twice, leaving no trace: buffers and random numbers are as before.

    The first pass also runs the checks that a task makes on its first batch. Raises PluginError.
    """
    with torch.no_grad(), snapshot(run.model):
        _forward(run, batch)
        before = (_attributes(run.model), _python_draws())
        kept = values_of(run.task, run.model)
        _forward(run, batch)
        after = (_attributes(run.model), _python_draws())
        moved = changed(kept, values_of(run.task, run.model))
    owner = run.model
    fault = "draws from Python's or NumPy's random numbers" if before[1] != after[1] else ""
    for name, value in after[0].items():
        if before[0].get(name, value) != value:
            fault = f"changes its Python attribute {name}"
    if moved:
        owner, fault = run.task, f"changes its attribute {moved[0]}"  # type: ignore[assignment]
    if fault:
        raise PluginError(
            f"trainer.compile.scope=step: {type(owner).__name__} {fault} as it runs, which a graph would "
            "freeze; keep it in a tensor (register_buffer), or use trainer.compile.scope=model"
        )


def _forward(run: Components, batch: Any) -> None:
    with run.precision.autocast():
        run.task.step(run.model, batch)


def _attributes(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, PLAIN)
    }


def _python_draws() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), name, keys.tobytes(), *rest
