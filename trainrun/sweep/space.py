"""From words with several values to the words of each job: every combination, or points that are drawn at random."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, ValueType
from hydra.errors import HydraException

from trainrun.config.messages import explain_unreadable
from trainrun.errors import ConfigError
from trainrun.output import masked_words
from trainrun.sweep.options import read_options, split_options
from trainrun.sweep.points import REPEATED


def combinations_of(words: list[str]) -> list[tuple[str, ...]]:
    """Return the words of every job of a call. Raise ConfigError."""
    own, job_words = split_options(words)
    options = read_options(own)
    if options.kind == "grid" or options.trials is None:
        return expand(job_words)
    return draw_points(job_words, options.trials, options.seed)


def words_to_check(words: list[str]) -> list[tuple[str, ...]]:
    """Return combinations in which every value is, and both ends of every interval. Raise ConfigError.

    Of random points each value is beside the first of all others: their combinations may be too many to count.
    """
    own, job_words = split_options(words)
    if read_options(own).kind == "grid":
        return expand(job_words)
    values = [ends_of(word) or choices_of_word(word) for word in job_words]
    first = tuple(choices[0] for choices in values)
    others = [(place, value) for place, choices in enumerate(values) for value in choices[1:]]
    return [first, *((*first[:place], value, *first[place + 1 :]) for place, value in others)]


def expand(words: list[str]) -> list[tuple[str, ...]]:
    """Return the words of every job; the first word with several values varies slowest. Raise ConfigError.

    Words that begin with a dash are flags, one word each, and the same for all jobs.
    """
    return list(itertools.product(*[choices_of_word(word) for word in words]))


def draw_points(words: list[str], count: int, seed: int) -> list[tuple[str, ...]]:
    """Return the words of jobs at random points of a space. Raise ConfigError.

    Point n depends on (seed, n) alone, for each word by itself: more points, or another word, change no other value.
    A seed or a fold with several values is no part of the space: each point is trained with all of them.
    """
    repeated = [word for word in words if key_of(word) in REPEATED]
    jobs: list[tuple[str, ...]] = []
    for number in range(count):
        point = [word if word in repeated else draw_value(word, seed, number) for word in words]
        jobs += expand(point)
    return jobs


def draw_value(word: str, seed: int, number: int) -> str:
    """Return the word with one value of its choices or of its interval."""
    generator = random.Random(f"{seed} {number} {key_of(word)}")
    interval = interval_of(word)
    if interval is None:
        return generator.choice(choices_of_word(word))
    low, high = interval.low, interval.high
    whole = isinstance(low, int) and isinstance(high, int)
    top = high + 1 if whole else high  # each whole number has an equal share
    if interval.log:
        value = math.exp(generator.uniform(math.log(low), math.log(top)))
    else:
        value = generator.uniform(low, top)
    text = str(min(math.floor(value), high)) if whole else f"{value:.6g}"
    return f"{word.partition('=')[0]}={text}"


def ends_of(word: str) -> list[str]:
    """Return the word with both ends of its interval; empty without one."""
    interval = interval_of(word)
    key = word.partition("=")[0]
    return [] if interval is None else [f"{key}={interval.low}", f"{key}={interval.high}"]


class Interval(NamedTuple):
    """Numbers to draw from; whole ones if both ends are of type int."""

    low: float
    high: float
    log: bool


def interval_of(word: str) -> Interval | None:
    """Return the interval of a word; None if it has none. Raise ConfigError for one that cannot be drawn from."""
    override = parse_word(word)
    if override is None or override.value_type is not ValueType.INTERVAL_SWEEP:
        return None
    sweep = override.value()
    assert isinstance(sweep, IntervalSweep)
    low, high, log = sweep.start, sweep.end, "log" in sweep.tags
    if low is None or high is None or not low < high:
        raise ConfigError(f"{word}: the interval must begin below its end")
    if log and low <= 0:
        raise ConfigError(f"{word}: a logarithmic interval must begin above 0")
    return Interval(low, high, log)


def choices_of_word(word: str) -> list[str]:
    """Return a word for each value: `lr=1,2` -> `lr=1`, `lr=2`; a word with one value stays as it was typed."""
    override = parse_word(word)
    if override is None or not override.is_sweep_override():
        return [word]
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise ConfigError(f"{word}: a sweep takes names, not a pattern, as {override.key_or_group}=one,two")
    if override.value_type is ValueType.INTERVAL_SWEEP:
        raise ConfigError(
            f"{word}: a grid takes values, as {override.key_or_group}=0.1,0.2; an interval is for random points: add "
            "sweep=random sweep.trials=20"
        )
    try:
        values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:
        raise ConfigError(explain_unreadable(word)) from error
    if not values:
        raise ConfigError(f"{word}: holds no value")
    if len(set(masked_words(values))) < len(set(values)):
        key = override.get_key_element()
        raise ConfigError(
            f"{key}=***: values of a secret would stand in the names of folders and in tables; put them into the "
            f"environment, as '{key}=${{oc.env:FIRST}},${{oc.env:SECOND}}'"
        )
    return values


@lru_cache(maxsize=1024)
def parse_word(word: str) -> Override | None:
    """Return a word as Hydra reads it; None for a flag. Raise ConfigError."""
    if word.startswith("-"):
        return None
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(explain_unreadable(word)) from error


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def columns_that_vary(combinations: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the numbers of the words that are not the same in all combinations."""
    return [place for place, column in enumerate(zip(*combinations, strict=True)) if len(set(column)) > 1]
