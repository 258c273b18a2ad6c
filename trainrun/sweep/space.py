"""Turn settings with several values into the settings of each job: all combinations, or points of a space.

A setting can apply to one branch of a sweep: `model=mlp: model.width=16,32` varies the width only if the model is
mlp.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    Glob,
    IntervalSweep,
    Override,
    Transformer,
    ValueType,
)
from hydra.errors import HydraException

from trainrun.config.argv import CUSTOM, find_conf_dir, find_user_conf_dirs, list_options
from trainrun.config.messages import explain_unparsable_override
from trainrun.errors import ConfigError
from trainrun.output import mask_arguments
from trainrun.sweep.options import read_options, split_options
from trainrun.sweep.points import REPEATED

BRANCH: Final = re.compile(
    r"(?P<condition>[\w./]+=[^\s:,{}()\[\]]+):\s+(?P<setting>[+~]?[A-Za-z_][\w./]*=.*)"
)
FORMS = {  # of values of a sweep: what each takes
    "interval": "two numbers, as interval(1e-4,1e-1)",
    "int": "an interval, as int(interval(1,8))",
    "tag": "log and an interval, as tag(log, interval(1e-4,1e-1))",
    "range": "a number or two, as range(5) or range(1,5)",
    "choice": "values, as choice(1,2)",
    "glob": "a pattern of names, as glob(*)",
}
QUOTES = "\"'"
REFERENCE: Final = re.compile(r"\$\\\{[^{}]*\\\}")  # in a list, as Hydra escapes it
MOST_COUNTED = 100_000  # points of a space; one with more is taken as endless
WHOLE = "must be a whole number"  # begins the message for another one
INSIDE = 0.382  # of an interval: the place of a value that is no whole number
MOST_REPEATED = 1000  # draws one after the other that bring no new point


class Interval(NamedTuple):
    """An interval of numbers for random values. They are whole if both ends are of type int."""

    low: float
    high: float
    log: bool

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Dimension:
    """One varied setting of a sweep. choices: an override for each of its values; empty for an interval.

    condition: an override that a point must contain for this setting to apply; empty if it applies to all points.
    """

    word: str
    choices: tuple[str, ...]
    interval: Interval | None = None
    condition: str = ""

    @property
    def key(self) -> str:
        return read_override_key(self.word)

    @property
    def name(self) -> str:
        """The key, with the condition of the branch, so that it is unique."""
        return f"{self.key} [{self.condition}]" if self.condition else self.key

    def applies_to(self, point: Sequence[str]) -> bool:
        """Return whether this override applies to a point: the point contains its condition."""
        return not self.condition or any(
            strip_override_marks(word) == strip_override_marks(self.condition) for word in point
        )

    def format_override(self, value: object) -> str:
        return f"{self.word.partition('=')[0]}={value}"

    @property
    def values_to_check(self) -> tuple[str, ...]:
        """The choices, or the override with the lower end of its interval, a fraction inside, and the upper end."""
        if self.interval is None:
            return self.choices
        low, high = self.format_override(self.interval.low), self.format_override(self.interval.high)
        return (low, high) if self.interval.is_whole else (low, self.fraction, high)

    @property
    def fraction(self) -> str:
        """The override with a value of its interval that is no whole number, as most of the values are."""
        assert self.interval is not None
        return self.format_override(
            f"{self.interval.low + INSIDE * (self.interval.high - self.interval.low):.6g}"
        )

    @property
    def all_choices(self) -> tuple[str, ...] | None:
        """An override for each value; None if there are endless or too many values."""
        if self.interval is None:
            return self.choices
        if not self.interval.is_whole or self.interval.high - self.interval.low >= MOST_COUNTED:
            return None
        return tuple(map(self.format_override, range(int(self.interval.low), int(self.interval.high) + 1)))


def parse_dimensions(words: Sequence[str]) -> list[Dimension]:
    """Parse the overrides of a sweep. Raise ConfigError for an override that cannot be read."""
    dimensions: list[Dimension] = []
    for word in words:
        condition, setting = split_branch(word)
        interval = read_interval(setting)
        choices = () if interval else tuple(parse_choices(setting))
        earlier = [choice for dimension in dimensions for choice in dimension.values_to_check]
        if condition and not Dimension(setting, choices, None, condition).applies_to(earlier):
            raise ConfigError(
                f"{word}: {condition} is not a value of an earlier setting of the sweep; name one, as "
                f"model=mlp,cnn 'model=mlp: {setting}'"
            )
        dimensions.append(Dimension(setting, choices, interval, condition))
    return dimensions


def split_branches(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into the overrides of one branch, and all others."""
    branches = [word for word in words if split_branch(word)[0]]
    return branches, [word for word in words if word not in branches]


def split_branch(word: str) -> tuple[str, str]:
    """Split an override into its condition and its setting. The condition is empty for an override of all points."""
    branch = BRANCH.fullmatch(word)
    return (branch["condition"], branch["setting"]) if branch else ("", word)


def build_point(dimensions: Sequence[Dimension], pick: Callable[[Dimension], str]) -> tuple[str, ...]:
    """Return the overrides of a point: `pick` returns the override of each dimension that applies to it."""
    point: list[str] = []
    for dimension in dimensions:
        if dimension.applies_to(point):
            point.append(pick(dimension))
    return tuple(point)


def list_points(words: list[str]) -> list[list[tuple[str, ...]]]:
    """Return the points of a call, each as the overrides of its jobs. Raise ConfigError.

    The jobs of a point differ only in seed or fold. A sweep=optuna creates its points later, one at a time.
    """
    own, job_overrides = split_options(words)
    about = read_options(own)
    if about.kind == "optuna":
        return []
    if about.kind == "random" and about.trials is not None:
        return draw_points(job_overrides, about.trials, about.seed)
    points: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in expand_grid(job_overrides):
        points.setdefault(tuple(word for word in row if read_override_key(word) not in REPEATED), []).append(
            row
        )
    return list(points.values())


def list_point_jobs(dimensions: Sequence[Dimension], point: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of each job of a point. Every value of seed and fold gives a job."""
    typed = {dimension.word: dimension.choices for dimension in dimensions if dimension.key in REPEATED}
    return list(itertools.product(*[typed.get(word, (word,)) for word in point]))


def expand_grid(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of every job of a grid. The first varies slowest. Raise ConfigError for an interval."""
    return list(iterate_points(parse_dimensions(words)))


def iterate_points(dimensions: Sequence[Dimension], row: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not dimensions:
        yield row
        return
    first, *others = dimensions
    if not first.applies_to(row):
        yield from iterate_points(others, row)
    elif first.interval is not None:
        raise ConfigError(
            f"{first.word}: a grid needs values, as {first.key}=0.1,0.2; for random points in an interval add "
            "sweep=random sweep.trials=20"
        )
    else:
        for choice in first.choices:
            yield from iterate_points(others, (*row, choice))


def num_points(dimensions: Sequence[Dimension]) -> int | None:
    """Return the number of points of a space; None if it is endless. Seeds and folds do not count."""
    points = all_points(tuple(dimensions))
    return None if points is None else len(points)


@lru_cache(maxsize=16)
def all_points(dimensions: tuple[Dimension, ...]) -> list[tuple[str, ...]] | None:
    """Return all points of a space, with seeds and folds as they were typed; None if it is endless."""
    counted: list[Dimension] = []
    most = 1
    for dimension in dimensions:
        choices = (dimension.word,) if dimension.key in REPEATED else dimension.all_choices
        most *= MOST_COUNTED if choices is None else len(choices)
        if choices is None or most >= MOST_COUNTED:
            return None
        counted.append(Dimension(dimension.word, choices, None, dimension.condition))
    return list(dict.fromkeys(iterate_points(counted)))


def list_overrides_to_check(words: list[str]) -> list[tuple[str, ...]]:
    """Return points that contain each value, and three values of each interval. Raise ConfigError.

    A space may have too many points to check all. So each value is combined with the first values of the others,
    in a branch to which it applies.
    """
    own, job_overrides = split_options(words)
    if read_options(own).kind == "grid":
        return expand_grid(job_overrides)
    dimensions = parse_dimensions(job_overrides)
    wanted = [dict[str, str]()]
    for dimension in dimensions:
        branch = branch_overrides(dimensions, dimension)
        wanted += [
            {**branch, dimension.name: value} for value in dimension.values_to_check[0 if branch else 1 :]
        ]

    def build_point_with(words: dict[str, str]) -> tuple[str, ...]:
        return build_point(
            dimensions, lambda dimension: words.get(dimension.name, dimension.values_to_check[0])
        )

    return list(map(build_point_with, wanted))


def explain_fraction(fault: str, words: list[str]) -> str:
    """Return the message for a value that is no whole number with the interval it is of, and how to write that."""
    for dimension in parse_dimensions(split_options(words)[1]):
        interval = dimension.interval
        if interval and not interval.is_whole and fault.startswith(f"{dimension.fraction}: {WHOLE}"):
            whole = f"int({dimension.word.partition('=')[2]})"
            return f"{dimension.word}: {fault.partition(': ')[2]}; write {dimension.format_override(whole)}"
    return fault


def branch_overrides(dimensions: Sequence[Dimension], dimension: Dimension) -> dict[str, str]:
    """Return the overrides that select the branch of a dimension, by the names of their dimensions."""
    if not dimension.condition:
        return {}
    condition = strip_override_marks(dimension.condition)
    other, choice = next(
        (other, choice)
        for other in dimensions
        for choice in other.values_to_check
        if strip_override_marks(choice) == condition
    )
    return {**branch_overrides(dimensions, other), other.name: choice}


def draw_points(words: Sequence[str], count: int, seed: int) -> list[list[tuple[str, ...]]]:
    """Draw `count` different random points of a space, and return their jobs; all points if the space has fewer.

    The n-th random value of a setting depends only on the setting, the seed and n. So more points or another
    setting change no other value. If the random points only repeat, the missing points follow in the order of a
    grid. Seeds and folds are not random: each point is trained with all of them.
    """
    dimensions = parse_dimensions(words)
    every = all_points(tuple(dimensions))
    wanted = count if every is None else min(count, len(every))
    points: dict[tuple[str, ...], None] = {}
    repeated = 0
    for number in itertools.count():
        if len(points) == wanted or repeated == MOST_REPEATED:
            break

        def pick(dimension: Dimension, number: int = number) -> str:
            return dimension.word if dimension.key in REPEATED else draw_value(dimension, seed, number)

        point = build_point(dimensions, pick)
        repeated = repeated + 1 if point in points else 0
        points[point] = None
    points.update(dict.fromkeys(every or ()))
    return [list_point_jobs(dimensions, point) for point in itertools.islice(points, wanted)]


def draw_value(dimension: Dimension, seed: int, number: int) -> str:
    """Return the override with a random value of its choices or its interval."""
    generator = random.Random(f"{seed} {number} {dimension.key}")
    interval = dimension.interval
    if interval is None:
        return generator.choice(dimension.choices)
    low, high = interval.low, interval.high
    top = high + 1 if interval.is_whole else high  # each whole number has an equal share
    if interval.log:
        value = math.exp(generator.uniform(math.log(low), math.log(top)))
    else:
        value = generator.uniform(low, top)
    return dimension.format_override(min(math.floor(value), high) if interval.is_whole else f"{value:.6g}")


def read_interval(word: str) -> Interval | None:
    """Return the interval of an override; None if it has none. Raise ConfigError for an invalid interval."""
    override = parse_word(word)
    if override is None or override.value_type is not ValueType.INTERVAL_SWEEP:
        return None
    sweep = override.value()
    assert isinstance(sweep, IntervalSweep)
    low, high, log = sweep.start, sweep.end, "log" in sweep.tags
    if sweep.tags - {"log"}:
        raise ConfigError(f"{word}: tag takes {FORMS['tag']}")
    if low is None or high is None or not low < high:
        raise ConfigError(f"{word}: the interval must begin below its end")
    if log and low <= 0:
        raise ConfigError(f"{word}: a logarithmic interval must begin above 0")
    return Interval(low, high, log)


def parse_choices(word: str) -> list[str]:
    """Return an override for each value: `lr=1,2` becomes `lr=1`, `lr=2`. An override with one value is not changed."""
    override = parse_word(word)
    if override is None or not override.is_sweep_override():
        return [word]
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return expand_glob(word, override)
    try:
        values = [
            f"{override.get_key_element()}={value}" for value in override.sweep_iterator(format_swept_value)
        ]
    except HydraException as error:
        raise ConfigError(explain_unparsable_override(word)) from error
    if not values:
        raise ConfigError(f"{word}: has no values")
    if len(set(mask_arguments(values))) < len(set(values)):
        key = override.get_key_element()
        raise ConfigError(
            f"{key}=***: values of a secret would appear in names of folders and in tables; put them into environment "
            f"variables, as '{key}=${{oc.env:FIRST}},${{oc.env:SECOND}}'"
        )
    return list(dict.fromkeys(values))  # equal ones make one job


def format_swept_value(value: Any) -> Any:
    """Return a value as it is typed. Hydra escapes also the braces and colons of a reference, as `${oc.env:NAME}`."""
    if isinstance(value, str) and "${" in value:
        return value
    text: str = Transformer.str(value)
    return REFERENCE.sub(lambda reference: reference[0].replace("\\", ""), text)


def expand_glob(word: str, override: Override) -> list[str]:
    """Return an override for each option that a pattern matches, as `model=glob(*)`. Raise ConfigError for none."""
    group, pattern = override.key_or_group, override.value()
    assert isinstance(pattern, Glob)
    names = list_options(group, [*find_user_conf_dirs([], Path.cwd()), find_conf_dir()])
    chosen = [name for name in pattern.filter(names) if name != CUSTOM]
    if not chosen:
        raise ConfigError(f"{word}: matches no option of a group; write the values, as {group}=one,two")
    return [f"{override.get_key_element()}={name}" for name in chosen]


@lru_cache(maxsize=1024)
def parse_word(word: str) -> Override | None:
    """Return an override as Hydra reads it; None for a flag. Raise ConfigError."""
    if word.startswith("-"):
        return None
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        name = re.match(r"[^=]+=(\w+)\(", word)
        if name and name[1] in FORMS:
            raise ConfigError(f"{word}: {name[1]} takes {FORMS[name[1]]}") from error
        raise ConfigError(explain_unparsable_override(word)) from error


def read_override_key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def strip_override_marks(word: str) -> str:
    """Return an override without quotes and the leading `+` of Hydra's grammar."""
    key, _, value = word.lstrip("+").partition("=")
    return f"{key}={value.strip(QUOTES)}"


def varied_keys(dimensions: Sequence[Dimension]) -> list[str]:
    """Return the keys that have different values in different jobs, in the order of the overrides."""
    varied = [one.key for one in dimensions if one.condition or one.interval or len(set(one.choices)) > 1]
    return list(dict.fromkeys(varied))
