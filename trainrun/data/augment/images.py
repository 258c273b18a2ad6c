"""The images and the targets inside a batch, and images as they lie in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainrun.data.tensor_dataset import TARGET_NAMES
from trainrun.errors import DataError

INPUT_NAMES = ("input", "inputs", "x", "image", "images")


def images_of(batch: Any) -> Tensor:
    """(B, C, H, W): the batch itself, the first element of a tuple or list, or one of a dict's known names.

    DataError, without the key: it has none.
    """
    inputs = batch
    if isinstance(batch, tuple | list):
        inputs = batch[0] if batch else None
    elif isinstance(batch, Mapping):
        inputs = next((batch[name] for name in INPUT_NAMES if name in batch), None)
    if isinstance(inputs, Tensor) and inputs.ndim == 4:
        return inputs
    found = f"have shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else "are no tensor"
    if isinstance(batch, Mapping) and inputs is None:
        found = f"are not under one of the names {', '.join(INPUT_NAMES)} (there are {', '.join(map(str, batch))})"
    raise DataError(
        f"needs images (B, C, H, W), but the inputs of this batch {found}; leave it out for other data"
    )


def with_images(batch: Any, images: Tensor) -> Any:
    """The same containers with other images; the batch itself is not changed."""
    return _replaced(batch, 0, INPUT_NAMES, images)


def target_of(batch: Any) -> Tensor:
    """DataError, without the key: the batch has none."""
    target = None
    if isinstance(batch, tuple | list) and len(batch) > 1:
        target = batch[1]
    elif isinstance(batch, Mapping):
        target = next((batch[name] for name in TARGET_NAMES if name in batch), None)
    if not isinstance(target, Tensor):
        raise DataError(
            "mixes targets too, but this batch has none; give (images, target), or a dict with "
            f"{' | '.join(TARGET_NAMES)}"
        )
    return target


def map_of(batch: Any, images: Tensor) -> Tensor | None:
    """The targets where they are pictures of the same height and width, (B, H, W) or (B, C, H, W): they move along."""
    if isinstance(batch, tuple | list):
        target = batch[1] if len(batch) > 1 else None
    else:
        target = (
            next((batch[name] for name in TARGET_NAMES if name in batch), None)
            if isinstance(batch, Mapping)
            else None
        )
    if not isinstance(target, Tensor) or target.ndim not in (3, 4):
        return None
    return target if target.shape[:1] + target.shape[-2:] == images.shape[:1] + images.shape[2:] else None


def with_both(batch: Any, images: Tensor, move: Callable[[Tensor], Tensor]) -> Any:
    """`move` of the images, and of a map of targets, channels or not."""
    target = map_of(batch, images)
    if target is not None:
        batch = with_target(
            batch, move(target if target.ndim == 4 else target[:, None]).reshape(target.shape)
        )
    return with_images(batch, move(images))


def with_target(batch: Any, target: Tensor) -> Any:
    return _replaced(batch, 1, TARGET_NAMES, target)


def _replaced(batch: Any, place: int, names: tuple[str, ...], tensor: Tensor) -> Any:
    if isinstance(batch, Tensor):
        return tensor
    if isinstance(batch, Mapping):
        clone: Any = copy.copy(batch)
        clone[next(name for name in names if name in batch)] = tensor
        return clone
    parts = [*batch[:place], tensor, *batch[place + 1 :]]
    if isinstance(batch, list):
        return parts
    return type(batch)._make(parts) if hasattr(batch, "_make") else tuple(parts)


def is_channels_last(images: Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)


def in_memory_order(images: Tensor) -> Tensor:
    """A contiguous tensor: (B, C, H, W), or (B, H, W, C) of images that are channels-last."""
    return images.permute(0, 2, 3, 1) if is_channels_last(images) else images.contiguous()


def like(images: Tensor, ordered: Tensor) -> Tensor:
    """What was made from `in_memory_order(images)`, as (B, C, H, W) again."""
    return ordered.permute(0, 3, 1, 2) if is_channels_last(images) else ordered


def rows_of(images: Tensor, positions: Tensor) -> Tensor:
    """images[positions], channels-last if they are."""
    return like(images, in_memory_order(images).index_select(0, positions))


def box(corners: Tensor, height: int, width: int) -> Tensor:
    """True inside, (B, 1, H, W). corners: (B, 4) int64, top, bottom, left, right; the second ones are outside."""
    y = torch.arange(height, device=corners.device)[:, None]
    x = torch.arange(width, device=corners.device)
    top, bottom, left, right = corners[:, :, None, None, None].unbind(1)
    return ((y >= top) & (y < bottom)) & ((x >= left) & (x < right))
