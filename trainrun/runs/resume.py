"""A run that is in its folder already: its config, once it is trusted; and the same command again, which goes on."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import yaml

from trainrun.config.argv import is_path
from trainrun.config.compose import is_as_saved, plain_config, with_overrides
from trainrun.config.saved_values import public, resolved
from trainrun.config.schema import RunConfig, plain
from trainrun.errors import ConfigError
from trainrun.output import say
from trainrun.runs.run_folder import SEED, SEED_DRAWN, RunDir, is_there, read_identity, was_saved
from trainrun.runs.trusted_code import check_files, check_run

SHOWN = 8
ABSENT = object()  # of a key that only the other config has


class Difference(NamedTuple):
    """there: of the run that is in the folder."""

    key: str
    there: object
    here: object


def trusted_config(run: RunDir, overrides: list[str], trust: bool) -> RunConfig:
    """As `load_config`, of a folder that may be anybody's: code that it names must be known to be the user's."""
    found = readable_config(run)
    check_run(run, found, overrides, trust)
    return with_overrides(found, run.config_that_holds, overrides)


def readable_config(run: RunDir) -> dict[str, Any]:
    """The plain values of the config; says it where they are not those that the run wrote. Raises ConfigError."""
    path = run.config_that_holds
    try:
        found = plain_config(path)
    except ConfigError as error:
        seed = ""
        with contextlib.suppress(ConfigError, KeyError):  # the second: of an older run
            seed = f"seed={read_identity(run)[SEED]} "
        raise ConfigError(
            f"{error}; go on in another folder with the words of {run.overrides.name} and {seed}ckpt_path={run.root}"
        ) from error
    if not is_as_saved(path):
        say(
            f"note: {path}: changed since the run wrote it, by hand or by damage; what it says now holds",
            file=sys.stderr,
        )
    return found


def check_ours(run: RunDir) -> None:
    """Raises ConfigError if files lie in the place of a run's and no run made them: they are not ours to replace."""
    places = (
        run.config,
        run.overrides,
        run.environment,
        run.metrics,
        run.samples,
        run.status,
        run.log,
        run.report,
    )
    taken = [path.name for path in places if path.exists()]
    if was_saved(run):  # the newest stay, and the first ones of a new run would be the oldest
        taken.append(run.checkpoints.name)
    if taken and not is_there(run):
        remedy = "name another folder, or take them away"
        if was_saved(run):
            remedy += f" (ckpt_path={run.root} takes over a checkpoint)"
        raise ConfigError(
            f"output_dir={run.root}: holds {', '.join(taken)} and no {run.identity.name}, so no run made it; "
            + remedy
        )


def check_reachable(run: RunDir) -> None:
    """Raises ConfigError if the checkpoints are linked to a place that is not there: no run starts over for that."""
    place = run.checkpoints
    if place.is_symlink() and not place.is_dir():
        raise ConfigError(
            f"{place}: leads to {place.readlink()}, where no folder is; mount or make it, or take the link away to "
            "train without what was saved there"
        )


def merge_config(run: RunDir, config: RunConfig) -> RunConfig:
    """The config with the seed that was drawn before. Raises ConfigError if another run is in the folder.

    What the config names is on this command line, so nothing but the files of the folder can be a stranger's.
    """
    resume = f"trainrun resume {shlex.quote(str(run.root))}"
    check_files(run.root, trust=False, way=f"{resume} --trust")  # a new run takes no such flag
    before = with_overrides(readable_config(run), run.config_that_holds, [])
    if config.seed is None and read_identity(run).get(SEED_DRAWN, True):
        config = replace(config, seed=before.seed)
    if found := differences(before, config):
        there, here = (values_of(public(item)[0]) for item in (before, config))  # without secrets
        changed = [Difference(key, there.get(key, ABSENT), here.get(key, ABSENT)) for key, _, _ in found]
        shown = ", ".join(f"{key}={word(old)} (here {word(new)})" for key, old, new in changed[:SHOWN])
        more = f" and {len(changed) - SHOWN} other values" if len(changed) > SHOWN else ""
        raise ConfigError(
            f"output_dir={run.root}: holds a run already, which has {shown}{more}; name another folder, or go on with "
            f"that run: {resume}{with_values(changed, resume)}"
        )
    restore_config(run)
    return config


def check_same_network(run: RunDir, config: RunConfig) -> None:
    """Raises ConfigError for words that change the network on the way: what was learned fits the transforms it had."""
    before = with_overrides(plain_config(run.config_that_holds), run.config_that_holds, [])
    faults = [
        f"{key}={word(here)}: the run has trained with {word(there)}, and its transforms stay; leave it out, or begin "
        f"another run with its weights: init_from={run.root}"
        for key, there, here in differences(before, config)
        if key.startswith("transform.")
    ]
    if faults:
        raise ConfigError(*faults)


def differences(before: RunConfig, config: RunConfig) -> list[Difference]:
    there, here = values_of(before), values_of(config)
    return [
        Difference(key, there.get(key, ABSENT), here.get(key, ABSENT))
        for key in {**there, **here}
        if there.get(key, ABSENT) != here.get(key, ABSENT)
    ]


def values_of(config: RunConfig) -> dict[str, object]:
    """By the keys that can be typed; a list is one value."""

    def flat(value: Any, key: str) -> Iterator[tuple[str, object]]:
        if not isinstance(value, dict):
            yield key, value
            return
        for name, item in value.items():
            yield from flat(item, f"{key}.{name}" if key else str(name))

    return dict(flat(plain(resolved(config)), ""))


def word(value: object) -> str:
    """As it would be typed."""
    if value is ABSENT:
        return "nothing"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def with_values(changed: list[Difference], resume: str) -> str:
    """The command that would change them on the way; empty if another part was chosen, which is fixed."""
    if len(changed) > SHOWN or any(ABSENT in (there, here) or key == "seed" for key, there, here in changed):
        return ""
    values = [str(here) if here is not None and is_path(key) else word(here) for key, _, here in changed]
    words = [shlex.quote(f"{key}={value}") for (key, _, _), value in zip(changed, values, strict=True)]
    return f" (or, where that can change on the way: {resume} {' '.join(words)})"


def restore_config(run: RunDir) -> None:
    """The config before the words of a resume that never came to its first step."""
    if run.config_before.is_file():
        run.config_before.replace(run.config)
