"""Decode bytes of a known or guessed kind: pictures, .npy arrays, text, JSON, class numbers."""

from __future__ import annotations

import io
import json
import tokenize
from typing import Any

import numpy as np

from trainrun.data.readers.pictures.decode import FAULTS, PictureForm, shorten_fault

PICTURES = ("jpg", "jpeg", "png")
NUMBERS = ("cls", "cls2", "index", "id")
TEXTS = ("txt", "text", "transcript")
PICTURE_MAGICS, NPY_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"), b"\x93NUMPY"
NPY_FAULTS = (ValueError, SyntaxError, TypeError, KeyError, EOFError, OverflowError, RecursionError, MemoryError,
              tokenize.TokenError)  # fmt: skip


def decode_value(extension: str, content: bytes, form: PictureForm | None) -> Any:
    """Decode bytes by a file's extension. Raise ValueError if they are damaged.

    Pictures become tensors (C, H, W), or stay bytes without a form. Numbers become ints, and .npy files become
    arrays. Bytes with an unknown extension are decoded by `decode_guessed_value`.
    """
    kind = extension.rpartition(".")[2]
    if kind in NUMBERS:
        return int(content.decode("ascii"))
    if kind in TEXTS:
        return content.decode()
    if kind == "json":
        try:
            return json.loads(content)
        except RecursionError as error:
            raise ValueError("JSON that is nested too deeply") from error
    return decode_stored_picture(content, form) if kind in PICTURES else decode_guessed_value(content, form)


def decode_guessed_value(content: bytes, form: PictureForm | None) -> Any:
    """Decode bytes by their beginning: a JPEG or PNG picture, or a .npy array. Other bytes become an array (L,)
    uint8.
    """
    if content.startswith(PICTURE_MAGICS):
        return decode_stored_picture(content, form)
    if content.startswith(NPY_MAGIC):
        return read_npy(content)
    return np.frombuffer(bytearray(content), np.uint8)


def decode_stored_picture(content: bytes, form: PictureForm | None) -> Any:
    """Return a picture as a tensor, or the bytes of its file without a form."""
    if form is None:
        return content
    try:
        return form.decode(content)
    except FAULTS as error:
        raise ValueError(f"a picture that is {shorten_fault(error)}") from error


def read_npy(content: bytes) -> np.ndarray[Any, Any]:
    """Return the array of a .npy file. If its header announces more than the content has, no memory is touched for
    the rest.
    """
    try:
        array: np.ndarray[Any, Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except NPY_FAULTS as error:
        why = "allowed are numbers, not pickled objects" if "pickle" in str(error) else str(error)
        raise ValueError(f"a .npy array cut short or damaged ({why})") from error
    return array
