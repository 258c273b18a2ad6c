"""Convert text to numbers: to its bytes, or to tokens of a Hugging Face tokenizer (a tokenizer.json)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.readers.optional_packages import import_extra
from trainrun.data.readers.paths import is_plain_file
from trainrun.errors import DataError

LINE = re.compile(r"[^\n]*\n|[^\n]+")  # str.splitlines would also cut at form feeds and others
PIECE_CHARACTERS = 2**14  # of lines that are tokenized together; pieces are spread over the cores
Values = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tokens:
    """A conversion between text and tokens. vocabulary: one more than the largest token. encode: returns the tokens
    of each text. None: bytes. decode: returns the text of tokens.
    """

    vocabulary: int
    encode: Callable[[list[str]], list[list[int]]] | None = None
    decode: Callable[[list[int]], str] | None = None

    @property
    def dtype(self) -> str:
        """Return the smallest integer type that can represent every token."""
        return "uint8" if self.vocabulary <= 2**8 else "uint16" if self.vocabulary <= 2**16 else "int32"


BYTES = Tokens(256)


def open_tokenizer(path: str) -> tuple[Tokens, bytes]:
    """Return the tokenizer and the content of its file. It adds no special tokens."""
    package = import_extra("tokenizers", "text data.train.tokenizer=...", "text")
    file, key = Path(path).expanduser(), f"data.train.tokenizer={path}"
    is_plain_file(file, key)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{key}: cannot be read: {error.strerror}; allowed: a tokenizer.json, or bpe:4096"
        ) from error
    try:
        tokenizer = package.Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises plain Exception
        raise DataError(f"{key}: not a file of Hugging Face tokenizers ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return Tokens(max(tokenizer.get_vocab().values(), default=0) + 1, encode, decode), content


def encode_chunk(
    tokens: Tokens, content: bytes, by_line: bool, is_cut: bool, file: Path
) -> tuple[Values, Values]:
    """Encode some whole lines. With `by_line`, also return the position after the last token of each line.

    is_cut: whether the content may end inside a character. Such a character is left out.
    """
    if tokens.encode is None:
        values = np.frombuffer(content, np.uint8)
        ends = np.flatnonzero(values == 10) + 1
        if len(values) and not (len(ends) and ends[-1] == len(values)):
            ends = np.append(ends, len(values))
        return values, ends if by_line else ends[:0]
    lines = LINE.findall(decode_text_block(content, is_cut, file))
    pieces = tokens.encode(lines if by_line else _join_lines(lines))
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    values = np.array([token for piece in pieces for token in piece], dtype=tokens.dtype)
    return values, ends if by_line else ends[:0]


def decode_text_block(content: bytes, is_cut: bool, file: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        if is_cut and error.end == len(content) and len(content) - error.start < 4:
            return content[: error.start].decode()
        line = content[content.rfind(b"\n", 0, error.start) + 1 : error.start][:40].decode(errors="replace")
        byte = f"0x{content[error.start]:02x} in the line that begins {line!r}"
        raise DataError(
            f"{file}: not UTF-8 ({byte}), which data.train.tokenizer needs; convert it, as with iconv, or "
            "use bytes (data.train.tokenizer=null)"
        ) from error


def _join_lines(lines: list[str]) -> list[str]:
    """Join lines to larger pieces, so that several cores can work on them."""
    pieces, current, size = [], [], 0
    for line in lines:
        current.append(line)
        size += len(line)
        if size >= PIECE_CHARACTERS:
            pieces.append("".join(current))
            current, size = [], 0
    return [*pieces, *(["".join(current)] if current else [])]
