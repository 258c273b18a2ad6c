"""Images that a task makes at a validation: check them and write them for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainrun.errors import PluginError

MOST_PICTURES = 25  # of one name


def save_pictures(file: Path, found: Any, name: str) -> None:
    """Save the images of a task. Raise PluginError for a value that is not an image."""
    from safetensors.torch import save_file

    if not isinstance(found, Mapping):
        raise PluginError(
            f"task: {name}.pictures: gave a {type(found).__name__}; it must be a dict of tensors"
        )
    tensors: dict[str, Tensor] = {}
    captions: dict[str, str] = {}
    for key, value in found.items():
        where = f"task: {name}.pictures: {key}"
        texts = None
        if isinstance(value, tuple) and len(value) == 2:
            value, texts = value
        tensors[str(key)] = convert_pictures(value, where)
        if texts is not None:
            captions[str(key)] = format_captions(texts, len(tensors[str(key)]), where)
    temporary = file.with_suffix(".tmp")
    save_file(tensors, temporary, metadata=captions)
    temporary.replace(file)


def format_captions(texts: Any, count: int, what: str) -> str:
    """Return the captions of `count` images as JSON. Raise PluginError if there are fewer."""
    if not isinstance(texts, list) or len(texts) < count:
        raise PluginError(f"{what} has no list of {count} captions; give a text for each picture")
    return json.dumps([str(text) for text in texts[:count]])


def convert_pictures(value: Any, what: str) -> Tensor:
    """Return images as uint8 (B, 1 or 3, H, W) on the host. Raise PluginError for another value."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if (
        not isinstance(value, Tensor)
        or value.ndim not in (3, 4)
        or value.shape[-3] not in (1, 3)
        or not value.numel()
    ):
        raise PluginError(
            f"{what} is {shape}; it must be a tensor (C, H, W) or (B, C, H, W) with 1 or 3 channels"
        )
    pictures = value.detach().reshape(-1, *value.shape[-3:])[:MOST_PICTURES]
    if pictures.is_floating_point():
        pictures = (pictures.float().nan_to_num(0.0).clamp(0, 1) * 255).round()
    return pictures.to("cpu", torch.uint8).contiguous()
