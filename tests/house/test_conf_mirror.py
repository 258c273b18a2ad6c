"""`conf/` says what each option is, names only targets that exist, and lists every argument of ours."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainrun.instantiate import import_target

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
PACKAGE_LINE = "# @package _global_"
RUNTIME_ARGUMENTS = {"scheduler": 1, "optimizer": 1}  # how many the runner gives itself, first of all
SCHEDULE_WORDS = {
    "warmup_steps",
    "warmup_ratio",
    "warmup_epochs",
    "warmup_start_factor",
    "lr_scaling",
    "base_batch_size",
    "metric",
    "interval",
}
GROUP_WORDS = {"groups", "no_decay", "layer_decay"}


def name_of(path: Path) -> str:
    return str(path.relative_to(CONF))


def nodes_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if value.get("_target_"):
            yield value
        for item in value.values():
            yield from nodes_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from nodes_in(item)


def faults_of(path: Path, group: str) -> list[str]:
    """Arguments of a target of ours that the file does not list, and keys that are none."""
    faults = []
    for node in nodes_in(yaml.safe_load(path.read_text(encoding="utf-8"))):
        target = import_target(node["_target_"], group)
        if not node["_target_"].startswith("trainrun."):
            continue
        is_transform = node["_target_"].startswith("trainrun.transform.")
        first = 1 if is_transform else RUNTIME_ARGUMENTS.get(group, 0)
        parameters = list(inspect.signature(target).parameters.values())[first:]
        named = {item.name for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)}
        keys = (
            set(node)
            - {"_target_", "_args_", "_partial_"}
            - {"scheduler": SCHEDULE_WORDS, "optimizer": GROUP_WORDS}.get(group, set())
        )
        open_ended = any(item.kind is item.VAR_KEYWORD for item in parameters)
        faults += [f"{node['_target_']}: {name} is not listed" for name in sorted(named - keys)]
        faults += [f"{node['_target_']}: takes no {name}" for name in sorted(keys - named) if not open_ended]
    return faults


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_an_option_begins_with_a_line_that_says_what_it_is(path: Path):
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[0] == PACKAGE_LINE:
        lines = lines[1:]
    assert lines[0].startswith("# ")
    assert len(lines[0]) > len("# Short.")
    assert PACKAGE_LINE not in lines, "must be the first line: elsewhere it is only a comment"


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != CONF], ids=name_of)
def test_targets_exist_and_every_argument_is_listed(path: Path):
    assert faults_of(path, path.parent.name) == []


def test_a_missing_argument_and_a_surplus_key_are_seen(tmp_path: Path):
    path = tmp_path / "mlp.yaml"
    path.write_text(
        "train:\n  _target_: trainrun.data.readers.builtin.digits.load\n  val_fraction: 0.1\n  sed: 1\n"
    )
    assert faults_of(path, "data") == [
        "trainrun.data.readers.builtin.digits.load: seed is not listed",
        "trainrun.data.readers.builtin.digits.load: takes no sed",
    ]


def test_every_group_has_options_and_a_default():
    root = yaml.safe_load((CONF / "trainrun.yaml").read_text(encoding="utf-8"))
    chosen = {
        group: option for item in root["defaults"] if isinstance(item, dict) for group, option in item.items()
    }
    assert chosen.keys() == {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    for group, option in chosen.items():
        assert (CONF / group / f"{option}.yaml").is_file()
