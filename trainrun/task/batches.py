"""The parts of a batch (inputs and target, from pairs or dicts), and the output tensor of a model.

A batch is a tuple or list `(inputs, target)`, or a dict with one key of each line:
    inputs: input, inputs, x, image, images, input_ids, pixel_values, input_values, input_features
    target: target, targets, y, label, labels, class
If several keys of one line are present, the first one in this order is used (`INPUT_KEYS` and `TARGET_KEYS` of
`trainrun.interfaces`).

A dict is passed by the argument names of the model's `forward`. The inputs are passed by their key if `forward` has
that argument, else by position. Every other field that is an argument is passed too (attention_mask, token_type_ids,
noise, ...; all fields if it takes **kwargs), except the target. A dict without an input key suits a model that names
each input (`forward(left, right)`). If the inputs of a pair are a dict, they are passed this way if `forward` has an
argument for each entry, else as they are. If they are a tuple, `((a, b), y)`, they are passed one by one if
`forward` needs several arguments or takes `*args`. Fields that padding adds to a pair (see
`trainrun.interfaces.batch_fields`) are passed by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainrun.errors import DataError, PluginError
from trainrun.interfaces import IGNORED, TARGET_KEYS, batch_fields, choose_input_key, choose_target_key
from trainrun.task.dict_batches import assign_arguments, describe_misfit
from trainrun.tensors import HALF_TYPES


def split_inputs_and_target(batch: Any) -> tuple[Any, Tensor]:
    """Return the inputs and the target of a batch. Raise DataError if it has another form or no target."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    inputs, target = split_inputs_and_optional_target(batch)
    if target is None:
        raise DataError(
            f"data: a batch is {describe_form(batch)}, without a target; "
            f"give (inputs, target), or a dict with {' | '.join(TARGET_KEYS)}"
        )
    if not isinstance(target, Tensor):
        kind = describe_form(target)
        if isinstance(target, (tuple, list)) and target:
            kind += f" ({type(target[0]).__name__})"
        raise DataError(
            f"data: the targets of a batch are {kind}, not a tensor; give numbers, or compute the loss in a task of "
            "your own: task=my_file.MyTask (see `trainrun help tasks`)"
        )
    return inputs, target


def split_inputs_and_optional_target(batch: Any) -> tuple[Any, Tensor | None]:
    """Return inputs and target of a batch; the target is None for a bare tensor or a dict without one."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return batch[0], batch[1] if len(batch) == 2 else None
    if isinstance(batch, Mapping):
        input_name, target = choose_input_key(batch), choose_target_key(batch)
        inputs = remove_target_fields(batch) if input_name is None else batch[input_name]
        if input_name is not None or inputs:
            return inputs, None if target is None else batch[target]
    raise DataError(
        f"data: a batch is {describe_form(batch)}; this task reads (inputs, target), ((a, b), target) for several "
        "inputs, "
        f"or a dict with {' | '.join(TARGET_KEYS)} and the inputs; or use a task of your own: task._target_=..."
    )


def remove_target_fields(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a batch whose names are not in TARGET_KEYS."""
    return {name: value for name, value in batch.items() if name not in TARGET_KEYS}


def run_model(model: nn.Module, inputs: Any, batch: Any, **more: Any) -> Any:
    """Return the model's output for a batch; fields of the batch are passed by the argument names of `forward`.

    Raise PluginError if rows hold several sequences and the model has no argument `segment_ids`, if the samples have
    another shape than the network was built for, or if `forward` needs a field that the batch lacks.
    """
    try:
        fields = batch_fields(batch)
        if not fields and isinstance(inputs, Tensor):
            return model(inputs, **more)
        args, named = assign_arguments(model, inputs, batch, fields)
        return model(*args, **named, **more)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if fault := describe_misfit(model, inputs, batch, error):
            raise PluginError(fault) from error
        raise


def extract_output_tensor(output: Any) -> Tensor:
    """Return the model's tensor: the output itself, its `logits` attribute, or its "logits" entry.

    16-bit values become float32, so that sums over many items keep their digits. Raise PluginError if there is no
    tensor.
    """
    if not isinstance(output, Tensor):
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            has_loss = isinstance(getattr(output, "loss", None), Tensor)
            raise PluginError(
                f"model: the output is {describe_form(output)}; the task needs a tensor, "
                'an object with .logits, or a dict with "logits"'
                + ("; for the loss that it has: task=model_loss" if has_loss else "")
            )
        return extract_output_tensor(logits)
    return output.float() if output.dtype in HALF_TYPES else output


def join_batches(columns: list[Tensor]) -> Tensor:
    """Concatenate the columns of several batches. Shorter rows are padded with -100, or NaN for floats."""
    widths = {column.shape[1:] for column in columns}
    if len(widths) > 1 and all(column.ndim >= 2 for column in columns):
        width = max(column.shape[1] for column in columns)
        fills = [float("nan") if column.is_floating_point() else IGNORED for column in columns]
        columns = [
            pad(column, (0, 0) * (column.ndim - 2) + (0, width - column.shape[1]), value=fill)
            for column, fill in zip(columns, fills, strict=True)
        ]
    return torch.cat(columns)


def describe_form(value: Any) -> str:
    """Describe the structure of a batch or an output in a few words, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, value)) or 'no keys'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} parts"
    return f"a {type(value).__name__}"


def build_dimension_error(output: Tensor, needed: str) -> PluginError:
    """Return the error for an output with too few dimensions in a batch that is not the first one."""
    return PluginError(
        f"model: the output has shape {tuple(output.shape)}, but the task needs {needed}. If a batch has one sample, "
        "squeeze() removes its dimension too: use .squeeze(-1), or leave out such a last batch with data.drop_last=true"
    )


def check_target_type(logits: Tensor, target: Tensor) -> None:
    if target.ndim == 1 and logits.shape[1:].numel() == 1:
        raise PluginError(
            f"model: the output has shape {tuple(logits.shape)}, one number per sample: use task=multilabel for two "
            "classes 0 and 1, task=regression for real numbers, or let the model return one number per class"
        )
    if target.is_floating_point() or target.is_complex():
        raise DataError(
            f"data: the targets are {target.dtype}, but task=classification needs integers; "
            "convert them, or choose task=regression"
        )
