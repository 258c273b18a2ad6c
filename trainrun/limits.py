"""What a value may be, written as a type, as `Annotated[int, Limits(at_least=1)]`; and fields that say it. No torch.

The fields of the config and the signatures of models, tasks, optimizers, schedules and readers say their limits in
these types; the checks before a run, the messages and `--help` are made from them.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_COMPARISONS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "at_least": (operator.ge, "{} or more"),
    "above": (operator.gt, "more than {}"),
    "at_most": (operator.le, "at most {}"),
    "below": (operator.lt, "below {}"),
}


@dataclass(frozen=True)
class Limits:
    """The range of a number, which must be finite."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        return " and ".join(text.format(limit) for _, text, limit in self._set())

    def allow(self, value: float) -> bool:
        return math.isfinite(value) and all(compare(value, limit) for compare, _, limit in self._set())

    def _set(self) -> list[tuple[Callable[[float, float], bool], str, float]]:
        limits = ((*_COMPARISONS[name], getattr(self, name)) for name in _COMPARISONS)
        return [(compare, text, limit) for compare, text, limit in limits if limit is not None]


@dataclass(frozen=True)
class Lasts:
    """A text that is a duration: so many of some units, as `2epoch`."""

    units: tuple[str, ...] = ("step", "epoch", "sample", "token")

    def __str__(self) -> str:
        return f"as {', '.join(f'2{unit}' for unit in self.units)}"

    def allow(self, value: str) -> bool:
        found = re.fullmatch(rf"(\d+\.?\d*(?:e\+?\d+)?)\s*({'|'.join(self.units)})s?", value.strip())
        return found is not None and 0 < float(found[1]) < math.inf


Number = Annotated[float, Limits()]  # a bare float may be nan
Count = Annotated[int, Limits(at_least=1)]
NotNegativeInt = Annotated[int, Limits(at_least=0)]
NotNegative = Annotated[float, Limits(at_least=0)]
Positive = Annotated[float, Limits(above=0)]
Fraction = Annotated[float, Limits(at_least=0, at_most=1)]
BelowOne = Annotated[float, Limits(at_least=0, below=1)]
Steps = Annotated[float, Limits(at_least=1)]  # also as 1e3
Rates = NotNegative | list[NotNegative]  # an optimizer may have several groups of parameters
Lasting = Annotated[str, Lasts()]
Auto = Literal["auto"]
NODE, NODES, NAMED, ANY = "node", "nodes", "named", "any"  # a `_target_`; several by name; either; anything


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold, and neither nan nor infinite."""
    return is_number(value) and math.isfinite(value)


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (whole and abs(value) <= sys.float_info.max)


def fits(value: Any, kind: Any) -> bool:
    """Whether a plain value of a config is of that kind; a type that is not listed here takes any value."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in inner)
    if origin is Annotated:
        limits = [limit for limit in inner[1:] if isinstance(limit, Limits | Lasts)]
        return fits(value, inner[0]) and all(limit.allow(value) for limit in limits)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(fits(item, inner[0]) for item in value)
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if kind in (NoneType, None):
        return value is None
    if kind in (int, float):
        return is_number(value) and isinstance(value, int | kind)
    return isinstance(value, kind) if kind in (bool, str) else True


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
        return ", ".join([described(inner[0]), *(str(limit) for limit in inner[1:] if str(limit))])
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


def choices_of(kind: Any) -> tuple[str, ...]:
    """The names among the values of a kind; empty if it has none."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(name for part in get_args(kind) for name in choices_of(part))


@dataclass(frozen=True)
class Setting:
    """What is known of one field. kind: the type of its values; parse: raises ValueError for a wrong one.

    words: values that are read as others. opens: what may stand below it, if keys there may be the user's own. short:
    of a section, the field that `section=value` sets. typed: where the nodes of a field are typed and saved.
    """

    key: str
    default: Any
    help: str
    kind: Any
    parse: Callable[[Any], object] | None = None
    aliases: tuple[str, ...] = ()
    words: dict[str, str] = field(default_factory=dict)
    opens: str = ""
    required: bool = False
    also: tuple[str, ...] = ()
    short: str = ""
    section: type | None = None
    typed: str = ""

    @property
    def allowed(self) -> str:
        """What a value must be, in words."""
        return described(self.kind)


def setting(
    default: Any, help: str, *, kind: Any = None, parse: Callable[[Any], object] | None = None,
    aliases: tuple[str, ...] = (), words: dict[str, str] | None = None, **limits: float,
) -> Any:  # fmt: skip
    """A field of one value. kind: where it takes more than its annotation says; limits: as in `Limits`."""
    about = {"help": help, "kind": kind, "parse": parse, "aliases": aliases, "words": words or {}}
    return field(default=default, metadata={**about, "limits": Limits(**limits)})


def choice(*choices: str, help: str, default: str = "", **about: Any) -> Any:
    """A field of one of some names; the first is the default unless another is named."""
    return setting(default or choices[0], help, kind=Literal[choices], **about)


def node(help: str, *, required: bool = False, named: bool = False, also: tuple[str, ...] = ()) -> Any:
    """An open node: `_target_` and the arguments of that target, or null.

    named: a map of several, by name, is taken too. also: names that stand for something else.
    """
    about = {"help": help, "opens": NAMED if named else NODE, "required": required, "also": also}
    return field(default=None, metadata=about)


def nodes(help: str, typed: str = "") -> Any:
    """Open nodes by name: `section.mine._target_=my_file.MyClass`. typed: the section, if it is not this field."""
    return field(default_factory=dict, metadata={"help": help, "opens": NODES, "typed": typed})


def section(kind: type, short: str = "", aliases: tuple[str, ...] = ()) -> Any:
    """A part of the config with fields of its own. short: the one that `section=value` sets."""
    return field(default_factory=kind, metadata={"help": "", "short": short, "aliases": aliases})
