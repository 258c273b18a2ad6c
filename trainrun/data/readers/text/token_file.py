"""One long file of tokens, mapped into memory: made once from a text and kept, or the text itself.

Bytes of one plain file need nothing made: the file is its tokens. Of several files, of packed ones and
with a tokenizer, the tokens are written into a folder of the cache, named by a hash of what they
come from: names, sizes and times of the files, the tokenizer's content, the arguments. The process that
comes first makes it, under another name until it is whole; several processes may do so at the same time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainrun.data.cache.room import SOURCE, cache_home, make_room
from trainrun.data.readers.free_space import check_disk, check_memory, unpacked_bytes
from trainrun.data.readers.paths import fingerprint_of
from trainrun.data.readers.text.text_files import chunks_of, is_packed, unreadable
from trainrun.data.readers.text.tokenizer import BYTES, Tokens, encoded_chunk, open_tokenizer
from trainrun.data.readers.text.trained_tokenizer import divided, training_end
from trainrun.errors import DataError

LOG = logging.getLogger(__name__)
VERSION = 1  # of the files in the cache
SEARCH_BYTES = 2**24
LESS_TEXT = "name another disk by data.train.cache_dir, or read less by data.train.max_bytes"
Ends = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Text:
    """Which text, and how it becomes samples.

    kind: "blocks", "lines" or "documents". tokenizer: a file of Hugging Face tokenizers; None: bytes. held: the share
    at the end that a tokenizer trained on the rest has not seen, where the text is cut for it.
    """

    files: tuple[Path, ...]
    kind: str
    tokenizer: str | None
    max_bytes: int | None
    held: float | None = None


@dataclass(frozen=True)
class TokenFile:
    """Tokens in a file. vocabulary: how many different ones there may be. num_training: of the part that is not held.

    num_bytes: of the text. file_ends: (files reached,) the token behind each file's last.
    sample_ends: (N,) the same for lines or documents; empty for blocks.
    """

    path: Path
    dtype: str
    num_tokens: int
    num_bytes: int
    vocabulary: int
    file_ends: Ends
    sample_ends: Ends
    num_training: int | None = None


def text_cache(cache_dir: str | None) -> Path:
    return cache_home() / "text" if cache_dir is None else Path(cache_dir).expanduser()


def token_file(text: Text, cache_dir: str | None) -> TokenFile:
    """DataError: a file or the tokenizer cannot be read, or the cache cannot be written."""
    if text.tokenizer is None and len(text.files) == 1 and not is_packed(text.files[0]):
        return _file_itself(text)
    tokens, name = BYTES, hashlib.sha256(f"{VERSION} {text.kind} {text.max_bytes}".encode())
    name.update(fingerprint_of(text.files).encode())
    if text.tokenizer is not None:
        tokens, content = open_tokenizer(text.tokenizer)
        name.update(content)
    if text.held is not None:
        name.update(f"held {text.held}".encode())
    place = text_cache(cache_dir) / name.hexdigest()[:32]
    while True:
        if not place.is_dir():
            try:
                _build(place, text, tokens)
            except OSError as error:
                raise DataError(
                    f"data.train.cache_dir: cannot write {place.parent} ({error.strerror}); name a folder with space "
                    "as data.train.cache_dir=..."
                ) from error
        try:
            return _kept(place, tokens, text.held is not None)
        except DataError:
            if place.is_dir():
                raise  # else another process has just removed it to make room


def _file_itself(text: Text) -> TokenFile:
    (file,) = text.files
    try:
        size = file.stat().st_size
        size = size if text.max_bytes is None else min(size, text.max_bytes)
        ends = _line_ends(file, size) if text.kind == "lines" else np.array([size], np.int64)
    except OSError as error:
        raise unreadable(file, error) from error
    samples = np.empty(0, np.int64) if text.kind == "blocks" else ends
    return TokenFile(file, "uint8", size, size, BYTES.vocabulary, np.array([size], np.int64), samples)


def _line_ends(file: Path, size: int) -> Ends:
    """Behind each newline among the first `size` bytes, and behind a last line without one."""
    found, place = [np.empty(0, np.int64)], 0
    with file.open("rb") as opened:
        while place < size and (content := opened.read(min(SEARCH_BYTES, size - place))):
            found.append(np.flatnonzero(np.frombuffer(content, np.uint8) == 10) + (place + 1))
            _check_lines(file, sum(map(len, found)))
            place += len(content)
    ends = np.concatenate(found)
    return ends if place == 0 or (len(ends) and ends[-1] == place) else np.append(ends, place)


def _check_lines(file: Path, number: int) -> None:
    check_memory(8 * number, f"{file}: where its lines end", "use data.train.kind=blocks")


def _build(place: Path, text: Text, tokens: Tokens) -> None:
    """Write all tokens. DataError: the disk or the memory will not hold them."""
    if tokens.encode is None and text.max_bytes is None:
        what = f"{text.files[0]}: unpacked, the text"
        check_disk(unpacked_bytes(text.files), place.parent, what, LESS_TEXT)
    place.parent.mkdir(parents=True, exist_ok=True)
    expected = unpacked_bytes(text.files) if text.max_bytes is None else text.max_bytes
    if tokens.encode is not None:  # to tokens of two bytes, each for several of the text
        expected //= 2
    make_room(place.parent, expected, str(text.files[0]), LOG.info)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
    try:
        with (making / "tokens").open("wb") as out:
            index = _written(text, tokens, out, place.parent)
            out.flush()
            os.fsync(out.fileno())
        np.savez(making / "index.npz", **index)
        more = f" and {len(text.files) - 1} more" if len(text.files) > 1 else ""
        (making / SOURCE).write_text(f"{text.kind} of {text.files[0]}{more}", encoding="utf-8")
        try:
            os.rename(making, place)
        except OSError:
            if not place.is_dir():  # else another process was faster, and made the same
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _written(text: Text, tokens: Tokens, out: IO[bytes], folder: Path) -> dict[str, Any]:
    """The index of what was written."""
    num_tokens, num_bytes, num_lines, num_training = 0, 0, 0, 0
    end = None if text.held is None else training_end(text.files, text.kind, text.max_bytes, text.held)
    file_ends: dict[int, int] = {}
    line_ends = [np.empty(0, np.int64)]
    for number, content, is_training in divided(chunks_of(text.files, text.max_bytes), end, text.kind):
        file, is_cut = text.files[number], text.max_bytes == num_bytes + len(content)
        values, lines = encoded_chunk(tokens, content, text.kind == "lines", is_cut, file)
        check_disk(values.nbytes, folder, f"{file}: after {num_bytes} bytes the text", LESS_TEXT)
        out.write(values.tobytes())
        line_ends.append(lines + num_tokens)
        num_lines += len(lines)
        _check_lines(file, num_lines)
        num_tokens, num_bytes = num_tokens + len(values), num_bytes + len(content)
        file_ends[number] = num_tokens
        num_training = num_tokens if is_training else num_training
    ends = np.array(list(file_ends.values()), np.int64)
    samples = {"blocks": ends[:0], "lines": np.concatenate(line_ends), "documents": ends}[text.kind]
    counts = {"num_bytes": np.array(num_bytes), "num_training": np.array(num_training)}
    return {"file_ends": ends, "sample_ends": samples, **counts}


def _kept(place: Path, tokens: Tokens, is_divided: bool) -> TokenFile:
    again = "delete this folder, it is made anew"
    try:
        with np.load(place / "index.npz", allow_pickle=False) as index:
            file_ends, sample_ends = index["file_ends"], index["sample_ends"]
            num_bytes = int(index["num_bytes"])
            num_training = int(index["num_training"]) if is_divided else None
        size = (place / "tokens").stat().st_size
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{place}: cannot be read ({error}); {again}") from error
    num_tokens = int(file_ends[-1]) if len(file_ends) else 0
    if size != num_tokens * np.dtype(tokens.dtype).itemsize:
        raise DataError(f"{place}: tokens of {size} bytes do not fit its index; {again}")
    return TokenFile(
        place / "tokens",
        tokens.dtype,
        num_tokens,
        num_bytes,
        tokens.vocabulary,
        file_ends,
        sample_ends,
        num_training,
    )
