"""One long file of tokens that is mapped into memory: the text itself, or tokens that are stored once.

The bytes of a single plain file are its tokens. For several files, packed files or a tokenizer, the tokens are stored
once, see `column_store`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.cache.room import cache_home
from trainrun.data.readers.column_store import ColumnWriter, open_or_build
from trainrun.data.readers.free_space import check_free_memory, estimate_unpacked_bytes
from trainrun.data.readers.mapped_files import map_bytes
from trainrun.data.readers.paths import fingerprint_files
from trainrun.data.readers.text.text_files import build_unreadable_error, is_packed, iterate_chunks
from trainrun.data.readers.text.tokenizer import BYTES, Tokens, Values, encode_chunk, open_tokenizer
from trainrun.data.readers.text.trained_tokenizer import divide_chunks, find_training_end
from trainrun.errors import DataError

LOG = logging.getLogger(__name__)
VERSION = 2  # of the files in the cache
SEARCH_BYTES = 2**24
LESS_TEXT = "name another disk by data.train.cache_dir, or read less by data.train.max_bytes"
Ends = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Text:
    """A text, and how it is divided into samples.

    kind: "blocks", "lines" or "documents". tokenizer: a file of Hugging Face tokenizers. None: bytes. held: the
        fraction at the end that a tokenizer trained on this text has not seen.
    """

    files: tuple[Path, ...]
    kind: str
    tokenizer: str | None
    max_bytes: int | None
    held: float | None = None


@dataclass(frozen=True)
class TokenFile:
    """Mapped tokens. vocabulary: the largest number of different tokens. num_training: the tokens of the part that is
    not held out.

    num_bytes: the size of the text. file_ends: (files,) the end of each file that is read, in tokens.
    sample_ends: (N,) the end of each line or document, in tokens; empty for blocks.
    """

    values: Values
    num_bytes: int
    vocabulary: int
    file_ends: Ends
    sample_ends: Ends
    num_training: int | None = None

    def __len__(self) -> int:
        return len(self.values)


def find_text_cache(cache_dir: str | None) -> Path:
    return cache_home() / "text" if cache_dir is None else Path(cache_dir).expanduser()


def open_token_file(text: Text, cache_dir: str | None) -> TokenFile:
    """Return the file of tokens of a text. Build it if it is not cached.

    Raise DataError if a file or the tokenizer cannot be read, or the cache cannot be written.
    """
    if text.tokenizer is None and len(text.files) == 1 and not is_packed(text.files[0]):
        return _is_token_file(text)
    tokens, content = BYTES, b""
    if text.tokenizer is not None:
        tokens, content = open_tokenizer(text.tokenizer)
    key = fingerprint_files(text.files, VERSION, text.kind, text.max_bytes, text.held, content)
    expected = estimate_unpacked_bytes(text.files)
    expected = expected if text.max_bytes is None else min(expected, text.max_bytes)
    if tokens.encode is not None:  # to tokens of two bytes, each for several of the text
        expected //= 2
    rest = f" and {len(text.files) - 1} more" if len(text.files) > 1 else ""
    source, build = f"{text.kind} of {text.files[0]}{rest}", partial(write_tokens, text, tokens)
    folder = find_text_cache(cache_dir)
    try:
        stored = open_or_build(folder, key, source, expected, build, LOG.info)
    except OSError as error:
        raise DataError(
            f"data.train.cache_dir: cannot write {folder} ({error.strerror or error}); {LESS_TEXT}"
        ) from error
    arrays, facts = stored.arrays, stored.facts
    return TokenFile(
        arrays["tokens"], facts["num_bytes"], tokens.vocabulary, arrays["file_ends"], arrays["sample_ends"],
        None if text.held is None else facts["num_training"],
    )  # fmt: skip


def _is_token_file(text: Text) -> TokenFile:
    (file,) = text.files
    try:
        size = file.stat().st_size
        size = size if text.max_bytes is None else min(size, text.max_bytes)
        ends = _find_line_ends(file, size) if text.kind == "lines" else np.array([size], np.int64)
    except OSError as error:
        raise build_unreadable_error(file, error) from error
    samples = np.empty(0, np.int64) if text.kind == "blocks" else ends
    file_ends = np.array([size], np.int64)
    return TokenFile(map_bytes(str(file), size), size, BYTES.vocabulary, file_ends, samples)


def _find_line_ends(file: Path, size: int) -> Ends:
    """Return the position after each newline among the first `size` bytes, and after a last line without one."""
    blocks, place = [np.empty(0, np.int64)], 0
    with file.open("rb") as opened:
        while place < size and (content := opened.read(min(SEARCH_BYTES, size - place))):
            blocks.append(np.flatnonzero(np.frombuffer(content, np.uint8) == 10) + (place + 1))
            _check_lines(file, sum(map(len, blocks)))
            place += len(content)
    ends = np.concatenate(blocks)
    return ends if place == 0 or (len(ends) and ends[-1] == place) else np.append(ends, place)


def _check_lines(file: Path, number: int) -> None:
    check_free_memory(8 * number, f"{file}: where its lines end", "use data.train.kind=blocks")


def write_tokens(text: Text, tokens: Tokens, writer: ColumnWriter) -> dict[str, Any]:
    """Write `tokens`, `file_ends` and `sample_ends` of a text.

    Return the facts: `num_bytes` of the text, and `num_training`, the tokens of the part that is not held out.
    """
    num_tokens, num_bytes, num_lines, num_training = 0, 0, 0, 0
    end = None if text.held is None else find_training_end(text.files, text.kind, text.max_bytes, text.held)
    file_ends: dict[int, int] = {}
    line_ends = [np.empty(0, np.int64)]
    for number, content, is_training in divide_chunks(
        iterate_chunks(text.files, text.max_bytes), end, text.kind
    ):
        file, is_cut = text.files[number], text.max_bytes == num_bytes + len(content)
        values, lines = encode_chunk(tokens, content, text.kind == "lines", is_cut, file)
        writer.add("tokens", values)
        line_ends.append(lines + num_tokens)
        num_lines += len(lines)
        _check_lines(file, num_lines)
        num_tokens, num_bytes = num_tokens + len(values), num_bytes + len(content)
        file_ends[number] = num_tokens
        num_training = num_tokens if is_training else num_training
    ends = np.array(list(file_ends.values()), np.int64)
    writer.add("file_ends", ends)
    writer.add(
        "sample_ends", {"blocks": ends[:0], "lines": np.concatenate(line_ends), "documents": ends}[text.kind]
    )
    return {"num_bytes": num_bytes, "num_training": num_training}
