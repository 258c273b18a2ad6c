"""JSON from a file that nobody vouches for: bounded in size and depth, and with one meaning only."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from trainrun.errors import CheckpointError

MAX_DEPTH = 256
# The longest text of an integer that fits in 53 bits; larger ones are tagged by `tree`.
MAX_INT_TEXT = 17

_BRACKET = re.compile(r"[\[\]{}]")


def loads(data: bytes, place: str) -> Any:
    """The value of a strict JSON text. `place` begins the message of every CheckpointError."""
    try:
        text = data.decode("utf-8")
        _check_depth(text)
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except ValueError as error:
        raise CheckpointError(f"{place}: not valid JSON ({error})") from error


def dumps(value: Any, indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")


def _check_depth(text: str) -> None:
    """Before the parser sees it, which would run out of stack."""
    no_escapes = text.replace("\\\\", "").replace('\\"', "")
    outside_strings = "".join(no_escapes.split('"')[::2])
    depth = 0
    for match in _BRACKET.finditer(outside_strings):
        depth += 1 if match.group() in "[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


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
