"""Convert text to the tokens of a run, and tokens to text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

from trainrun.config.schema import RunConfig
from trainrun.data.readers.text.tokenizer import BYTES, Tokens, open_tokenizer
from trainrun.data.readers.text.trained_tokenizer import is_trained
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir
from trainrun.instantiate import import_target
from trainrun.sampling.run_tokenizer import saved_tokenizer

TEXT = "trainrun.data.readers.text.text.load"
CUT = "\ufffd"  # what decoding gives for a character that is not whole yet


def load_model_tokenizer(config: RunConfig, run_dir: RunDir, key: str) -> Tokens:
    """Return the tokenizer of a run whose model generates text. Raise ConfigError for other runs. key: the setting
    to name in the message.
    """
    task = config.task or {}
    of_each_place = task.get("class_dim") == -1  # of a student that is taught at every place of its text
    if getattr(import_target(task["_target_"], "task"), "unit", "") != "tokens" and not of_each_place:
        raise ConfigError(
            f"{key}: this run has task._target_={task['_target_']}, which cannot generate text; use a run with "
            "task=language_modeling and data=text"
        )
    return load_data_tokenizer(config, run_dir, key)


def load_data_tokenizer(config: RunConfig, run_dir: RunDir, key: str) -> Tokens:
    """Return the tokenizer of a run whose data are texts. Raise ConfigError for other runs. key: as above."""
    data = config.data.train or {}
    if data.get("_target_") != TEXT:
        raise ConfigError(
            f"{key}: data.train._target_={data.get('_target_')}: only data=text says how text becomes tokens"
        )
    if data.get("tokenizer") is None:
        return BYTES
    path = str(saved_tokenizer(run_dir)) if is_trained(data["tokenizer"]) else data["tokenizer"]
    return open_tokenizer(path)[0]


def max_context_length(model: Any, config: RunConfig, cached: bool) -> int | None:
    """Return the maximum number of tokens that a model reads, or None.

    It is the model's own limit. Without a cache, it is the length of the training samples.
    """
    context = getattr(model, "context", None)
    if isinstance(context, int) or cached:
        return context if isinstance(context, int) else None
    data = config.data.train or {}
    return data.get("block_size") if data.get("kind") == "blocks" else None


def is_trained_on_lines(config: RunConfig) -> bool:
    """Return whether each training sample was one line, so that the model never saw text after a newline."""
    return (config.data.train or {}).get("kind") == "lines"


def stop_at_newline(text: Iterable[str]) -> Iterator[str]:
    for piece in text:
        line, newline, _ = piece.partition("\n")
        yield line
        if newline:
            return


def encode_text(tokens: Tokens, text: str) -> list[int]:
    return list(text.encode()) if tokens.encode is None else tokens.encode([text])[0]


def decode_stream(tokens: Tokens, ids: Iterable[int]) -> Iterator[str]:
    """Yield, for each token, the characters that are complete with it, or ""."""
    if tokens.decode is None:
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        yield from (reader.decode(bytes([token])) for token in ids)
        yield reader.decode(b"", final=True)
        return
    held: list[
        int
    ] = []  # the tokens of the piece before, beside which the next may look different, and newer
    shown, num_old = "", 0
    for token in ids:
        held.append(token)
        text = tokens.decode(held)
        if text.endswith(CUT) and len(held) - num_old < 8:
            yield ""
            continue
        yield text[len(shown) :]
        held = held[num_old:]
        shown, num_old = tokens.decode(held), len(held)
    if len(held) > num_old:
        yield tokens.decode(held)[len(shown) :]
