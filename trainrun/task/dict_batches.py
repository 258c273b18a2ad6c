"""Pass the fields of a batch to a model by the arguments of its `forward`; explain samples that it was not built
for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainrun.errors import PluginError
from trainrun.interfaces import INPUT_KEYS, TARGET_KEYS, choose_input_key
from trainrun.user_code import is_raised_by_torch

NOT_ITS = ("target_weight", "index")  # of the loss, and of a teacher: also not to a forward that takes any
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
OF_NO_LABELS = re.compile(r"NoneType|decoder_input")
MISSING_ARGUMENT = re.compile(r"^([\w.<>]+)\.forward\(\) missing \d+ required [\w -]+ arguments?: (.+)$")
OF_SHAPES = re.compile(
    r"shapes cannot be multiplied|size mismatch|to have \d+ channels|xpected \dD|Dimension out of range"
)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model without the wrapper of DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def assign_arguments(
    model: nn.Module, inputs: Any, batch: Any, fields: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments for a model. fields: of the batch, see `batch_fields`."""
    if isinstance(batch, Mapping):
        return select_dict_arguments(model, inputs, batch)
    if not fields or (isinstance(inputs, Mapping) and not takes_every_field(model, inputs)):
        return split_positional_inputs(model, inputs), {}
    if isinstance(inputs, Mapping):
        input_name = choose_input_key(fields)
        return select_dict_arguments(model, fields[input_name] if input_name else inputs, fields)
    args, named = select_dict_arguments(model, inputs, {"inputs": inputs, **fields})
    return (split_positional_inputs(model, inputs) if args else args), named


def split_positional_inputs(model: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """Return the items of a tuple or list as arguments if the model's forward needs several, or takes any number."""
    if isinstance(inputs, tuple | list) and takes_several_inputs(find_forward(model)):
        return tuple(inputs)
    return (inputs,)


def select_dict_arguments(
    model: nn.Module, inputs: Any, batch: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the fields of a dict that a model takes, as positional and named arguments. Raise PluginError if it
    cannot.
    """
    fields, wanted, by_place = select_fields(model, batch)
    if "segment_ids" in batch and "segment_ids" not in wanted:
        name = type(unwrap_model(model)).__name__
        raise PluginError(
            f"model: data.padding=pack puts several sequences into a row, and {name}.forward has no "
            "argument segment_ids to keep them apart (see trainrun.tensors.segment_mask); "
            "add one, or use data.padding=bucket"
        )
    input_name = choose_input_key(batch)
    other_fields = {key: value for key, value in fields.items() if key not in (*TARGET_KEYS, input_name)}
    if input_name is None:
        return _assign_named_inputs(model, inputs, other_fields)
    if input_name in wanted[2:] or not by_place:  # after self and the first
        return (), {input_name: inputs, **other_fields}
    return (inputs,), other_fields


def _assign_named_inputs(
    model: nn.Module, inputs: Mapping[str, Any], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model for a dict in which no field has a usual input name.

    named: the fields that are arguments of `forward`. Raise PluginError if the fields cannot be assigned.
    """
    if named:
        return (), named
    if len(inputs) == 1:  # there is nothing to choose from
        return tuple(inputs.values()), {}
    names, *_ = inspect_forward(find_forward(model))
    raise PluginError(
        f"model: {type(unwrap_model(model)).__name__}.forward has the arguments {', '.join(names[1:]) or 'none'}, "
        f"but a batch has {', '.join(map(str, inputs))}; give both the same names, or call the field of the inputs "
        f"{INPUT_KEYS[0]!r}"
    )


def takes_every_field(model: nn.Module, fields: Mapping[str, Any]) -> bool:
    """Return whether the model's forward has an argument for every field."""
    names, *_ = select_fields(model, fields)
    return len(names) == len(fields)


def select_fields(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], bool]:
    """Return the fields that `forward` takes by name, its argument names, and whether it has a positional argument."""
    names, takes_all, by_place = inspect_forward(find_forward(model))
    fields = {
        key: value for key, value in batch.items() if key in names or (takes_all and key not in NOT_ITS)
    }
    return fields, names, by_place


def find_forward(model: nn.Module) -> Callable[..., Any]:
    """Return the `forward` function whose signature decides what the model gets."""
    bare = unwrap_model(model)
    wrapped = getattr(bare, "get_base_model", None)  # of peft, which hands on what it gets
    return type(wrapped() if callable(wrapped) else bare).forward


def describe_misfit(model: nn.Module, inputs: Any, batch: Any, error: Exception) -> str:
    """Return a message for an error of torch that comes from samples of the wrong shape, or from missing labels;
    else "".
    """
    model = unwrap_model(model)
    message = str(error)
    of_none = isinstance(error, AttributeError | TypeError | ValueError) and OF_NO_LABELS.search(message)
    if of_none and isinstance(batch, Mapping) and "labels" in batch and "decoder_input_ids" not in batch:
        argument_names, _, _ = inspect_forward(type(model).forward)
        if {"labels", "decoder_input_ids"} <= set(argument_names):
            return (
                f"model: {type(model).__name__} failed without its labels, which it needs for decoder_input_ids "
                f"({type(error).__name__}: {message}); use its own loss, task=model_loss, or add decoder_input_ids to "
                "the data"
            )
    missing = MISSING_ARGUMENT.search(message) if isinstance(error, TypeError) else None
    if missing and missing[1] in (
        type(model).__name__,
        type(model).__qualname__,
    ):  # Python 3.10 has the short one
        present = (
            f"the inputs {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else "other inputs"
        )
        return (
            f"model: {type(model).__name__}.forward also needs {missing[2]}, but a batch has {present}. Give the data "
            "fields of these names, or ((a, b), target) with as many inputs as forward needs"
        )
    if not type(model).__module__.startswith("trainrun.model.") or not isinstance(inputs, Tensor):
        return ""
    tokens = getattr(model, "tokens", None)
    if isinstance(error, ValueError) and message.startswith("context="):
        return f"model.{error}"
    if isinstance(tokens, nn.Embedding) and isinstance(error, IndexError):
        size = getattr(model, "nothing", tokens.num_embeddings)
        wrong = inputs[(inputs < 0) | (inputs >= size)]
        return f"model.vocab_size={size}: the data has token {int(wrong[0])}" if wrong.numel() else ""
    built_for, input_shape = getattr(model, "in_shape", None), tuple(inputs.shape[1:])
    if built_for in (None, input_shape) or not is_raised_by_torch(error) or not OF_SHAPES.search(message):
        return ""
    message = message.splitlines()[0]
    return f"model.in_shape={list(built_for)}: a sample of the data has the shape {list(input_shape)} ({message})"


@lru_cache(maxsize=16)
def takes_several_inputs(forward: Callable[..., Any]) -> bool:
    """Return whether a `forward` needs more than one positional argument, or takes any number."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
    needed = [item for item in parameters if item.default is item.empty and item.kind in BY_POSITION]
    return len(needed) > 1 or any(item.kind is item.VAR_POSITIONAL for item in parameters)


@lru_cache(maxsize=16)
def inspect_forward(forward: Callable[..., Any]) -> tuple[tuple[str, ...], bool, bool]:
    """Return the argument names of a `forward`, whether it has `**kwargs`, and whether it has a positional argument."""
    parameters = inspect.signature(forward).parameters.values()
    named = tuple(item.name for item in parameters if item.kind is not item.VAR_KEYWORD)
    by_keyword = [item for item in parameters if item.kind in (item.KEYWORD_ONLY, item.VAR_KEYWORD)]
    takes_all = any(item.kind is item.VAR_KEYWORD for item in by_keyword)
    return named, takes_all, len(parameters) - len(by_keyword) > 1  # the first is self
