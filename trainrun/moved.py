"""Targets that stood elsewhere: old paths, in saved configs and on command lines, are read as today's with one note."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from trainrun.output import say

OLD_FORMATS = "trainrun.data.formats"
READERS = "trainrun.data.readers"
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
}  # module -> module; a new move is one line here


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
        _note(target, today)
    return found


@cache
def _note(target: str, today: str) -> None:
    """Print once, though a run reads its config several times."""
    say(f"note: _target_={target} is read as {today}", file=sys.stderr)
