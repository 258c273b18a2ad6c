"""The output of one layer of a model for a batch: by default the inputs of the last linear layer."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.errors import ConfigError, DataError
from trainrun.interfaces import batch_fields, convert_batch_to_dict
from trainrun.task.batches import describe_form, run_model, split_inputs_and_optional_target
from trainrun.tensors import HALF_TYPES


class LayerOutput:
    """A model in evaluation mode that returns the output of one of its layers.

    layer: a name of `model.named_modules()`; None for the inputs of the last linear layer. Raises ConfigError if the
        model has no such layer.
    """

    def __init__(self, model: nn.Module, layer: str | None) -> None:
        self._model = model.eval()
        self._found: list[Any] = []
        if layer is None:
            linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            if not linear:
                raise ConfigError(
                    f"embed: {type(model).__name__} has no linear layer; name one with --layer NAME"
                )
            self.name = f"the input of {linear[-1]}"
            model.get_submodule(linear[-1]).register_forward_pre_hook(
                lambda _, given: self._found.append(given[0])
            )
            return
        modules = dict(model.named_modules())
        if not layer or layer not in modules:
            near = difflib.get_close_matches(layer, modules, n=3, cutoff=0)
            raise ConfigError(f"--layer {layer}: no such layer; near it: {', '.join(filter(None, near))}")
        self.name = f"the output of {layer}"
        modules[layer].register_forward_hook(lambda *facts: self._found.append(facts[2]))

    @torch.no_grad()
    def compute(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output of the layer (B, ...) and the targets, on the host.

        Raise ConfigError or DataError if the layer does not return one row per sample.
        """
        inputs, target = split_inputs_and_optional_target(batch)
        if isinstance(noise := batch_fields(batch).get("noise"), Tensor):  # of a VAE: the mean of its code
            batch = {**convert_batch_to_dict(batch), "noise": torch.zeros_like(noise)}
        self._found.clear()
        run_model(self._model, inputs, batch)
        if len(self._found) != 1:
            raise ConfigError(
                f"--layer: {self.name} comes {len(self._found)} times in one forward; name a layer that runs once"
            )
        output = self._found.pop()
        rows = len(inputs) if isinstance(inputs, Tensor) else len(target) if target is not None else None
        if not isinstance(output, Tensor) or output.ndim < 2 or len(output) != rows:
            raise ConfigError(
                f"--layer: {self.name} is {describe_form(output)}, not a tensor with a row for each of {rows} "
                "samples; name "
                "another layer"
            )
        if output.ndim > 2 and not _has_no_padding(batch):
            raise DataError(
                f"--layer: {self.name} has shape {tuple(output.shape)}, and the sequences of a batch differ in length; "
                "name a layer that gives one row for a whole sequence"
            )
        output = output.float() if output.dtype in HALF_TYPES else output
        return output.cpu(), None if target is None else target.cpu()


def _has_no_padding(batch: Any) -> bool:
    mask = batch_fields(batch).get("attention_mask")
    return mask is None or bool(mask.all())
