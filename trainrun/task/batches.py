"""What is in a batch: inputs and target, from pairs or from dicts; and what a model gives back.

A batch is a tuple or list `(inputs, target)`, or a dict with one key of each line:
    inputs: input, inputs, x, image, images, input_ids, pixel_values, input_values, input_features
    target: target, targets, y, label, labels

A dict is passed by the names of the model's `forward`: the inputs by their key where it names that, else by position,
and every other field that it names (attention_mask, token_type_ids, noise, ...), but for the target.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from trainrun.errors import DataError, PluginError, is_of_torch

INPUT_KEYS = (
    "input", "inputs", "x", "image", "images", "input_ids", "pixel_values", "input_values", "input_features",
)  # fmt: skip
TARGET_KEYS = ("target", "targets", "y", "label", "labels")
MODEL_KEYS = (  # also to a forward that takes any
    "attention_mask", "segment_ids", "position_ids", "noise", "word_dropout",
)  # fmt: skip
IGNORED = -100  # torch's ignore_index
OF_SHAPES = re.compile(
    r"shapes cannot be multiplied|size mismatch|to have \d+ channels|xpected \dD|Dimension out of range"
)
HALF_TYPES = (torch.float16, torch.bfloat16)


def inputs_and_target(batch: Any) -> tuple[Any, Tensor]:
    """Both halves of a batch. DataError: it has another form."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    inputs, target = inputs_and_maybe_target(batch)
    if target is None:
        raise DataError(
            f"data: a batch is {form_of(batch)}, without a target; "
            f"give (inputs, target), or a dict with {' | '.join(TARGET_KEYS)}"
        )
    if not isinstance(target, Tensor):
        kind = form_of(target)
        if isinstance(target, (tuple, list)) and target:
            kind += f" ({type(target[0]).__name__})"
        raise DataError(f"data: the targets of a batch are {kind}, not a tensor; give numbers")
    return inputs, target


def inputs_and_maybe_target(batch: Any) -> tuple[Any, Tensor | None]:
    """The same for predictions, where the data may come without targets: a bare tensor, or one key."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return batch[0], batch[1] if len(batch) == 2 else None
    if isinstance(batch, Mapping):
        inputs = next((batch[key] for key in INPUT_KEYS if key in batch), None)
        if inputs is not None:
            return inputs, next((batch[key] for key in TARGET_KEYS if key in batch), None)
    raise DataError(
        f"data: a batch is {form_of(batch)}; this task reads (inputs, target), or a dict with "
        f"{' | '.join(INPUT_KEYS)} and {' | '.join(TARGET_KEYS)}; or name your own task: task._target_=..."
    )


def bare_model(model: nn.Module) -> nn.Module:
    """Without what a backend wrapped around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def run_model(model: nn.Module, inputs: Any, batch: Any, **more: Any) -> Any:
    """The model's output for a batch; of a dict it gets what its `forward` names.

    PluginError: rows hold several sequences, and the model does not ask for `segment_ids`; the samples have not
        the shape that a network of ours was built for.
    """
    try:
        if not isinstance(batch, Mapping):
            return model(inputs, **more)
        args, asked = _asked_for(model, inputs, batch)
        return model(*args, **asked, **more)
    except (IndexError, RuntimeError, ValueError) as error:
        if fault := _misfit(bare_model(model), inputs, error):
            raise PluginError(fault) from error
        raise


def _asked_for(
    model: nn.Module, inputs: Any, batch: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bare = bare_model(model)
    taken, takes_all = keywords_of(bare.__class__.forward)
    if "segment_ids" in batch and "segment_ids" not in taken:
        raise PluginError(
            f"model: data.padding=pack puts several sequences into a row, and {type(bare).__name__}.forward has no "
            "argument segment_ids to keep them apart (see trainrun.data.sequences.collate.segment_mask); "
            "add one, or use data.padding=bucket"
        )
    own = next((key for key in INPUT_KEYS if key in batch), "")
    asked = {
        key: value
        for key, value in batch.items()
        if key not in (*TARGET_KEYS, own) and (key in taken or (takes_all and key in MODEL_KEYS))
    }
    if own in taken[2:]:  # after self and the first
        return (), {own: inputs, **asked}
    return (inputs,), asked


def _misfit(model: nn.Module, inputs: Any, error: Exception) -> str:
    """What to say of an error of torch's that tells of shapes, where one of our networks gets other samples than it was
    built for."""
    if not type(model).__module__.startswith("trainrun.model.") or not isinstance(inputs, Tensor):
        return ""
    known = getattr(model, "tokens", None)
    if isinstance(error, ValueError) and str(error).startswith("context="):
        return f"model.{error}"
    if isinstance(known, nn.Embedding) and isinstance(error, IndexError):
        size = getattr(model, "nothing", known.num_embeddings)
        wrong = inputs[(inputs < 0) | (inputs >= size)]
        return f"model.vocab_size={size}: the data has token {int(wrong[0])}" if wrong.numel() else ""
    built_for, given = getattr(model, "in_shape", None), tuple(inputs.shape[1:])
    if built_for in (None, given) or not is_of_torch(error) or not OF_SHAPES.search(str(error)):
        return ""
    said = str(error).splitlines()[0]
    return f"model.in_shape={list(built_for)}: a sample of the data has the shape {list(given)} ({said})"


@lru_cache(maxsize=16)
def keywords_of(forward: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The arguments that a `forward` names, and whether it takes any others by keyword."""
    parameters = inspect.signature(forward).parameters.values()
    named = tuple(item.name for item in parameters if item.kind is not item.VAR_KEYWORD)
    return named, any(item.kind is item.VAR_KEYWORD for item in parameters)


def output_tensor(output: Any) -> Tensor:
    """The model's tensor: the output itself, its `logits` attribute, or its "logits" entry.

    Numbers of 16 bits become float32, so that sums over many items keep their digits.
    PluginError: none of these.
    """
    if not isinstance(output, Tensor):
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if not isinstance(found, Tensor):
            own = isinstance(getattr(output, "loss", None), Tensor)
            raise PluginError(
                f"model: the output is {form_of(output)}; the task needs a tensor, "
                'an object with .logits, or a dict with "logits"'
                + ("; for the loss that it has: task=model_loss" if own else "")
            )
        return output_tensor(found)
    return output.float() if output.dtype in HALF_TYPES else output


def joined(columns: list[Tensor]) -> Tensor:
    """Columns of several batches, one under the other; shorter rows end with -100, or NaN among floats."""
    widths = {column.shape[1:] for column in columns}
    if len(widths) > 1 and all(column.ndim >= 2 for column in columns):
        width = max(column.shape[1] for column in columns)
        fills = [float("nan") if column.is_floating_point() else IGNORED for column in columns]
        columns = [
            pad(column, (0, 0) * (column.ndim - 2) + (0, width - column.shape[1]), value=fill)
            for column, fill in zip(columns, fills, strict=True)
        ]
    return torch.cat(columns)


def form_of(value: Any) -> str:
    """A few words on the structure of a batch or an output, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, value)) or 'no keys'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} parts"
    return f"a {type(value).__name__}"


def check_target_type(target: Tensor) -> None:
    if target.is_floating_point() or target.is_complex():
        raise DataError(
            f"data: the targets are {target.dtype}, but task=classification needs integers; "
            "convert them, or choose task=regression"
        )
