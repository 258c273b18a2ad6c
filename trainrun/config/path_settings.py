"""Paths among the words: taken as they are typed, where Hydra's grammar sees lists, quotes and equations in them.

`data.path`, which formats read as `${data.path}`, must be read by something, and a saved run follows a new one.
What stays Hydra's: `null`, a reference `${...}`, a list `[a,b]`, a value in quotes, and several values with commas,
unless there is a file or folder of just that name.
"""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainrun.config.schema import RunConfig, with_values

# data.path, data.train.val_path, data.train.labels, ... ; init_from and ckpt_path
_KEYS = re.compile(r"data\.(?:\w+\.)*(?:\w*path|cache_dir|tokenizer|labels|root|folder)|init_from|ckpt_path")
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)
_NO_TEXT = ("true", "false", "null", "none", "nan", "inf")
_CHOICE = re.compile(r"(?:choice|shuffle|sort)\(.*\)\Z", re.DOTALL)
_BRACES = re.compile(r"\{[^{}]*\}")


def is_path(key: str) -> bool:
    return _KEYS.fullmatch(key) is not None


def as_path(value: str, may_vary: bool) -> str:
    """The value as Hydra reads it as this one text. may_vary: in a sweep, where commas part the values."""
    if not value or value.lower() == "null" or "${" in value or _is_text(value):
        return value
    if is_there(value):
        return _quoted(value)
    in_quotes = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    if in_quotes or value[0] == "[" or (may_vary and _CHOICE.match(value)):
        return value
    parts = value.split(",")
    if "," in _BRACES.sub("", value) and all(parts) and (may_vary or all(map(is_there, parts))):
        return ",".join(part if _is_text(part) or part[0] in "\"'{" else _quoted(part) for part in parts)
    return _quoted(value)


def is_there(value: str) -> bool:
    """Whether it names a file or folder, or some by a pattern."""
    try:
        return Path(value).expanduser().exists() or (glob.has_magic(value) and bool(glob.glob(value)))
    except (OSError, ValueError, RuntimeError):  # too long, or nobody knows of a home
        return False


def _is_text(value: str) -> bool:
    return _PLAIN.fullmatch(value) is not None and value.lower() not in _NO_TEXT


def _quoted(value: str) -> str:
    """In Hydra's quotes, where a backslash means itself but before a quote."""
    inner = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return '"' + re.sub(r"(\\+)\Z", r"\1\1", inner) + '"'


def unread_path(config: RunConfig) -> list[str]:
    """A fault where no node has the path: the run would train on other data than its words name."""
    path = config.data.path
    if path is None:
        return []
    nodes = dataclasses.asdict(config)
    del nodes["data"]["path"]
    if any(value == path for value in _values(nodes)):
        return []
    return [
        f"data.path={path}: nothing reads it with data={config.data.name}; say what it is, as data=csv, data=text or "
        "data=image_folder (trainrun --help data), or leave it out"
    ]


def follow_path(config: RunConfig, before: str | None) -> RunConfig:
    """The config with `data.path` where a saved run, whose references are resolved, has the path of `before`."""
    sets = ("train", "val", "test")
    found = {
        f"data.{name}": _exchanged(getattr(config.data, name), before, config.data.path) for name in sets
    }
    return with_values(config, found)


def _exchanged(node: Any, before: str | None, path: str | None) -> Any:
    if not isinstance(node, dict):
        return node
    return {
        key: path
        if value == before and (before is not None or key == "path")
        else _exchanged(value, before, path)
        for key, value in node.items()
    }


def _values(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _values(value)
    elif isinstance(node, list):
        for value in node:
            yield from _values(value)
    else:
        yield node
