"""The options `launch=...` of a run that another program starts, and the settings that this run gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainrun.config.validate import suggest_closest_name
from trainrun.errors import ConfigError

NUMBERS = ("nodes", "gpus", "array")
NO_LIMIT = ("0", "unlimited", "infinite")
OPTIONS_OF = {
    "slurm": ("nodes", "gpus", "time", "partition", "sbatch", "array"),
    "ray": ("nodes", "gpus"),
    "k8s": ("nodes", "gpus", "image"),
    "sky": ("nodes", "gpus", "gpu_type", "image"),
}


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a job. nodes: machines. gpus: per machine, one rank each. sbatch: further flags by their long names.
    array: jobs that share the trials of a sweep. gpu_type: SkyPilot's name. image: of the container, with trainrun and
    the user's code. kind: the program.
    """

    nodes: int = 1
    gpus: int | None = None
    time: str | None = None
    partition: str | None = None
    sbatch: dict[str, Any] = field(default_factory=dict)
    gpu_type: str | None = None
    image: str | None = None
    kind: str = "slurm"
    array: int | None = None


def read_options(words: Sequence[str]) -> LaunchOptions | None:
    """Return the options in settings such as `launch.nodes=2`; None for launch=local. Raise ConfigError."""
    kind = next((word.partition("=")[2] for word in reversed(words) if word.startswith("launch=")), "local")
    options = [word for word in words if not word.startswith("launch=")]
    if kind not in ("local", *OPTIONS_OF):
        raise ConfigError(f"launch={kind}: must be local, slurm, ray, k8s or sky")
    if kind == "local" and options:
        raise ConfigError(f"{options[0]}: is a setting of a cluster; add launch=slurm")
    values: dict[str, Any] = {}
    faults: list[str] = []
    for word in options:
        try:
            name, value = parse_option(kind, word)
            values[name] = value
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return None if kind == "local" else LaunchOptions(**values, kind=kind)


def parse_option(kind: str, word: str) -> tuple[str, Any]:
    """Return name and value of a setting of launch=`kind`. Raise ConfigError."""
    key, _, text = word.partition("=")
    name = key.partition(".")[2]
    kinds = [kind for kind, names in OPTIONS_OF.items() if name in names]
    if not kinds:
        keys = [f"launch.{name}" for names in OPTIONS_OF.values() for name in names]
        raise ConfigError(f"{word}: no such setting of a launch.{suggest_closest_name(key, keys)}")
    if kind not in kinds:
        raise ConfigError(f"{word}: is a setting of launch={' and launch='.join(kinds)}")
    if not text:
        raise ConfigError(f"{word}: has no value")
    if name in NUMBERS:
        if not text.isdecimal() or int(text) == 0:
            raise ConfigError(f"{word}: must be a whole number, 1 or more")
        return name, int(text)
    if name == "sbatch":
        try:
            flags = yaml.safe_load(text.replace("=", ": "))
        except yaml.YAMLError:
            flags = None
        if not isinstance(flags, dict):
            raise ConfigError(f"{word}: must be flags of sbatch, as launch.sbatch={{qos: high, mem: 64G}}")
        return name, flags
    if name == "time" and text.lower() not in NO_LIMIT and parse_time_limit(text) is None:
        raise ConfigError(f"{word}: must be as Slurm has it: 90 (minutes), 1:30:00 or 2-12:00:00")
    return name, text


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of a Slurm time limit; None if the text is not one.

    Formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
        days-hours:minutes:seconds.
    """
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = ([0, *numbers, 0] if len(numbers) == 1 else [0, *numbers])[-3:]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def build_job_words(options: LaunchOptions, words: Sequence[str], folder: Path) -> list[str]:
    """Return the settings of the run, with its folder and the number of ranks per machine."""
    keys = {word.partition("=")[0] for word in words}
    added = []
    if "parallel" not in keys and (options.nodes > 1 or (options.gpus or 1) > 1):
        added.append("parallel=ddp")
    if options.gpus is not None and "parallel.devices" not in keys:
        added.append(f"parallel.devices={options.gpus}")
    return replace_folder([*words, *added], folder)


def replace_folder(words: Sequence[str], folder: Path) -> list[str]:
    """Return settings with another folder of the run or the sweep."""
    keys = ("output_dir", "hydra.run.dir", "hydra.sweep.dir")
    return [*(word for word in words if word.partition("=")[0] not in keys), f"output_dir={folder}"]
