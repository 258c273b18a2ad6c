"""The racers of a race: settings from files or quoted text, and the differences between two racers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainrun.benchmark.run_overrides import override_key, replace_overrides, resolve_overrides
from trainrun.config.compose import Composition, compose_run, prepare_command_line
from trainrun.config.schema import DataConfig, validation_nodes
from trainrun.errors import ConfigError
from trainrun.runs.resume import ABSENT, compare_configs, format_value_as_typed

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# How validation data is read: the judge reads it with the values of the first racer.
READS = ("max_sequence_length", "truncate", "padding", "max_tokens", "pad_multiple")
NO_DIFFERENCE = ("run_name", "seed")
# Keys of the config that are one difference with all that is below them.
TOGETHER = ("monitor", "checkpoint", "scheduler", "optimizer", "model", "task", "precision", "data.augment")
NOT_RACED = {
    "seed": "the race sets the seeds, see --seeds",
    "hydra.run.dir": "the race has a folder for each run, see --out",
    "loop": "a loop of your own cannot be judged; leave it out",
    "ckpt_path": "each run begins anew; use init_from for first weights",
}


@dataclass(frozen=True)
class Racer:
    """The settings of one racer. name: a letter, with --table followed by a difference. about: the settings as
    typed.
    """

    name: str
    about: str
    words: tuple[str, ...]


def read_racers(texts: Sequence[str], common: Sequence[str]) -> list[Racer]:
    """Return the racers A, B, ... of a command line. common: overrides of all. Raise ConfigError with all mistakes."""
    if len(texts) < 2:
        raise ConfigError(
            "race: needs two racers, each a file or quoted words: trainrun race A.yaml B.yaml, or "
            'trainrun race "preset=none" "preset=fast"'
        )
    if len(texts) > len(LETTERS):
        raise ConfigError(f"race: takes {len(LETTERS)} racers at most, and there are {len(texts)}")
    racers, faults, data = list[Racer](), list[str](), list[DataConfig]()
    for letter, text in zip(LETTERS, texts, strict=False):
        try:
            words = join_racer_overrides([*common], parse_racer(text))
            racers.append(Racer(letter, text, tuple(words)))
            data.append(compose_racer(words).config.data)
        except ConfigError as error:
            faults += [f"racer {letter} ({text}): {fault}" for fault in error.faults]
    if faults:
        raise ConfigError(*faults)
    check_same_validation(racers, data)
    return racers


def check_same_validation(racers: Sequence[Racer], data: Sequence[DataConfig]) -> None:
    """Raise ConfigError if a racer has other validation data than the first one."""
    first = validation_sets(data[0])
    for racer, own in zip(racers, data, strict=True):
        if validation_sets(own) != first:
            raise ConfigError(
                f"racer {racer.name} ({racer.about}): data.val is not that of A, so no judge can compare them; "
                "give all racers the same data, as --with data=..."
            )


def validation_sets(data: DataConfig) -> object:
    """Return the settings that decide which samples are validated."""
    folds = (
        None if data.folds is None else (data.train, data.folds, data.fold, data.stratified, data.fold_groups)
    )
    return validation_nodes(data), folds, data.val_transform


def validation_reads(racer: Racer) -> dict[str, Any]:
    """Return the settings with which a racer cuts and pads its validation data, by their keys."""
    data = compose_racer(racer.words).config.data
    return {f"data.{name}": getattr(data, name) for name in READS}


def join_racer_overrides(common: list[str], own: list[str]) -> list[str]:
    """Join the common overrides and a racer's own overrides. For a key in both, the racer's value counts.

    Raise ConfigError if they name an output folder.
    """
    for words in (common, own):
        if (folder := prepare_command_line(list(words), Path.cwd())[0].own.get("hydra.run.dir")) is not None:
            raise ConfigError(f"output_dir={folder}: {NOT_RACED['hydra.run.dir']}")
    both = [*resolve_overrides(common), *resolve_overrides(own)]
    values = {word if word.startswith("-") else override_key(word): word for word in both}
    return list(values.values())


def parse_racer(text: str) -> list[str]:
    """Return the settings of a racer on the command line: a YAML file with settings, or quoted overrides."""
    if text.endswith((".yaml", ".yml")) and "=" not in text:
        return read_override_file(Path(text).expanduser())
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f'{error}; a racer is quoted once: "optimizer=sgd lr=0.1"') from error


def read_override_file(path: Path) -> list[str]:
    """Return the overrides in a YAML file with nested or dotted keys, and its options under `defaults`."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ConfigError(f"cannot be read ({reason})") from error
    if not isinstance(values, dict):
        raise ConfigError("holds no settings; write one a line, as `data.batch_size: 64`")
    options = [
        option for entry in values.pop("defaults", None) or [] for option in iterate_default_overrides(entry)
    ]
    return [*options, *(f"{key}={format_value_as_typed(value)}" for key, value in iterate_leaves(values))]


def iterate_default_overrides(entry: Any) -> Iterator[str]:
    """Yield the options of an entry of `defaults` as words: `/precision/auto` becomes `precision=auto`."""
    pairs = entry.items() if isinstance(entry, dict) else [str(entry).strip("/").rpartition("/")[::2]]
    for group, option in pairs:
        if group:
            yield f"{group.removeprefix('override ').strip('/')}={option}"


def iterate_leaves(values: dict[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from iterate_leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def compose_racer(words: Sequence[str]) -> Composition:
    """Compose the config of a racer. Raise ConfigError for a setting that a race does not allow."""
    for override in words:
        key = override_key(override)
        if (reason := NOT_RACED.get(key) or NOT_RACED.get(key.partition(".")[0])) is not None:
            raise ConfigError(f"{override}: {reason}")
    composition = compose_run(list(words))
    data = composition.config.data
    if not validation_nodes(data) and data.folds is None:
        raise ConfigError("data.val: there is none, and racers are judged by validation; set it")
    return composition


@dataclass(frozen=True)
class Variation:
    """One difference between the racers A and B. alone: A with this difference. left_out: B without it."""

    about: str
    alone: Racer | None
    left_out: Racer | None


def variations(first: Racer, second: Racer) -> list[Variation]:
    """Return each difference between two racers: as a racer that has only this difference, and as one without it.

    A racer is None if its settings are refused, such as a warm-up without its schedule.
    """
    back = group_changes(second, first)
    return [
        Variation(
            (about := describe(key, settings)),
            build_variation(first, f"+ {about}", settings),
            build_variation(second, f"without {about}", back[key]),
        )
        for key, settings in group_changes(first, second).items()
    ]


def group_changes(before: Racer, after: Racer) -> dict[str, list[str]]:
    """Return the settings that turn one racer into another, by group: each group is changed as a whole.

    If the racers have different options of a group, the first setting is that option. The others are what differs
    from the option.
    """
    here, there = compose_racer(before.words), compose_racer(after.words)
    groups = dict.fromkeys(find_group(change.key) for change in compare_configs(here.config, there.config))
    groups = {group: None for group in groups if group not in NO_DIFFERENCE}
    changes: dict[str, list[str]] = {}
    for group in groups:
        option, base = there.choices.get(group), here
        words = [f"{group}={option}"] if option and option != here.choices.get(group) else []
        if words:
            base = compose_run(replace_overrides(before.words, words))
        rest = compare_configs(base.config, there.config)
        words += [
            f"{change.key}={format_value_as_typed(change.here)}"
            for change in rest
            if find_group(change.key) == group and change.here is not ABSENT
        ]
        changes[group] = words
    return changes


def find_group(key: str) -> str:
    """Return the section of a key if it is changed as a whole, else the key."""
    return next((name for name in TOGETHER if key == name or key.startswith(f"{name}.")), key)


def describe(key: str, settings: Sequence[str]) -> str:
    return " ".join(settings) or f"{key} left out"


def build_variation(racer: Racer, how: str, settings: Sequence[str]) -> Racer | None:
    words = replace_overrides(racer.words, settings)
    try:
        compose_racer(words)
    except ConfigError:
        return None
    return Racer(f"{racer.name} {how}", f"{racer.about} {how}", tuple(words))
