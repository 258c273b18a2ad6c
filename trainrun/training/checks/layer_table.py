"""The table of layers of `--summary`: name, class, output shape and parameters, recorded in the first step.

what: forward hooks on the layers, removed after the first step; they read outputs and change nothing. when not: with
    `trainer.compile` or CUDA graphs there are no shapes: a hook would be compiled too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from trainrun.interfaces import MicroBatch, StepReport
from trainrun.training.components import Components, Step

DEEPEST = 3  # levels of names, as body.0.conv
MOST_LAYERS = 200


class LayerTableStep:
    """A step that writes a row `layers` after its first call, which the screen and the report show."""

    def __init__(self, step: Step, sees_shapes: bool) -> None:
        self.inner, self._sees_shapes, self._done = step, sees_shapes, False

    def __call__(self, run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        if self._done:
            return self.inner(run, micro_batches)
        self._done = True
        shapes: dict[str, str] = {}
        layers = dict(iterate_shown_layers(run.model))
        handles = [
            layer.register_forward_hook(build_shape_hook(shapes, name))
            for name, layer in layers.items()
            if self._sees_shapes
        ]
        try:
            report = self.inner(run, micro_batches)
        finally:
            for handle in handles:
                handle.remove()
        run.monitors.write_row(
            "layers", run.monitors.step, {"layers": build_layer_rows(run.model, layers, shapes)}
        )
        return report


def iterate_shown_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and layer in their order, down to the third level and up to MOST_LAYERS."""
    named = ((name, layer) for name, layer in model.named_modules() if name and name.count(".") < DEEPEST)
    for number, (name, layer) in enumerate(named):
        if number == MOST_LAYERS:
            return
        yield name, layer


def build_shape_hook(shapes: dict[str, str], name: str) -> Any:
    """Return a forward hook that stores the shape of the first output."""

    def store_shape(layer: nn.Module, inputs: Any, output: Any) -> None:
        shapes.setdefault(name, format_shapes(output))

    return store_shape


def format_shapes(output: Any) -> str:
    """Return a shape as `32 x 10`; for several tensors one after the other; "" for other values."""
    if isinstance(output, Tensor):
        return " x ".join(map(str, output.shape))
    if isinstance(output, (tuple, list)):
        return ", ".join(filter(None, map(format_shapes, output)))
    return ""


def build_layer_rows(
    model: nn.Module, layers: dict[str, nn.Module], shapes: dict[str, str]
) -> list[dict[str, Any]]:
    """Return a row for each layer and one for the whole model. A shared parameter counts in each layer that has it."""
    rows = [
        {
            "layer": name, "class": type(layer).__name__, "output": shapes.get(name, ""),
            "parameters": sum(parameter.numel() for parameter in layer.parameters()),
        }
        for name, layer in layers.items()
    ]  # fmt: skip
    total = sum(parameter.numel() for parameter in model.parameters())
    return [*rows, {"layer": "all", "class": type(model).__name__, "output": "", "parameters": total}]
