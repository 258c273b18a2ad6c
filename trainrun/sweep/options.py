"""The settings of a sweep itself, `sweep=random sweep.jobs=4`: read before composing, part of no job's config."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainrun.config.validate import nearest
from trainrun.errors import ConfigError
from trainrun.limits import parse_seconds

OPTION: Final = re.compile(r"sweep(\.\w+)?=")
AUTO = "auto"
KINDS = ("grid", "random")


@dataclass(frozen=True)
class SweepOptions:
    """kind: grid or random. trials: of a random sweep, all calls together. seed: of its points.

    jobs: side by side; None is as many as the GPUs, or the cores, can take. per_device: jobs that share a GPU.
    max_seconds: after which the jobs save and the sweep ends.
    """

    kind: str = "grid"
    trials: int | None = None
    seed: int = 0
    jobs: int | None = 1
    per_device: int = 1
    max_seconds: float | None = None


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of the sweep itself, and those of its jobs."""
    own = [word for word in words if OPTION.match(word)]
    return own, [word for word in words if word not in own]


def read_options(words: Sequence[str]) -> SweepOptions:
    """Return the settings that these words give. Raise ConfigError for all mistakes."""
    values: dict[str, Any] = {}
    faults = []
    for word in words:
        key, _, text = word.partition("=")
        if key not in READERS:
            faults.append(f"{key}: no such setting of a sweep.{nearest(key, READERS)}")
            continue
        name, allowed, read = READERS[key]
        try:
            values[name] = read(text)
        except ValueError:
            faults.append(f"{word}: must be {allowed}")
    options = SweepOptions(**values)
    if not faults and options.kind == "random" and options.trials is None:
        faults.append("sweep=random: needs the number of points; add sweep.trials=20")
    for key, name in (("sweep.trials", "trials"), ("sweep.seed", "seed")):
        if options.kind != "random" and name in values:
            faults.append(f"{key}={values[name]}: is of sweep=random; a grid has all its points")
    if faults:
        raise ConfigError(*faults)
    return options


def whole_number(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError(text)
        return number

    return read


def jobs_of(text: str) -> int | None:
    return None if text == AUTO else whole_number(1)(text)


def seconds_of(text: str) -> float:
    seconds = parse_seconds(float(text) if re.fullmatch(r"[\d.]+", text) else text)
    if not seconds:
        raise ValueError(text)
    return seconds


def kind_of(text: str) -> str:
    if text not in KINDS:
        raise ValueError(text)
    return text


# The field of each setting, what is allowed, and how the text is read.
READERS: Final[dict[str, tuple[str, str, Callable[[str], Any]]]] = {
    "sweep": ("kind", " or ".join(KINDS), kind_of),
    "sweep.trials": ("trials", "a whole number, 1 or more", whole_number(1)),
    "sweep.seed": ("seed", "a whole number, 0 or more", whole_number(0)),
    "sweep.jobs": ("jobs", "auto, or a whole number, 1 or more", jobs_of),
    "sweep.per_device": ("per_device", "a whole number, 1 or more", whole_number(1)),
    "sweep.max_time": ("max_seconds", "a time, as 90s, 10min or 2h", seconds_of),
}
