"""Decode a JPEG or PNG file to a tensor (C, H, W), with Pillow, which releases the GIL while it decodes.

The EXIF orientation is applied, as viewers do (torchvision's reader ignores it). Transparency is dropped, and
palettes become RGB. PNG files of 16 bits per channel keep all bits as float32 (value / 65535). As uint8 they keep the
upper 8 bits, and a note says so once.
"""

from __future__ import annotations

import io
import logging
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from trainrun.errors import DataError

LOG = logging.getLogger(__name__)
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
ORIENTATION = 0x0112  # the EXIF tag
TURNS = dict(enumerate(map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), start=2))  # EXIF orientations 2 to 8
MODES = {1: "L", 3: "RGB"}
Array = np.ndarray[Any, Any]
FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    KeyError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class PictureForm:
    """Shape and type of decoded pictures.

    shape: (C, H, W) with 1 channel for grey or 3 for RGB. None: RGB in the size of the file.
    fit: for sides in another proportion: "crop" the middle, or "stretch".
    dtype: "uint8" from 0 to 255, or "float32" from 0 to 1.
    only_bytes: the bytes will be scaled to 0..1 later. So a picture of 16 bits is refused, because it would lose half
        of them.
    draft: whether a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that is at least twice the requested size. This
        is several times as fast, and pixels differ slightly.
    """

    shape: tuple[int, int, int] | None = None
    fit: str = "crop"
    dtype: str = "uint8"
    draft: bool = True
    only_bytes: bool = False

    def decode(self, content: bytes) -> Tensor:
        """Decode a picture to (C, H, W) in the requested type. Raise one of FAULTS if it is damaged."""
        if self.dtype == "float32" and has_16_bits(content):
            return self._decode_16_bits(content)
        return self.scale(self.decode_pixels(content))

    def decode_pixels(self, content: bytes, into: Array | None = None) -> Tensor:
        """Decode a picture to (C, H, W) uint8. into: an array of this shape that receives the pixels, or None."""
        if has_16_bits(content):
            warn_about_16_bits()
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as opened:
            orientation = read_orientation(opened)
            picture = self._resize_upright(opened, lies=orientation in range(5, 9))
        turn = TURNS.get(orientation)
        return copy_pixels(picture if turn is None else picture.transpose(turn), into)

    def scale(self, pixels: Tensor) -> Tensor:
        """Convert pixels of one picture, or of many, to the requested type and range."""
        return pixels if self.dtype == "uint8" else pixels.to(torch.float32).div_(255)

    def _resize_upright(self, opened: Image.Image, lies: bool) -> Image.Image:
        """Return a picture in the requested mode and size, before it is turned upright.

        lies: whether the file stores the picture turned by 90 degrees.
        """
        if self.shape is None:
            return convert_to_mode(opened, "RGB")
        channels, height, width = self.shape
        size = (height, width) if lies else (width, height)
        if self.draft:
            opened.draft(None, compute_draft_size(opened.size, size, self.fit))
        return self._resize(convert_to_mode(opened, MODES[channels]), size)

    def _resize(self, picture: Image.Image, size: tuple[int, int]) -> Image.Image:
        if picture.size == size:
            return picture
        if self.fit == "crop":
            return ImageOps.fit(picture, size, Image.Resampling.BILINEAR)
        return picture.resize(size, Image.Resampling.BILINEAR)

    def _decode_16_bits(self, content: bytes) -> Tensor:
        """Decode a PNG file of 16 bits per channel to (C, H, W) float32."""
        with Image.open(io.BytesIO(content), formats=("PNG",)) as opened:
            turn = TURNS.get(read_orientation(opened))
        num_channels = 3 if self.shape is None else self.shape[0]
        planes = []
        for values in select_channels(decode_16_bits(content), num_channels):
            plane = Image.fromarray(values)
            if turn is not None:
                plane = plane.transpose(turn)
            if self.shape is not None:
                plane = self._resize(plane, (self.shape[2], self.shape[1]))
            planes.append(torch.from_numpy(np.array(plane)))
        return torch.stack(planes).div_(65535)


def build_form(shape: Sequence[int] | None, fit: str, dtype: str, draft: bool) -> PictureForm:
    """Return how pictures are decoded. Raise DataError if `shape` is not the shape of a picture."""
    if shape is not None and (len(shape) != 3 or shape[0] not in MODES or min(shape) < 1):
        raise DataError(
            f"data.shape={list(shape)}: of pictures it is [3,height,width], or [1,height,width] for grey"
        )
    return PictureForm(None if shape is None else (shape[0], shape[1], shape[2]), fit, dtype, draft)


def read_orientation(opened: Image.Image) -> int:
    """Return the EXIF orientation of a picture, 1 to 8; 1 (as stored) if it is missing or unreadable."""
    if "exif" not in opened.info:  # asking Pillow would decode the whole of a PNG file first
        return 1
    try:
        return int(opened.getexif().get(ORIENTATION, 1))
    except (SyntaxError, ValueError, TypeError, KeyError, struct.error, OSError):
        return 1  # the pixels of a file with a broken note of its camera are as good as any


def has_16_bits(content: bytes) -> bool:
    """Return whether the content is a PNG file of 16 bits per channel, by its header of 29 bytes."""
    return content[:8] == PNG_MAGIC and content[12:16] == b"IHDR" and content[24:25] == b"\x10"


@cache
def warn_about_16_bits() -> None:
    LOG.warning(
        "pictures of 16 bits a channel keep their upper 8 bits as uint8; data.train.dtype=float32 keeps all of them"
    )


def decode_16_bits(content: bytes) -> Array:
    """Decode a PNG file of 16 bits per channel to (H, W, C) uint16. Pillow would read only the upper 8 bits.

    The filters of PNG treat each byte of a pixel separately. So the upper bytes form a picture of 8 bits, and the
    lower bytes another one. Pillow reads both. Raise ValueError if the file is cut short or interlaced.
    """
    chunks, begin = [], len(PNG_MAGIC)
    while begin + 8 <= len(content):
        size, kind = struct.unpack(">I4s", content[begin : begin + 8])
        chunks.append((kind, content[begin + 8 : begin + 8 + size]))
        begin += size + 12
    width, height, _, color, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    if interlaced:
        raise ValueError("a picture of 16 bits that is interlaced; save it without interlacing")
    num_channels = {0: 1, 2: 3, 4: 2, 6: 4}[color]
    lines = np.frombuffer(
        zlib.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT")), np.uint8
    )
    lines = lines.reshape(height, 1 + 2 * num_channels * width)  # each with the number of its filter in front
    upper, lower = (_decode_8_bits(width, height, color, lines, first) for first in (1, 2))
    return upper.astype(np.uint16) << 8 | lower


def _decode_8_bits(width: int, height: int, color: int, lines: Array, first: int) -> Array:
    """Return (H, W, C) uint8 from every second byte of the lines."""
    chosen = np.concatenate([lines[:, :1], lines[:, first::2]], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    parts = [PNG_MAGIC]
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(chosen, 0)), (b"IEND", b"")):
        parts.append(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    with Image.open(io.BytesIO(b"".join(parts)), formats=("PNG",)) as opened:
        return np.asarray(opened).reshape(height, width, -1)


def select_channels(pixels: Array, number: int) -> list[Array]:
    """Return `number` (1 or 3) channels (H, W) float32 of grey or RGB pixels (H, W, C), with or without alpha."""
    values = pixels.astype(np.float32)
    colors = [values[:, :, channel] for channel in range(3 if pixels.shape[2] > 2 else 1)]
    if number == 1 and len(colors) == 3:
        return [0.299 * colors[0] + 0.587 * colors[1] + 0.114 * colors[2]]
    return colors * (number // len(colors))


def convert_to_mode(picture: Image.Image, mode: str) -> Image.Image:
    """Load a picture and convert it to the mode "L" or "RGB"."""
    if picture.mode.startswith("I"):  # 16-bit grey: Pillow's own conversion would clip at 255
        wide = np.asarray(picture).astype(np.int32)
        picture = Image.fromarray((wide >> 8).clip(0, 255).astype(np.uint8))
    if picture.mode != mode:
        return picture.convert(mode)
    picture.load()
    return picture


def copy_pixels(picture: Image.Image, into: Array | None = None) -> Tensor:
    """Return the pixels (C, H, W) uint8 of a picture in mode "L" or "RGB"."""
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


def compute_draft_size(size: tuple[int, int], wanted: tuple[int, int], fit: str) -> tuple[int, int]:
    """Return the smallest size for a fast, reduced decode: twice the part of the picture that is kept."""
    if fit == "stretch":
        return 2 * wanted[0], 2 * wanted[1]
    scale = max(wanted[0] / size[0], wanted[1] / size[1])
    return -int(-2 * scale * size[0] // 1), -int(-2 * scale * size[1] // 1)


def shorten_fault(error: BaseException) -> str:
    """Shorten an error of Pillow to a few words."""
    if isinstance(error, UnidentifiedImageError):
        return "not a JPEG or PNG picture, or damaged at its beginning"
    return f"damaged or cut short ({str(error) or type(error).__name__})"


def decode_picture(content: bytes, form: PictureForm, where: Any, into: Array | None = None) -> Tensor:
    """Decode a picture as `PictureForm.decode` does, or as `PictureForm.decode_pixels` with `into`.

    Raise DataError if it is damaged. where: `() -> str` names the picture in the message.
    """
    if form.only_bytes and has_16_bits(content):
        raise DataError(
            f"{where()}: a picture of 16 bits a channel, while those looked at first have 8; bring them to one "
            "depth, or data.train.dtype=uint8 keeps the upper 8 bits of it"
        )
    try:
        return form.decode(content) if into is None else form.decode_pixels(content, into)
    except FAULTS as error:
        raise DataError(f"{where()}: {shorten_fault(error)}") from error
