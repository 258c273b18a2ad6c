"""Parse the settings of the sweep itself, such as `sweep=random sweep.jobs=4`. They are not in the config of a job."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainrun.config.validate import suggest_closest_name
from trainrun.errors import ConfigError
from trainrun.limits import parse_seconds

OPTION: Final = re.compile(r"sweep(\.\w+)?=")
AUTO = "auto"
# Hydra's names for settings of a sweep: with a value, and with any value.
HYDRA_WORDS = {
    "hydra/sweeper=basic": "sweep=grid", "hydra/sweeper=optuna": "sweep=optuna",
    **{f"hydra/sweeper/sampler={name}": f"sweep.sampler={name}" for name in ("tpe", "random", "cmaes", "qmc", "gp")},
    "hydra/sweeper/sampler=nsgaii": "sweep.sampler=nsga2", "hydra/sweeper/sampler=grid": "sweep=grid",
    "hydra/launcher=basic": "sweep.jobs=1", "hydra/launcher=joblib": "sweep.jobs=auto",
}  # fmt: skip
HYDRA_KEYS = {
    "hydra.sweeper.n_trials": "sweep.trials", "hydra.sweeper.n_jobs": "sweep.jobs",
    "hydra.sweeper.sampler.seed": "sweep.seed", "hydra.launcher.n_jobs": "sweep.jobs",
}  # fmt: skip
KINDS = ("grid", "random", "optuna")
PRUNERS = ("none", "asha", "hyperband", "median")
RESOURCES = ("step", "epoch", "sample", "seconds")
SAMPLERS = ("tpe", "gp", "random", "qmc", "nsga2", "cmaes")


@dataclass(frozen=True)
class SweepOptions:
    """The settings of the sweep itself.

    kind: grid, random or optuna. trials: the number of random or searched points, of all calls together. seed: the
        random seed of these points.
    pruner: stops jobs that are worse than others at the same resource. revive: how many of the best pruned points
        continue. sampler: the name of Optuna's sampler. objective: metrics. One with a minus is better when
        smaller. Empty: the metric that the jobs monitor.
    jobs: the number of jobs side by side. None: as many as fit on the GPUs or cores. per_device: jobs that share a
        GPU.
    max_seconds: the time after which the jobs save and the sweep ends. storage: the address of Optuna's storage;
        empty for a journal in the folder of the sweep.
    """

    kind: str = "grid"
    trials: int | None = None
    seed: int = 0
    sampler: str = "tpe"
    objective: tuple[str, ...] = ()
    pruner: str = "none"
    resource: str = "step"
    revive: int = 0
    jobs: int | None = 1
    per_device: int = 1
    max_seconds: float | None = None
    storage: str = ""


def hide_password(word: str) -> str:
    """Return a word with user and password of a storage address masked."""
    return re.sub("//[^/@]*@", "//***@", word) if word.startswith("sweep.storage=") else word


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into settings of the sweep and settings of its jobs."""
    own = [word for word in words if OPTION.match(word)]
    return own, [word for word in words if word not in own]


def translate_hydra_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate Hydra's names for settings of a sweep. Return the words and a note on each. Raise ConfigError."""
    own, notes = [], []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if OPTION.match(word):
            own.append(word)
            continue
        meant = HYDRA_WORDS.get(f"{key}={value}")
        if meant is None and key in HYDRA_KEYS:
            meant = f"{HYDRA_KEYS[key]}={value}"
        if meant is None:
            raise ConfigError(
                f"{word}: is read by no sweep; write its own settings, as sweep=optuna sweep.jobs=auto"
            )
        own.append(meant)
        notes.append(f"{word} is read as {meant}")
    return own, notes


def read_options(words: Sequence[str]) -> SweepOptions:
    """Parse the settings of a sweep. Raise ConfigError with all mistakes."""
    values: dict[str, Any] = {}
    faults = []
    for word in words:
        key, _, text = word.partition("=")
        name = READERS[key][0] if key in READERS else ""
        if name in values:
            faults.append(f"{word}: {key} is given twice; leave one out")
            continue
        if key not in READERS:
            faults.append(f"{key}: no such setting of a sweep.{suggest_closest_name(key, READERS)}")
            continue
        name, allowed, read = READERS[key]
        try:
            values[name] = read(text)
        except ValueError:
            faults.append(f"{word}: must be {allowed}")
    options = SweepOptions(**values)
    if not faults:
        faults = check_combinations(options, values)
    if faults:
        raise ConfigError(*faults)
    return options


def check_combinations(options: SweepOptions, given: Collection[str]) -> list[str]:
    """Return the mistakes in combinations of settings. given: the fields that were typed."""
    faults = []
    if (
        options.kind != "grid"
        and options.trials is None
        and (options.kind == "random" or not options.max_seconds)
    ):
        faults.append(f"sweep={options.kind}: needs the number of points; add sweep.trials=20")
    if options.kind == "grid":
        for name in ("trials", "seed"):
            if name in given:
                value = getattr(options, name)
                faults.append(
                    f"sweep.{name}={value}: applies to sweep=random and sweep=optuna; a grid always runs all its points"
                )
    if options.kind != "optuna" and "sampler" in given:
        faults.append(
            f"sweep.sampler={options.sampler}: applies to sweep=optuna; add sweep=optuna, or leave it out"
        )
    if options.pruner == "none" and "resource" in given:
        faults.append(f"sweep.resource={options.resource}: needs a pruner; add sweep.pruner=asha")
    if options.pruner != "none" and len(options.objective) > 1:
        faults.append(
            f"sweep.pruner={options.pruner}: works with one objective; leave out the others or the pruner"
        )
    elif options.pruner != "none" and any("/" not in name for name in options.objective):
        faults.append(
            f"sweep.pruner={options.pruner}: sweep.objective={options.objective[0]} is not a metric of the validation"
        )
    if options.storage and options.kind != "optuna" and options.pruner == "none":
        faults.append("sweep.storage: is of sweep=optuna and of pruners; leave it out")
    if len(options.objective) > 1 and options.sampler == "cmaes":
        faults.append("sweep.sampler=cmaes: works with one objective; use nsga2 or tpe for several")
    return faults


def parse_objective(text: str) -> tuple[str, ...]:
    names = tuple(name.strip(" \"'") for name in text.strip("[]").split(","))
    if not all(re.fullmatch(r"-?[\w./@-]+", name) for name in names) or len(set(names)) < len(names):
        raise ValueError(text)
    return names


def parse_storage(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+]*://.*", text):
        raise ValueError(text)
    return text


def parse_revive(text: str) -> int:
    if not text.startswith("best:"):
        raise ValueError(text)
    return parse_whole_number(1)(text.removeprefix("best:"))


def parse_choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return read


def parse_whole_number(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError(text)
        return number

    return read


def parse_number_of_jobs(text: str) -> int | None:
    return None if text == AUTO else parse_whole_number(1)(text)


def parse_max_time(text: str) -> float:
    seconds = parse_seconds(float(text) if re.fullmatch(r"[\d.]+", text) else text)
    if not seconds:
        raise ValueError(text)
    return seconds


# The field of each setting, what is allowed, and how the text is read.
READERS: Final[dict[str, tuple[str, str, Callable[[str], Any]]]] = {
    "sweep": ("kind", "one of " + ", ".join(KINDS), parse_choice(*KINDS)),
    "sweep.trials": ("trials", "a whole number, 1 or more", parse_whole_number(1)),
    "sweep.seed": ("seed", "a whole number, 0 or more", parse_whole_number(0)),
    "sweep.sampler": ("sampler", "one of " + ", ".join(SAMPLERS), parse_choice(*SAMPLERS)),
    "sweep.objective": (
        "objective",
        "a metric or a list of different ones, as [val/acc,-seconds]",
        parse_objective,
    ),
    "sweep.pruner": ("pruner", "one of " + ", ".join(PRUNERS), parse_choice(*PRUNERS)),
    "sweep.resource": ("resource", "one of " + ", ".join(RESOURCES), parse_choice(*RESOURCES)),
    "sweep.revive": ("revive", "best:3, for the three best pruned points", parse_revive),
    "sweep.jobs": ("jobs", "auto, or a whole number, 1 or more", parse_number_of_jobs),
    "sweep.per_device": ("per_device", "a whole number, 1 or more", parse_whole_number(1)),
    "sweep.storage": ("storage", "an address, as grpc://host:13000 or postgresql://host/name", parse_storage),
    "sweep.max_time": ("max_seconds", "a time, as 90s, 10min or 2h", parse_max_time),
}
