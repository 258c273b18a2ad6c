"""Paths, names of options and maps of names as they are typed, made ready for Hydra."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable
from pathlib import Path

from trainrun.config.other_trainers.names import OPTIONS

CUSTOM = "custom"  # the option of a group that holds nothing but what the user names
_BRACES = re.compile(r"\{[^{}]*\}")
PLAIN = re.compile(r"(?:[+-]?\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?|(?i:true|false|null|none|nan|inf))\Z")


def group_words(group: str, value: str, is_option: Callable[[str, str], bool]) -> list[str]:
    """`precision=32,bf16` -> `precision=32-true,bf16-mixed`; `model=my_net.Net` -> its two words."""
    if value[:1] in ("[", "{", '"', "'", "$"):
        return [f"{group}={value}"]
    aliases = OPTIONS.get(group, {})
    options = [
        part if is_option(group, part) else aliases.get(part.lower(), part) for part in value.split(",")
    ]
    extra = ["parallel.accelerator=cpu"] if group == "parallel" and value == "processes" else []
    if len(options) == 1 and "." in value and not is_option(group, value) and re.fullmatch(r"[\w.]+", value):
        target = "data.train._target_" if group == "data" else f"{group}._target_"
        return [f"{group}={CUSTOM}", f"{target}={value}"]
    quoted = [f'"{part}"' if PLAIN.match(part) else part for part in options]
    return [f"{group}={','.join(quoted)}", *extra]


def with_bare_keys(value: str) -> str:
    """A map as Hydra reads it, which knows no quotes around keys; an empty one stands for every beginning of a name."""
    return re.sub(r"""(["'])([^"',:{}]*)\1\s*:\s*""", lambda found: f"{found[2] or '*'}: ", value)


def as_path(value: str, may_vary: bool) -> str:
    """The value as Hydra reads it as this one text. may_vary: in a sweep, where commas part the values.

    What stays Hydra's: `null`, a reference `${...}`, a list `[a,b]`, a value in quotes, and several values with commas,
    unless there is a file or folder of just that name.
    """
    if not value or value.lower() == "null" or "${" in value:
        return value
    if is_there(value):
        return _quoted(value)
    in_quotes = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    if in_quotes or value[0] == "[" or (may_vary and re.match(r"(?:choice|shuffle|sort)\(.*\)\Z", value)):
        return value
    parts = value.split(",")
    if "," in _BRACES.sub("", value) and all(parts) and (may_vary or all(map(is_there, parts))):
        return ",".join(part if part[0] in "\"'{" else _quoted(part) for part in parts)
    return _quoted(value)


def is_there(value: str) -> bool:
    """Whether it names a file or folder, or some by a pattern."""
    try:
        return Path(value).expanduser().exists() or (glob.has_magic(value) and bool(glob.glob(value)))
    except (OSError, ValueError, RuntimeError):  # too long, or nobody knows of a home
        return False


def _quoted(value: str) -> str:
    """In Hydra's quotes, where a backslash means itself but before a quote; a plain name as it is."""
    if re.fullmatch(r"[A-Za-z_./][\w./-]*", value, re.ASCII) and not PLAIN.match(value):
        return value
    inner = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return '"' + re.sub(r"(\\+)\Z", r"\1\1", inner) + '"'
