"""Values, and what they must be, in words; and the name that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trainrun.limits import Lasts, Limits, choices_of

RANGES = {"at_least": "{} or more", "above": "more than {}", "at_most": "at most {}", "below": "below {}"}
_LOOKS_OTHER = re.compile(r"[+-]?\.?\d|(?i:true|false|null|none)\Z")


def closest(word: str, known: Iterable[object]) -> str:
    """The name that was probably meant, in small or large letters, or by its beginning; empty if none is near."""
    names = {str(name).lower(): str(name) for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.55)
    begun = [name for name in names if len(word) > 1 and name.startswith(word.lower())]
    return names[[*found, *begun][0]] if found or begun else ""


def nearest(word: str, known: Iterable[object]) -> str:
    """` Did you mean x?`; empty if no name is near."""
    name = closest(word, known)
    return f" Did you mean {name}?" if name else ""


def misfit(value: Any, kind: Any) -> str:
    """The value with what is allowed, where it is not."""
    choices = choices_of(kind)
    near = nearest(str(value), choices)
    typed = value if choices and isinstance(value, str) else shown(value)
    return f"{typed}: must be {described(kind)}{'.' if near else ''}{near}"


def shown(value: Any) -> str:
    """A value as it is typed; a text that looks like something else in its quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and _LOOKS_OTHER.match(value):
        return f"'{value}' (a text)"
    return str(value)


def described(kind: Any) -> str:
    """What a value of that kind is, as a message says it: `a whole number, 1 or more, or auto`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        last = {NoneType: "null"}
        parts = [last.get(part) or described(part).removeprefix("one of ") for part in inner]
        if set(inner) == {bool, NoneType}:
            return "true, false or null"
        return ", or ".join(sorted(parts, key=lambda part: part == "null"))
    if origin is Annotated:
        return ", ".join([described(inner[0]), *filter(None, map(_limit, inner[1:]))])
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (list, Sequence):
        return f"a list of {_plural(inner[0])}"
    if origin is tuple:
        return f"{len(inner)} {_plural(inner[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
        kind, "a value"
    )


def _plural(kind: Any) -> str:
    return described(kind).removeprefix("a ").replace("number", "numbers", 1)


def _limit(limit: Any) -> str:
    """`1 or more and below 2`; a note of another kind as it is."""
    if isinstance(limit, Lasts):
        return f"as {', '.join(f'2{unit}' for unit in limit.units)}"
    if not isinstance(limit, Limits):
        return str(limit)
    found = ((text, getattr(limit, name)) for name, text in RANGES.items())
    return " and ".join(text.format(value) for text, value in found if value is not None)
