"""JSON from a file that nobody vouches for: bounded in size and depth, and with one meaning only."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from trainrun.errors import CheckpointError

MAX_DEPTH = 256
MAX_VALUES = 500_000
# The longest text of an integer that fits in 53 bits; larger ones are tagged by `tree`.
MAX_INT_TEXT = 17

# Strings are passed over as a whole, the end of the text ends one too: so no text takes more than one pass.
_STRUCTURE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)


def loads(data: bytes, place: str) -> Any:
    """The value of a strict JSON text. `place` begins the message of every CheckpointError."""
    try:
        text = data.decode("utf-8")
        _check_size(text)
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except ValueError as error:
        raise CheckpointError(f"{place}: not valid JSON ({error})") from error


def num_values(text: bytes) -> int:
    """At least as many as a text of ours holds; one beyond `MAX_VALUES` may not be read again."""
    return text.count(b",") + 1


def dumps(value: Any, indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")


def _check_size(text: str) -> None:
    """Before the parser sees it, which would run out of stack, or make 64 bytes of every two."""
    if text.count('"') > 4 * MAX_VALUES or text.count("\\") > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values")
    depth = count = 0
    for match in _STRUCTURE.finditer(text):
        mark = match.group()
        if mark in "[{":
            depth += 1
        elif mark in "]}":
            depth -= 1
        elif mark == ",":
            count += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return result


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _integer(text: str) -> int:
    if len(text) > MAX_INT_TEXT:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a float")
    return value
