"""The allowed values of settings: a type such as `Annotated[int, Limits(at_least=1)]`, or a text such as `2epoch`.

The fields of the config, and the signatures of models, tasks, optimizers, schedules and readers, use these types.
The checks before a run, the messages and `--help` are made from them. Nothing here imports torch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Limits:
    """The range of a number, which must be finite. whole: only whole numbers, of which 1e3 is one."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    whole: bool = False

    def allow(self, value: float) -> bool:
        return math.isfinite(value) and not (
            (self.whole and value % 1)
            or (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
            or (self.below is not None and value >= self.below)
        )


@dataclass(frozen=True)
class DurationLimits:
    """A text that is a duration in one of some units, such as `2epoch`."""

    units: tuple[str, ...] = ("step", "epoch", "sample", "token")

    def allow(self, value: str) -> bool:
        try:
            return bool(parse_duration(value, *self.units))
        except ValueError:
            return False


Number = Annotated[float, Limits()]  # a bare float may be nan
Count = Annotated[int, Limits(at_least=1)]
NotNegativeInt = Annotated[int, Limits(at_least=0)]
NotNegative = Annotated[float, Limits(at_least=0)]
Positive = Annotated[float, Limits(above=0)]
Fraction = Annotated[float, Limits(at_least=0, at_most=1)]
PositiveFraction = Annotated[float, Limits(above=0, at_most=1)]
BelowOne = Annotated[float, Limits(at_least=0, below=1)]
Steps = Annotated[float, Limits(at_least=1)]  # also as 1e3
Rates = NotNegative | list[NotNegative]  # an optimizer may have several groups of parameters
Lasting = Annotated[str, DurationLimits()]
Auto = Literal["auto"]
NumberType = Literal["float32", "float64", "int64", "uint8"]  # of inputs
TargetType = Literal["auto", "class", "int64", "float32", "float64"]
PixelType = Literal["uint8", "float32"]
Fit = Literal["crop", "stretch"]
StreamOrder = Literal["shuffled", "in_order"]
HeldOutBy = Literal["auto", "random", "group", "last"]
NODE, NODES, NAMED, ANY = "node", "nodes", "named", "any"  # a `_target_`; several by name; either; anything


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number that fits into a float."""
    return is_number(value) and math.isfinite(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a number that fits into a float."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (is_integer and abs(value) <= sys.float_info.max)


def fits_kind(value: Any, kind: Any) -> bool:
    """Return whether a plain value of a config has a type. A type that is not handled here accepts any value."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits_kind(value, part) for part in inner)
    if origin is Annotated:
        limits = [limit for limit in inner[1:] if isinstance(limit, Limits | DurationLimits)]
        return fits_kind(value, inner[0]) and all(limit.allow(value) for limit in limits)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(fits_kind(item, inner[0]) for item in value)
    if origin is tuple and Ellipsis not in inner:
        return (
            isinstance(value, list | tuple) and len(value) == len(inner) and all(map(fits_kind, value, inner))
        )
    if kind in (NoneType, None):
        return value is None
    if kind in (int, float):
        return is_number(value) and isinstance(value, int | kind)
    return isinstance(value, kind) if kind in (bool, str) else True


def list_choices(kind: Any) -> tuple[str, ...]:
    """Return the names that a type allows (of `Literal`); () if it has none."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(name for part in get_args(kind) for name in list_choices(part))


@dataclass(frozen=True)
class Setting:
    """All facts about one field of the config.

    kind: the type of its values. parse: raises ValueError for a wrong value. words: values that stand for others.
    opens: which keys of the user may stand below it. short: the field of a section that `section=value` sets.
    typed: the section in which the nodes of a field are typed and saved.
    read_by: who reads the setting, if no training reads it before its first batch.
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
    read_by: str = ""


def setting(
    default: Any, help: str, *, kind: Any = None, parse: Callable[[Any], object] | None = None,
    aliases: tuple[str, ...] = (), words: dict[str, str] | None = None, read_by: str = "", **limits: Any,
) -> Any:  # fmt: skip
    """Declare a field with one value.

    kind: its type, if the annotation says too little. limits: as in `Limits`.
    """
    about = {
        "help": help, "kind": kind, "parse": parse, "aliases": aliases, "words": words or {}, "read_by": read_by,
    }  # fmt: skip
    return field(default=default, metadata={**about, "limits": Limits(**limits)})


def choice(*choices: str, help: str, default: str = "", **about: Any) -> Any:
    """Declare a field with one of several names. The first name is the default unless another is given."""
    return setting(default or choices[0], help, kind=Literal[choices], **about)


def node(help: str, *, required: bool = False, named: bool = False, also: tuple[str, ...] = ()) -> Any:
    """Declare an open node: `_target_` and the arguments of that target, or null.

    named: several nodes by name are allowed too. also: names that are allowed instead of a node.
    """
    about = {"help": help, "opens": NAMED if named else NODE, "required": required, "also": also}
    return field(default=None, metadata=about)


def nodes(help: str, typed: str = "") -> Any:
    """Declare a field with open nodes by name: `section.mine._target_=my_file.MyClass`.

    typed: the section in which they are typed, if it is not this field.
    """
    return field(default_factory=dict, metadata={"help": help, "opens": NODES, "typed": typed})


def section(kind: type, short: str = "", aliases: tuple[str, ...] = ()) -> Any:
    """Declare a section of the config. short: the field that `section=value` sets."""
    return field(default_factory=kind, metadata={"help": "", "short": short, "aliases": aliases})


_DURATION = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*([a-z]+?)(?:(?<=[a-z]{2})s)?\Z")  # `10ms` is no `10m`
_CLOCK = {
    **dict.fromkeys(("s", "sec", "second"), 1),
    **dict.fromkeys(("m", "min", "minute"), 60),
    **dict.fromkeys(("h", "hour"), 3600),
    **dict.fromkeys(("d", "day"), 86400),
}
STEP, EPOCH, SECOND, SAMPLE, TOKEN = "step", "epoch", "second", "sample", "token"
SHORT = {"ep": EPOCH, "ba": STEP, "sp": SAMPLE, "tok": TOKEN}  # as Composer has them
UNITS = {STEP: "500step", EPOCH: "2epoch", SECOND: "10min", SAMPLE: "1e6sample", TOKEN: "1e9token"}
_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*(?:([kmgt])(b|ib)?|b)\Z", re.IGNORECASE)
_CACHES = "none, memory, pool:<size> (pool:500MB, pool:2GiB) or disk:<folder> (disk:/scratch/cache)"


@dataclass(frozen=True)
class Duration:
    """An amount of a unit of `UNITS`. Only epochs and seconds may be fractions."""

    amount: float
    unit: str


def parse_duration(value: Any, *units: str) -> Duration:
    """Parse a text such as `2epoch` or `1e9token`, in one of some units (default: all). Raise ValueError."""
    units = units or tuple(UNITS)
    match = _DURATION.match(value.strip().lower()) if isinstance(value, str) else None
    if match is not None:
        amount, unit = float(match[1]), SHORT.get(match[2], match[2])
        if unit in _CLOCK:
            amount, unit = amount * _CLOCK[unit], SECOND
        is_allowed_amount = amount.is_integer() or unit in (EPOCH, SECOND)
        if unit in units and is_allowed_amount and 0 < amount < 2**53:
            return Duration(amount, unit)
    raise ValueError(f"must be a duration, as {' or '.join(UNITS[unit] for unit in units)}")


def parse_interval(value: Any, *units: str) -> Duration:
    """Parse an interval: 100 (steps), 0.25 or 1.0 (part of an epoch), or a duration. Raise ValueError.

    A duration in epochs must be at most one epoch, or whole epochs.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Duration(value, STEP)
    if isinstance(value, float) and 0 < value <= 1:
        return Duration(value, EPOCH)
    try:
        duration = parse_duration(value, *units)
    except ValueError as error:
        duration, rest = None, str(error).removeprefix("must be ")
    else:
        rest = "a part of an epoch or whole ones, as 0.25epoch or 2epoch"
    if duration is None or (
        duration.unit == EPOCH and duration.amount > 1 and not duration.amount.is_integer()
    ):
        raise ValueError(f"must be a whole number of steps (100), a part of an epoch (0.25, 1.0), or {rest}")
    return duration


def parse_untimed_interval(value: Any) -> Duration:
    """Parse an interval that is not a time. Raise ValueError."""
    return parse_interval(value, STEP, EPOCH, SAMPLE, TOKEN)


def parse_saving_interval(value: Any) -> Duration | None:
    """Parse an interval that is not a time, or null. Raise ValueError, which names the setting for a time."""
    try:
        return None if value is None else parse_untimed_interval(value)
    except ValueError as error:
        raise ValueError(f"{error}; for a time: checkpoint.train_time_interval=10min") from error


URL = re.compile(r"[a-z][a-z0-9+.-]+://.+")


def is_url(text: object) -> bool:
    """Return whether a text is the URL of a file or folder in an object store."""
    return isinstance(text, str) and URL.fullmatch(text) is not None


def parse_url(value: Any) -> str | None:
    """Return the URL of an object store; None for null. Raise ValueError for other texts."""
    if value is not None and not is_url(value):
        raise ValueError("must be a URL, as s3://bucket/run or file:///folder")
    return None if value is None else str(value).rstrip("/")


def parse_any_duration(value: Any) -> Duration | None:
    """Parse a duration of any unit; None for null. Raise ValueError."""
    return None if value is None else parse_duration(value)


def parse_steps_or_epochs(value: Any) -> Duration | None:
    """Parse a number of steps or of whole epochs; None for null. Raise ValueError."""
    duration = None if value is None else parse_interval(value, STEP, EPOCH)
    if duration is not None and not float(duration.amount).is_integer():
        raise ValueError("must be whole epochs or steps, as 1epoch or 500step")
    return duration


def parse_seconds(value: Any) -> float | None:
    """Parse None, seconds, `90s`, `10min`, `2h`, `1d`, or DD:HH:MM:SS. Raise ValueError."""
    if value is None:
        return None
    if is_finite(value) and value > 0:
        return float(value)
    if isinstance(value, str):
        parts = value.split(":")
        if 1 < len(parts) <= 4 and all(part.isdigit() for part in parts):
            scales = zip(reversed(parts), (1, 60, 3600, 86400), strict=False)
            if seconds := float(sum(int(part) * scale for part, scale in scales)):
                return seconds
        else:
            with suppress(ValueError):
                return parse_duration(value, SECOND).amount
    raise ValueError("must be seconds, `90s`, `10min`, `2h`, `1d` or DD:HH:MM:SS")


def check_batch_limit(value: Any) -> None:
    """Raise ValueError unless the value is a number of batches, or a fraction of them."""
    is_number_of_batches = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_number_of_batches and not (isinstance(value, float) and 0 < value <= 1):
        raise ValueError("must be a fraction above 0 up to 1.0, or a whole number of batches")


def check_batch_limit_or_zero(value: Any) -> None:
    """Raise ValueError unless the value is a number of batches, a fraction of them, or 0 for none."""
    if isinstance(value, bool) or value != 0:
        check_batch_limit(value)


@dataclass(frozen=True)
class CacheSpec:
    """The parsed value of `data.cache`. text: as typed. num_bytes: the size of a pool. folder: of a cache on disk."""

    text: str
    mode: str = "none"
    num_bytes: int | None = None
    folder: Path | None = None


def parse_cache(spec: Any) -> CacheSpec:
    """Parse the value of `data.cache`. No file is read. Raise ValueError."""
    text = str(spec).strip()
    mode, colon, rest = (part.strip() for part in text.partition(":"))
    mode = mode.lower()
    if mode == "disk" and rest:
        return CacheSpec(text, mode, folder=Path(rest).expanduser())
    if mode == "pool" and (num_bytes := _parse_bytes(rest)) > 0:
        return CacheSpec(text, mode, num_bytes=num_bytes)
    if mode in ("none", "memory") and not colon:
        return CacheSpec(text, mode)
    raise ValueError(f"must be {_CACHES}")


def _parse_bytes(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        return 0
    base = 1024 if (match[3] or "").lower() == "ib" else 1000
    return int(float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1 if match[2] else 0))


def parse_name_map(value: Any) -> dict[str, str]:
    """Parse a map from text to text; {} for null. Raise ValueError."""
    if value is None:
        return {}
    if isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair):
        return value
    raise ValueError("must be a map of beginnings of names, as {backbone.: encoder.}, or null")


def check_shares(value: Any) -> None:
    """Raise ValueError unless the value is a map from names to positive numbers, or null."""
    numbers = list(value.values()) if isinstance(value, dict) else []
    if value is not None and not (numbers and all(is_finite(share) and share > 0 for share in numbers)):
        raise ValueError("must be numbers above 0 by the names of data.train, as {a: 0.7, b: 0.3}, or null")
