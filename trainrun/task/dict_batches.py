"""What a model gets of a batch that is a dict, by the names of its `forward`; samples that it was not built for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainrun.errors import PluginError
from trainrun.interfaces import TARGET_KEYS, input_key
from trainrun.user_code import is_of_torch

NOT_ITS = ("target_weight", "index")  # of the loss, and of a teacher: also not to a forward that takes any
OF_NO_LABELS = re.compile(r"NoneType|decoder_input")
OF_SHAPES = re.compile(
    r"shapes cannot be multiplied|size mismatch|to have \d+ channels|xpected \dD|Dimension out of range"
)


def bare_model(model: nn.Module) -> nn.Module:
    """Without what a backend wrapped around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def asked_for(
    model: nn.Module, inputs: Any, batch: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model gets of a dict: by position, and by name."""
    fields, taken, by_place = fields_of(model, batch)
    if "segment_ids" in batch and "segment_ids" not in taken:
        name = type(bare_model(model)).__name__
        raise PluginError(
            f"model: data.padding=pack puts several sequences into a row, and {name}.forward has no "
            "argument segment_ids to keep them apart (see trainrun.tensors.segment_mask); "
            "add one, or use data.padding=bucket"
        )
    own = input_key(batch) or ""
    asked = {key: value for key, value in fields.items() if key not in (*TARGET_KEYS, own)}
    if own in taken[2:] or not by_place:  # after self and the first
        return (), {own: inputs, **asked}
    return (inputs,), asked


def takes_each(model: nn.Module, fields: Mapping[str, Any]) -> bool:
    """Whether the model's forward takes every field by its name."""
    taken, *_ = fields_of(model, fields)
    return len(taken) == len(fields)


def fields_of(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...], bool]:
    """The fields of a batch that a model's forward takes by name, its arguments, and whether one goes by its place."""
    bare = bare_model(model)
    wrapped = getattr(bare, "get_base_model", None)  # of peft, which hands on what it gets
    taken, takes_all, by_place = keywords_of(type(wrapped() if callable(wrapped) else bare).forward)
    fields = {
        key: value for key, value in batch.items() if key in taken or (takes_all and key not in NOT_ITS)
    }
    return fields, taken, by_place


def misfit(model: nn.Module, inputs: Any, batch: Any, error: Exception) -> str:
    """What to say of an error of torch's that tells of shapes, where one of our networks gets other samples than it was
    built for."""
    model = bare_model(model)
    said = str(error)
    of_none = isinstance(error, AttributeError | TypeError | ValueError) and OF_NO_LABELS.search(said)
    if of_none and isinstance(batch, Mapping) and "labels" in batch and "decoder_input_ids" not in batch:
        taken, _, _ = keywords_of(type(model).forward)
        if {"labels", "decoder_input_ids"} <= set(taken):
            return (
                f"model: {type(model).__name__} failed without its labels, from which it makes decoder_input_ids "
                f"({type(error).__name__}: {said}); use its own loss, task=model_loss, or let the data give those"
            )
    if not type(model).__module__.startswith("trainrun.model.") or not isinstance(inputs, Tensor):
        return ""
    known = getattr(model, "tokens", None)
    if isinstance(error, ValueError) and said.startswith("context="):
        return f"model.{error}"
    if isinstance(known, nn.Embedding) and isinstance(error, IndexError):
        size = getattr(model, "nothing", known.num_embeddings)
        wrong = inputs[(inputs < 0) | (inputs >= size)]
        return f"model.vocab_size={size}: the data has token {int(wrong[0])}" if wrong.numel() else ""
    built_for, given = getattr(model, "in_shape", None), tuple(inputs.shape[1:])
    if built_for in (None, given) or not is_of_torch(error) or not OF_SHAPES.search(said):
        return ""
    said = said.splitlines()[0]
    return f"model.in_shape={list(built_for)}: a sample of the data has the shape {list(given)} ({said})"


@lru_cache(maxsize=16)
def keywords_of(forward: Callable[..., Any]) -> tuple[tuple[str, ...], bool, bool]:
    """The arguments that a `forward` names, whether it takes any others by keyword, and whether one by its place."""
    parameters = inspect.signature(forward).parameters.values()
    named = tuple(item.name for item in parameters if item.kind is not item.VAR_KEYWORD)
    by_keyword = [item for item in parameters if item.kind in (item.KEYWORD_ONLY, item.VAR_KEYWORD)]
    takes_all = any(item.kind is item.VAR_KEYWORD for item in by_keyword)
    return named, takes_all, len(parameters) - len(by_keyword) > 1  # the first is self
