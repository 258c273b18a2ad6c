"""The settings that a search found, as a preset in the user's `conf/`, with the measurements and the conditions in
comments.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from trainrun.benchmark.run_overrides import override_key, recompose_config, replace_overrides
from trainrun.benchmark.tune.tuner import Tuning
from trainrun.config.tuned_settings import MARK, format_preset_conditions
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import write_text
from trainrun.output import mask_arguments

PLAIN: Final = re.compile(r"(?:[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|true|false|null)\Z")


class WrittenPreset(NamedTuple):
    """A preset file and how to use it.

    path: None if a preset cannot contain the settings. use: the overrides of a run that uses them.
    """

    path: Path | None
    use: list[str]


def preset_path(name: str, working_dir: Path) -> Path:
    """Return the path of a preset. Raise ConfigError if a file with that name was not written by `autotune`."""
    path = working_dir / "conf" / "preset" / f"{name}.yaml"
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"--name {name}: a preset is named with letters, digits, - and _")
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"{path}: is not one that trainrun autotune wrote; give another with --name")
    return path


def host_preset_name() -> str:
    host = re.sub(r"[^\w-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")
    return f"tuned-{host or 'here'}"


def write_preset(path: Path, typed: Sequence[str], tuning: Tuning, working_dir: Path) -> WrittenPreset:
    """Write the settings that helped as a preset. typed: the overrides as the user typed them."""
    wanted = recompose_config(replace_overrides(typed, tuning.best_settings))
    use = replace_overrides(typed, [*tuning.best_settings, f"preset={path.stem}"])
    use = [override for override in use if override not in tuning.best_settings]
    before = next(
        (override.partition("=")[2] for override in typed if override_key(override) == "preset"), "none"
    ).strip('"')
    old = path.read_text(encoding="utf-8") if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, preset_text(typed, tuning, before, format_preset_conditions(wanted, working_dir)))
    if recompose_config(use) == wanted:
        return WrittenPreset(path, use)
    if old is None:  # an experiment of the user's sets one of the keys itself, and comes after a preset
        path.unlink()
    else:
        write_text(path, old)
    return WrittenPreset(None, replace_overrides(typed, tuning.best_settings))


def preset_text(typed: Sequence[str], tuning: Tuning, before: str, fingerprint: str) -> str:
    assert tuning.claim is not None
    claim, settings = tuning.claim, " ".join(mask_arguments(typed)) or "(no settings)"
    head = [
        "# @package _global_",
        f"# Written by `trainrun autotune` on {datetime.now():%Y-%m-%d %H:%M}: {tuning.unit}/s {claim.value:.2f}x "
        f"({claim.low:.2f} to {claim.high:.2f}, 99 %, {claim.pairs} pairs of processes) of: {settings}",
        fingerprint,
    ]
    lines = [
        f"# {trial.remedy}: {trial.ratio.value:.2f}x when found ({trial.ratio.turns()}); "
        f"the training: {trial.remedy.effect_text}"
        for trial in tuning.trials
        if trial.is_used and trial.ratio is not None
    ]
    groups: list[Any] = [f"/preset/{before}"] if before != "none" else []
    tree: dict[str, Any] = {}
    for key, _, value in (setting.lstrip("+").partition("=") for setting in tuning.best_settings):
        if "." not in key:
            groups.append({f"override /{key}": parse_value(value)})
            continue
        *path, name = key.split(".")
        node = tree
        for section in path:
            node = node.setdefault(section, {})
        node[name] = parse_value(value)
    tree = {"defaults": groups, **tree} if groups else tree
    return "\n".join([*head, *lines, yaml.safe_dump(tree, sort_keys=False)])


def parse_value(value: str) -> Any:
    """Return a setting's value as Hydra reads it: `off` is a string in Hydra, but false in YAML."""
    value = value.strip('"')
    return yaml.safe_load(value) if PLAIN.match(value) else value
