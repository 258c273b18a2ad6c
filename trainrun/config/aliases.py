"""Other names for settings, options and targets: those of other frameworks, and those of earlier versions.

The other names of a setting stand beside its field in `config/schema.py`; what has no field in `other_trainers/`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from trainrun.config.schema import RunConfig, settings
from trainrun.limits import fits
from trainrun.output import say

OLD_FORMATS, READERS = "trainrun.data.formats", "trainrun.data.readers"
MOVED = {
    "trainrun.data.digits": f"{READERS}.builtin.digits",
    "trainrun.data.fashion_mnist": f"{READERS}.builtin.fashion_mnist",
    "trainrun.data.synthetic": f"{READERS}.builtin.synthetic",
    "trainrun.data.arrays": f"{READERS}.arrays.numpy_files",
    f"{OLD_FORMATS}.hdf5": f"{READERS}.arrays.hdf5",
    f"{OLD_FORMATS}.idx_files": f"{READERS}.arrays.idx_files",
    f"{OLD_FORMATS}.csv_files": f"{READERS}.tables.csv_files",
    f"{OLD_FORMATS}.parquet": f"{READERS}.tables.parquet",
    f"{OLD_FORMATS}.huggingface": f"{READERS}.tables.huggingface",
    f"{OLD_FORMATS}.image_folder": f"{READERS}.pictures.image_folder",
    f"{OLD_FORMATS}.lmdb_file": f"{READERS}.records.lmdb_file",
    f"{OLD_FORMATS}.tfrecord": f"{READERS}.records.tfrecord",
    f"{OLD_FORMATS}.webdataset": f"{READERS}.records.webdataset",
    f"{OLD_FORMATS}.text": f"{READERS}.text.text",
    "trainrun.monitor.tensorboard": "trainrun.trackers.tensorboard",
}  # module -> module; a new move is one line here


@cache
def aliases(schema: type = RunConfig) -> dict[str, str]:
    """Every other name of a setting or section, and the key it stands for."""
    from trainrun.config.other_trainers.names import KEYS

    return KEYS | {name: key for key, found in settings(schema).items() for name in found.aliases}


def key_of_today(key: str, is_group: Callable[[str], bool], schema: type = RunConfig) -> str:
    """The key that another name stands for; a section's other name stands for its settings too."""
    if key in settings(schema):
        return key
    known, key = aliases(schema), bare_name(key)
    if key in known:
        return known[key]
    if key.startswith("monitor.listeners."):  # the field that holds what is typed, and saved, above it
        return key.replace(".listeners", "", 1)
    head, dot, tail = key.partition(".")
    return known[head] + dot + tail if head in known and dot and not is_group(head) else key


def bare_name(key: str) -> str:
    """A name as other trainers say it, where it stands below `trainer` too; any other key as it is."""
    if key in settings():
        return key
    from trainrun.config.other_trainers.names import CASES, KEYS

    name = key.removeprefix("trainer.")
    return name if name in (CASES.keys() | KEYS.keys()) else key


def stands_for(word: str) -> list[str]:
    """The settings that a word of another trainer is read as; the word itself if it is none of `CASES`."""
    key, equals, value = word.partition("=")
    if not equals or (key in settings() and key != "transform"):
        return [word]
    from trainrun.config.other_trainers.names import CASES, NUMBER

    cases = CASES.get(bare_name(key), {})
    is_number = re.fullmatch(r"\d*\.?\d+(e-?\d+)?", value) is not None and float(value) > 0
    found = cases.get(value.lower()) or (cases.get(NUMBER) if is_number else None)
    return [part.format(value) for part in found] if found else [word]


def value_of_today(key: str, value: str, schema: type = RunConfig) -> str:
    """The value that another word, or `3.0` where a whole number is wanted, stands for; any other value as it is."""
    found = settings(schema).get(key)
    with_unit = re.fullmatch(r"(\d+(?:e\d+)?)\s*(step|epoch)s?", value)
    if found is not None and with_unit and with_unit[2] in key and fits(int(float(with_unit[1])), found.kind):
        return str(int(float(with_unit[1])))  # `trainer.max_steps=500step`
    if found is not None and re.fullmatch(r"\d+\.0+", value) and not fits(float(value), found.kind):
        whole = value.partition(".")[0]
        return whole if fits(int(whole), found.kind) else value
    return found.words.get(value.lower(), value) if found is not None else value


def target_of_today(target: Any) -> Any:
    """The path of a target whose module has moved; any other value as it is."""
    module, dot, name = target.rpartition(".") if isinstance(target, str) else ("", "", "")
    return f"{MOVED[module]}{dot}{name}" if module in MOVED else target


def with_targets_of_today(value: Any) -> Any:
    """Plain values of a config with every moved target named as it is today, and a note for each."""
    if isinstance(value, list):
        return [with_targets_of_today(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {name: with_targets_of_today(item) for name, item in value.items()}
    target = found.get("_target_")
    if target is not None and (today := target_of_today(target)) != target:
        found["_target_"] = today
        say_once(f"_target_={target} is read as {today}")
    return found


@cache
def say_once(text: str) -> None:
    """Print once, though a run reads its config several times."""
    say(f"note: {text}", file=sys.stderr)
