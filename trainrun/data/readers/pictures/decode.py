"""From the bytes of a JPEG or PNG file to a tensor (C, H, W), with Pillow, which releases the GIL meanwhile.

A picture stands as its EXIF orientation says, as viewers show it (torchvision's reader ignores that).
Transparency is dropped, palettes become RGB, 16-bit grey keeps its upper 8 bits.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from trainrun.errors import DataError

ORIENTATION = 0x0112  # the EXIF tag
TURNS = dict(enumerate(map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), start=2))  # EXIF orientations 2 to 8
MODES = {1: "L", 3: "RGB"}
Array = np.ndarray[Any, Any]
FAULTS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class Form:
    """How pictures come out.

    shape: (C, H, W), 1 channel for grey, 3 for RGB; None is RGB in the size of the file.
    fit: what is done where the sides are in another proportion: "crop" the middle, or "stretch".
    dtype: "uint8" from 0 to 255, or "float32" from 0 to 1.
    draft: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that is at least twice the size
        wanted: several times faster, and pixels differ by little from those of the whole picture.
    """

    shape: tuple[int, int, int] | None = None
    fit: str = "crop"
    dtype: str = "uint8"
    draft: bool = True

    def decode(self, content: bytes) -> Tensor:
        """The tensor (C, H, W). One of FAULTS: the picture is damaged."""
        return self.scaled(self.pixels(content))

    def pixels(self, content: bytes, into: Array | None = None) -> Tensor:
        """As `decode`, but uint8 for now; written to `into`, an array of the wanted shape, where there is one."""
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as opened:
            orientation = orientation_of(opened)
            picture = self._sized(opened, lies=orientation in range(5, 9))
        turn = TURNS.get(orientation)
        return pixels_of(picture if turn is None else picture.transpose(turn), into)

    def scaled(self, pixels: Tensor) -> Tensor:
        """Pixels of one picture, or of many, in the type that is wanted."""
        return pixels if self.dtype == "uint8" else pixels.to(torch.float32).div_(255)

    def _sized(self, opened: Image.Image, lies: bool) -> Image.Image:
        """In the wanted mode and size, but not turned yet."""
        if self.shape is None:
            return in_mode(opened, "RGB")
        channels, height, width = self.shape
        size = (height, width) if lies else (width, height)
        if self.draft:
            opened.draft(None, least_size(opened.size, size, self.fit))
        picture = in_mode(opened, MODES[channels])
        if picture.size == size:
            return picture
        if self.fit == "crop":
            return ImageOps.fit(picture, size, Image.Resampling.BILINEAR)
        return picture.resize(size, Image.Resampling.BILINEAR)


def form_of(shape: Sequence[int] | None, fit: str, dtype: str, draft: bool) -> Form:
    """DataError: no shape of a picture."""
    if shape is not None and (len(shape) != 3 or shape[0] not in MODES or min(shape) < 1):
        raise DataError(
            f"data.shape={list(shape)}: of pictures it is [3,height,width], or [1,height,width] for grey"
        )
    return Form(None if shape is None else (shape[0], shape[1], shape[2]), fit, dtype, draft)


def orientation_of(opened: Image.Image) -> int:
    """1 to 8; 1 (as stored) where nothing is said, or nothing legible."""
    if "exif" not in opened.info:  # asking Pillow would decode the whole of a PNG file first
        return 1
    try:
        return int(opened.getexif().get(ORIENTATION, 1))
    except (SyntaxError, ValueError, TypeError, KeyError, struct.error, OSError):
        return 1  # the pixels of a file with a broken note of its camera are as good as any


def in_mode(picture: Image.Image, mode: str) -> Image.Image:
    """The picture loaded, as "L" or "RGB"."""
    if picture.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion would clip at 255
        wide = np.asarray(picture).astype(np.int32)
        picture = Image.fromarray((wide >> 8).clip(0, 255).astype(np.uint8))
    if picture.mode != mode:
        return picture.convert(mode)
    picture.load()
    return picture


def pixels_of(picture: Image.Image, into: Array | None = None) -> Tensor:
    """(C, H, W) uint8, of a picture in mode "L" or "RGB"."""
    width, height = picture.size
    channels = 1 if picture.mode == "L" else 3
    lines = np.frombuffer(picture.tobytes("raw", "L" if channels == 1 else "RGB;L"), np.uint8)
    pixels = lines.reshape(height, channels, width).transpose(
        1, 0, 2
    )  # RGB;L: line by line, colour by colour
    if into is None:
        return torch.from_numpy(pixels.copy())
    into[...] = pixels
    return torch.from_numpy(into)


def least_size(size: tuple[int, int], wanted: tuple[int, int], fit: str) -> tuple[int, int]:
    """What a faster decode must not fall below: twice what will be left of the whole picture."""
    if fit == "stretch":
        return 2 * wanted[0], 2 * wanted[1]
    scale = max(wanted[0] / size[0], wanted[1] / size[1])
    return -int(-2 * scale * size[0] // 1), -int(-2 * scale * size[1] // 1)


def fault_of(error: BaseException) -> str:
    """What Pillow said, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return "not a JPEG or PNG picture, or damaged at its beginning"
    return f"damaged or cut short ({str(error) or type(error).__name__})"


def decoded(content: bytes, form: Form, where: Any, into: Array | None = None) -> Tensor:
    """As `Form.decode`, or as `Form.pixels` `into`. DataError: the picture is damaged. where: `() -> str` names it."""
    try:
        return form.decode(content) if into is None else form.pixels(content, into)
    except FAULTS as error:
        raise DataError(f"{where()}: {fault_of(error)}") from error
