"""`data=text`: a text as bytes, or as the tokens of a tokenizer, for models that predict the next token.

blocks: consecutive windows of block_size + 1 tokens. Neighbours share one token, so that each token is predicted
    once. A rest at the end that fills no window is left out.
lines, documents: each line or file is a sample of its own length. A line keeps its newline, which marks its end.
    Samples of less than two tokens have nothing to predict and are left out.
A sample is (inputs, target), both int64 (L,). target[i] is the token that follows inputs[i]. The validation part is
the end of the text.

Bits per byte = (loss in nats) / ln 2 / `bytes_per_token`, a mean over the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainrun.data.readers.mapped_files import check_lengths, find_mappings
from trainrun.data.readers.parts import Part, SplitFiles, SplitRequest
from trainrun.data.readers.paths import fingerprint_files
from trainrun.data.readers.text.text_files import TEXTS, find_text_files
from trainrun.data.readers.text.token_file import Text, TokenFile, find_text_cache, open_token_file
from trainrun.data.readers.text.trained_tokenizer import is_trained, open_trained_file
from trainrun.data.tensor_dataset import Columns, Splits
from trainrun.errors import DataError
from trainrun.limits import BelowOne, Count


class TextSamples:
    """Samples of a mapped file of tokens.

    begins, ends: (N,) int64, the range of tokens of each sample, including the last target.
    lengths: (N,) int64, the length of inputs and target. num_classes: the number of different tokens.
    num_tokens: the number of predicted tokens. bytes_per_token: the mean over the whole text.
    """

    thread_safe = True

    def __init__(self, tokens: TokenFile, text: Text, begins: np.ndarray[Any, Any],
                 ends: np.ndarray[Any, Any], notice: str = "",
                 unused_arguments: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self._tokens = tokens
        self._text = text
        self._begins = begins
        self._ends = ends
        self.notice = notice
        self.unused_arguments = unused_arguments
        self._values, self._mappings = tokens.values.view(np.ndarray), find_mappings([tokens.values])
        self.lengths = ends - begins - 1
        self.num_classes = tokens.vocabulary
        self.num_tokens = int(self.lengths.sum())
        self.bytes_per_token = tokens.num_bytes / max(len(tokens), 1)

    def __reduce__(self) -> Any:
        return TextSamples, (
            self._tokens, self._text, self._begins, self._ends, self.notice, self.unused_arguments,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = self._map_tokens()[int(self._begins[index]) : int(self._ends[index])]
        window = torch.from_numpy(tokens.astype(np.int64))
        return window[:-1], window[1:]

    def read_cut(self, index: int, cut: Callable[[str, Any], Any]) -> tuple[Tensor, Tensor]:
        """Return a part of one sample. Only the tokens that `cut(name, tokens)` returns are copied."""
        tokens = self._map_tokens()[int(self._begins[index]) : int(self._ends[index])]
        inputs, target = cut("inputs", tokens[:-1]), cut("target", tokens[1:])
        return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(target.astype(np.int64))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the samples of these indices. Blocks are gathered with one call."""
        chosen = np.asarray(indices, dtype=np.int64)
        sizes = self._ends[chosen] - self._begins[chosen]
        if len(chosen) == 0 or (sizes != sizes[0]).any():
            return [self[int(index)] for index in chosen]
        places = self._begins[chosen, None] + np.arange(sizes[0])
        windows = torch.from_numpy(self._map_tokens()[places].astype(np.int64))
        return [(window[:-1], window[1:]) for window in windows.unbind()]

    def find_row_columns(self) -> Columns | None:
        """Return blocks as rows of the token file, to gather many at once. Targets begin one token after the inputs."""
        return self._open_columns() if self._text.kind == "blocks" else None

    def _open_columns(self) -> Columns:
        content = self._map_tokens()[int(self._begins[0]) : int(self._ends[-1])]
        unsigned = content.dtype == np.uint16
        content = content.view(np.int16) if unsigned else content
        rows = (len(self), int(self.lengths[0]))
        values = (content[:-1].reshape(rows), content[1:].reshape(rows))
        return Columns(values, (), tuple, again=self._open_columns, int_dtype=torch.int64, unsigned=unsigned)

    def describe(self, index: int) -> str:
        """Return file and line of a sample. For a block, return the position of its first token in the file."""
        begin, tokens = int(self._begins[index]), self._tokens
        file = int(np.searchsorted(tokens.file_ends, begin, side="right"))
        name, start = self._text.files[file], int(tokens.file_ends[file - 1]) if file else 0
        if self._text.kind == "documents":
            return str(name)
        if self._text.kind == "lines":
            number, first = np.searchsorted(tokens.sample_ends, [begin, start], side="right")
            return f"{name}, line {number - first + 1}"
        return f"{name}, {'byte' if self._text.tokenizer is None else 'token'} {begin - start}"

    def fingerprint(self) -> str:
        text = self._text
        files = (*text.files, Path(text.tokenizer).expanduser()) if text.tokenizer else text.files
        return fingerprint_files(
            files, text.kind, text.max_bytes, self._begins.tobytes(), self._ends.tobytes()
        )

    def _map_tokens(self) -> np.ndarray[Any, Any]:
        check_lengths(self._mappings)
        return self._values


def load(path: str | None, kind: Literal["blocks", "lines", "documents"] = "blocks",
         block_size: Count = 256, tokenizer: str | None = None, val_path: str | None = None,
         test_path: str | None = None, val_fraction: BelowOne = 0.1, max_bytes: Count | None = None,
         cache_dir: str | None = None) -> Splits:  # fmt: skip
    """Return the splits.

    path: a file, a pattern or a folder, plain or gzip. None: the sources of Python's standard library.
    block_size: tokens in a sample, for blocks. max_bytes: the part of the text that is read.
    cache_dir: see `open_token_file`. None: ~/.cache/trainrun/text. tokenizer: a file, or see `trained_tokenizer`.
    """
    split_files = SplitRequest(path, val_path, test_path, val_fraction).find_files(TEXTS, find_text_files)
    held = None
    if tokenizer is not None and is_trained(tokenizer):
        held = read_held_share(split_files)
        tokenizer = open_trained_file(
            tokenizer, split_files.files["train"], kind, max_bytes, held, find_text_cache(cache_dir)
        )

    @cache
    def read(files: tuple[Path, ...], held: float | None) -> tuple[TokenFile, Text]:
        text = Text(files, kind, tokenizer, max_bytes, held)
        return open_token_file(text, cache_dir), text

    def build(split: str) -> TextSamples | None:
        part = split_files.part(split)
        if part is None:
            return None
        tokens, text = read(part.files, None if part.is_own else held)
        begins, ends = find_sample_bounds(tokens, kind, block_size, part)
        if len(begins) == 0:
            source = "Python's sources" if path is None else part.setting
            needed = f"block_size + 1 = {block_size + 1}" if kind == "blocks" else f"2 in one of its {kind}"
            smaller = "a smaller data.train.block_size or " if kind == "blocks" else ""
            raise DataError(
                f"{source}: {len(tokens)} tokens are too few for the {split} part "
                f"(val_fraction={val_fraction:g}): it needs at least {needed}; choose {smaller}another "
                "data.train.val_fraction"
            )
        unused = {} if kind == "blocks" else {"block_size": f"data.train.kind={kind} has no blocks"}
        return TextSamples(tokens, text, begins, ends, part.notice, part.unused_arguments | unused)

    return Splits(build)


def find_sample_bounds(
    tokens: TokenFile, kind: str, block_size: int, part: Part
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the first tokens and the ends of the samples of a split, (N,) each."""
    middle = tokens.num_training
    if kind == "blocks":
        begin, end = _find_split_bounds(len(tokens), part, middle)
        begins = begin + block_size * np.arange(max(end - begin - 1, 0) // block_size, dtype=np.int64)
        return begins, begins + block_size + 1
    begins, ends = np.append(0, tokens.sample_ends[:-1])[: len(tokens.sample_ends)], tokens.sample_ends
    long = ends - begins >= 2
    middle = None if middle is None else int(np.searchsorted(ends[long], middle, side="right"))
    begin, end = _find_split_bounds(int(long.sum()), part, middle)
    return begins[long][begin:end], ends[long][begin:end]


def find_tokenizer(node: Mapping[str, Any]) -> str:
    """Return the path of the trained tokenizer of a `data.train` node. Train the tokenizer if it is not cached."""
    arguments = {name: node[name] for name in ("val_path", "test_path", "val_fraction") if name in node}
    request = SplitRequest(node.get("path"), **{"val_fraction": 0.1, **arguments})
    split_files = request.find_files(TEXTS, find_text_files)
    kind, cache_dir = node.get("kind", "blocks"), find_text_cache(node.get("cache_dir"))
    training, held = split_files.files["train"], read_held_share(split_files)
    return open_trained_file(node["tokenizer"], training, kind, node.get("max_bytes"), held, cache_dir)


def read_held_share(found: SplitFiles) -> float:
    """Return the fraction of the text that is held out at its end. A tokenizer must not see it."""
    return found.request.val_fraction if found.shares_training_files else 0.0


def _find_split_bounds(number: int, part: Part, middle: int | None) -> tuple[int, int]:
    """Return the begin and end of a split among `number` tokens or samples. middle: the begin of the validation."""
    if part.is_own:
        return 0, number
    middle = number - round(number * part.of.request.val_fraction) if middle is None else middle
    return (0, middle) if part.split == "train" else (middle, number)
