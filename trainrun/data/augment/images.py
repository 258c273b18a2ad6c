"""Find and replace the images and the targets of a batch, and handle the memory layout of images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainrun.errors import DataError
from trainrun.interfaces import INPUT_KEYS, TARGET_KEYS, choose_input_key, choose_target_key


def get_images(batch: Any) -> Tensor:
    """Return the images (B, C, H, W): the batch itself, the first element of a tuple or list, or a field of a dict.

    Raise DataError if the batch has no images. The caller adds the setting to the message.
    """
    place = find_images_key(batch)
    inputs = batch if isinstance(batch, Tensor) else None if place is None else batch[place]
    if isinstance(inputs, Tensor) and inputs.ndim == 4:
        return inputs
    problem = f"have shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else "are no tensor"
    if isinstance(batch, Mapping) and inputs is None:
        problem = (
            f"are not under one of the names {', '.join(INPUT_KEYS)} (there are {', '.join(map(str, batch))})"
        )
    raise DataError(
        f"needs images (B, C, H, W), but the inputs of this batch {problem}; leave it out for other data"
    )


def find_images_key(batch: Any) -> Any:
    """Return the key of the images in a batch: 0, or a field. None: there are no images, or the batch itself is the
    images.

    If a dict has several inputs (pixel_values beside input_ids), those with the shape of images are chosen.
    """
    if isinstance(batch, Mapping):
        pictures = [key for key in batch if isinstance(batch[key], Tensor) and batch[key].ndim == 4]
        return choose_input_key(pictures) or choose_input_key(batch)
    return 0 if isinstance(batch, tuple | list) and batch else None


def replace_images(batch: Any, images: Tensor) -> Any:
    """Return the batch in the same containers with other images. The batch itself is not changed."""
    return _replace_part(batch, find_images_key(batch), images)


def find_target_key(batch: Any) -> Any:
    """Return the key of the target in a batch: 1, or the field that the loss uses too. None: there is no target."""
    if isinstance(batch, Mapping):
        return choose_target_key(batch)
    return 1 if isinstance(batch, tuple | list) and len(batch) > 1 else None


def get_target(batch: Any) -> Tensor:
    """Return the targets of a batch. Raise DataError if it has none or several. The caller adds the setting to the
    message.
    """
    if isinstance(batch, Mapping) and len(several := [key for key in TARGET_KEYS if key in batch]) > 1:
        raise DataError(
            f"mixes the target, and this batch has {len(several)} possible target fields: {', '.join(several)}; "
            f"remove or rename all but one (the loss reads {several[0]})"
        )
    place = find_target_key(batch)
    target = None if place is None else batch[place]
    if not isinstance(target, Tensor):
        raise DataError(
            "mixes targets too, but this batch has none; give (images, target), or a dict with "
            f"{' | '.join(TARGET_KEYS)}"
        )
    return target


def get_target_map(batch: Any, images: Tensor) -> Tensor | None:
    """Return targets that are pictures of the same height and width, (B, H, W) or (B, C, H, W); else None."""
    place = find_target_key(batch)
    target = None if place is None else batch[place]
    if not isinstance(target, Tensor) or target.ndim not in (3, 4):
        return None
    return target if target.shape[:1] + target.shape[-2:] == images.shape[:1] + images.shape[2:] else None


def change_images_and_map(batch: Any, images: Tensor, move: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the images of a batch, and to a target that is a map, with or without channels."""
    target = get_target_map(batch, images)
    if target is not None:
        batch = replace_target(
            batch, move(target if target.ndim == 4 else target[:, None]).reshape(target.shape)
        )
    return replace_images(batch, move(images))


def replace_target(batch: Any, target: Tensor) -> Any:
    return _replace_part(batch, find_target_key(batch), target)


def _replace_part(batch: Any, place: Any, tensor: Tensor) -> Any:
    if isinstance(batch, Tensor):
        return tensor
    if isinstance(batch, Mapping):
        clone: Any = copy.copy(batch)
        clone[place] = tensor
        return clone
    parts = [*batch[:place], tensor, *batch[place + 1 :]]
    if isinstance(batch, list):
        return parts
    return type(batch)._make(parts) if hasattr(batch, "_make") else tuple(parts)


def is_channels_last(images: Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)


def make_contiguous(images: Tensor) -> Tensor:
    """Return the images as a contiguous tensor: (B, C, H, W), or (B, H, W, C) if they are channels-last."""
    return images.permute(0, 2, 3, 1) if is_channels_last(images) else images.contiguous()


def restore_layout(images: Tensor, ordered: Tensor) -> Tensor:
    """Return a result computed from `make_contiguous(images)` as (B, C, H, W)."""
    return ordered.permute(0, 3, 1, 2) if is_channels_last(images) else ordered


def select_images(images: Tensor, positions: Tensor) -> Tensor:
    """Return images[positions], channels-last if the images are."""
    return restore_layout(images, make_contiguous(images).index_select(0, positions))


def build_box_mask(corners: Tensor, height: int, width: int) -> Tensor:
    """Return a mask (B, 1, H, W), True inside the box. corners: (B, 4) int64: top, bottom, left, right.

    bottom and right are the first row and column outside of the box.
    """
    y = torch.arange(height, device=corners.device)[:, None]
    x = torch.arange(width, device=corners.device)
    top, bottom, left, right = corners[:, :, None, None, None].unbind(1)
    return ((y >= top) & (y < bottom)) & ((x >= left) & (x < right))
