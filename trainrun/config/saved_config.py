"""Read the saved config of a run, fill in its secrets, and change single values."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainrun.config.aliases import say_once
from trainrun.config.argv import CommandLine, conf_dir, groups, split_command_line, translate
from trainrun.config.compose import idle_settings, rename_old_values, untold
from trainrun.config.messages import explain_reference, first_line_of_error
from trainrun.config.overrides import (
    add_trackers,
    in_tracker,
    move_trackers,
    override_fault,
    put,
    read_override,
    schema_node,
)
from trainrun.config.rules import unread_path
from trainrun.config.saved_values import (
    REFERENCE,
    Any_,
    FromEnvironment,
    read_yaml_text,
    remember,
    resolve_references,
    with_home_folder,
)
from trainrun.config.schema import (
    DataConfig,
    RunConfig,
    config_leaves,
    map_config,
    open_nodes,
    validation_nodes,
)
from trainrun.config.validate import SHARED, check_config, target_argument_faults
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, read_json, read_origin
from trainrun.instantiate import TARGET
from trainrun.model.choices import WORDS
from trainrun.output import HIDDEN, hides

KEYS_OF_ANY_CLASS = {  # in a node: what the runner itself reads, and the learning rate, which every optimizer takes
    "model": tuple(WORDS),
    "optimizer": ("lr", "no_decay", "layer_decay", "groups"),
    "scheduler": tuple(SHARED["scheduler"]),
}


def mode_of_ranks(saved: Any, overrides: list[str]) -> list[str]:
    """Return the override that keeps the saved mode where another number of ranks alone would choose ddp."""
    mode = OmegaConf.select(saved, "parallel.mode")
    names_devices = any(
        re.match(r"\+*((parallel|trainer)\.)?(devices|nproc_per_node)=", word) for word in overrides
    )
    names_mode = any(re.match(r"\+*parallel(\.mode)?=", word) for word in overrides)
    keeps_mode = names_devices and not names_mode and mode not in (None, "single")
    return [f"parallel.mode={mode}"] if keeps_mode else []


def devices_of_one(saved: DictConfig, words: list[str]) -> list[str]:
    """Return the override that resets the device list if a run of several ranks continues as a single one."""
    typed = dict(word.lstrip("+").partition("=")[::2] for word in words)
    devices = OmegaConf.select(saved, "parallel.devices")
    number = len(devices) if isinstance(devices, ListConfig) else devices
    is_single = typed.get("parallel.mode") == "single" and "parallel.devices" not in typed
    has_several = isinstance(number, int) and number > 1
    return ["parallel.devices=auto"] if is_single and has_several else []


def describe_unchanged_paths(data: DataConfig, given: set[str], measured: str) -> Iterator[str]:
    """Yield a line for each set that a new `data.path` does not change, because the set has its own path.

    measured: the split that a command evaluates; a built-in reader with its own path there uses the new one. Empty
        for a command that trains, which only prints the lines.
    """
    for split, node in {**validation_nodes(data), "test": data.test}.items():
        wanted_split, key = measured or "val", f"data.{split.replace('/', '.')}"
        if (split.partition("/")[0] != wanted_split and split != wanted_split) or not isinstance(node, dict):
            continue
        name = f"{split.partition('/')[0]}_path"
        own_path = node.get(name)
        source = f"data.train.{name}" if own_path == (data.train or {}).get(name) else f"{key}.{name}"
        line = ""
        if own_path not in (None, data.path) and source not in given and not measured:
            line = f"{key} reads {source}={own_path}; for other samples there set {source}={data.path}"
        elif own_path is None and measured and all(value != data.path for _, value in config_leaves(node)):
            line = f"{key} reads other data; name its samples by what {key}.{TARGET} takes"
        if line and not measured:
            say_once(f"data.path={data.path}: of training; {line}")
        elif line:
            yield f"data.path={data.path}: {line}"


PATH_KEY = re.compile(r"(path|root|dir|folder|file|from|teacher|tokenizer)$")


def may_be_path(key: str, value: str) -> bool:
    """Return whether a text may name a file or folder, judged by its key and form."""
    return bool(PATH_KEY.search(key) or os.sep in value or Path(value).suffix)


def path_roots(run: RunDir, found: dict[str, Any]) -> list[Path]:
    """Return the folders against which relative paths of a run are resolved, in order of preference.

    Return [] if the current directory is the right one.
    """
    if (origin := read_origin(run)) is None:
        return []
    here, (began, folder) = Path.cwd(), origin
    # with the project, as a whole
    has_moved = began in folder.parents and here in run.root.parents and began not in run.root.parents
    if began == here:
        return []
    with contextlib.suppress(OSError, ValueError):
        if (
            placed(found, here) != found and has_moved == began.is_dir()
        ):  # or nothing is there to be mistaken for it
            say_once(
                f"{run.root}: began in {began}, which is another place; its relative paths lead from {here}"
            )
        if began.is_dir():
            return [here, began] if has_moved else [began]
    return []


def placed(values: Any_, base: Path) -> Any_:
    """Return a copy in which relative paths that exist below `base` are absolute."""

    def place(key: str, value: Any) -> Any:
        if not isinstance(value, str) or not value or not may_be_path(key, value):
            return value
        pattern = re.sub(r"\{.*?\}", "*", value)  # names with braces, as `shard-{0..9}.tar`
        there = os.path.join(base, value)  # itself where it is absolute
        may_be_pattern = (
            PATH_KEY.search(key) or os.sep in value
        )  # `encoder.*` names parameters, and may fit files
        is_there = os.path.exists(there) or (may_be_pattern and any(glob.iglob(pattern, root_dir=base)))
        if not is_there or there == value:
            return value
        return FromEnvironment.of(there, value.reference) if isinstance(value, FromEnvironment) else there

    return map_config(values, place)  # type: ignore[no-any-return]


def plain_config(path: Path) -> dict[str, Any]:
    """Return a run's saved config as plain values, without imports or resolved references. Raise ConfigError."""
    text = read_yaml_text(path)
    try:
        container = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a config of a run ({first_line_of_error(error)})") from error
    except AssertionError:  # OmegaConf's answer to a single number
        container = None
    if not isinstance(container, dict) or not container.get("model"):
        raise ConfigError(f"{path}: not a config of a run (it is empty, or names no model)")
    values = {str(name): value for name, value in container.items()}
    try:
        resolve_references(values)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return values


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """Return a saved config with single values changed. Raise ConfigError. Group choices cannot be changed."""
    return with_overrides(plain_config(path), path, overrides)


def translated(overrides: list[str]) -> CommandLine:
    """Return the overrides of a command for a saved run, parsed and with aliases translated."""
    words = split_command_line(overrides)
    translate(words, lambda *_: False, lambda name: False)
    return words


def with_overrides(found: dict[str, Any], path: Path, overrides: list[str], measured: str = "") -> RunConfig:
    """Return a saved config with the overrides of a command line. Raise ConfigError.

    found: the saved values. path: their file. measured: the only split that the command evaluates, to which a new
        `data.path` must apply.
    """
    places = path_roots(RunDir(path.parent), found)
    for place in places:
        found = placed(found, place)
    try:
        secrets: Any = None
        with contextlib.suppress(OSError, ValueError):
            secrets = read_json(RunDir(path.parent).secrets)
        saved = OmegaConf.create(with_secrets(found, secrets))
        cfg = OmegaConf.merge(schema_node(), saved)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key = str(getattr(error, "full_key", None) or "config")
        raise ConfigError(f"{path}: not a config of a run ({key}: {first_line_of_error(error)})") from error
    assert isinstance(cfg, DictConfig)
    words = translated([*mode_of_ranks(saved, overrides), *overrides])
    faults = words.twice + [f"{key}={folder}: a run stays in its folder" for key, folder in words.own.items()]
    wrong = {word: fault for word in words.overrides if (fault := override_fault(word))}
    faults += wrong.values()
    sound = [word for word in words.overrides if word not in wrong]
    clear_replaced_nodes(cfg, words)
    put_into_saved(cfg, [*sound, *devices_of_one(saved, sound)], faults)
    faults += [*missing_secrets(cfg), *move_trackers(cfg)]
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(*faults, explain_reference(error)) from error
    assert isinstance(config, RunConfig)
    config = remember(cfg, with_home_folder(rename_old_values(config)))
    changed = {word.lstrip("+~").partition("=")[0] for word in words.overrides}
    before = OmegaConf.select(saved, "data.path")
    has_moved = "data.path" in changed and config.data.path != before
    for base in (Path.cwd(), *places) if places else ():  # what the command line and the environment name
        config = placed(config, base)
    faults += check_config(config)
    faults += untold(idle_settings(config, words.overrides), faults)
    # With its other values it has trained.
    if has_moved:
        faults += [*unread_path(config), *describe_unchanged_paths(config.data, changed, measured)]
    faults += untold(
        {key: fault for key, fault in target_argument_faults(config).items() if key in changed}, faults
    )
    if faults:
        raise ConfigError(*[words.as_typed(fault) for fault in faults])
    return config


def clear_replaced_nodes(cfg: DictConfig, words: CommandLine) -> None:
    """Remove the arguments of a class that the command line replaces by another (`model=my_net.Net`).

    `model._target_=my_net.Net` keeps the arguments, for example for a subclass.
    """
    for word in words.overrides:
        key, _, target = word.lstrip("+").partition("=")
        place = key.removesuffix(f".{TARGET}")
        is_short_form = words.typed.get(f"{key}={target}") == f"{place}={target}"
        node = OmegaConf.select(cfg, place) if place != key and is_short_form else None
        if isinstance(node, DictConfig) and node.get(TARGET) != target:
            stays = {TARGET, *KEYS_OF_ANY_CLASS.get(place, ())}
            keep_referenced_values(cfg, place)
            OmegaConf.update(cfg, place, {name: node[name] for name in node if name in stays}, merge=False)


def keep_referenced_values(cfg: DictConfig, section: str) -> None:
    """Replace each reference into a section by its value, so that the section can be emptied."""
    for key, text in config_leaves(OmegaConf.to_container(cfg, resolve=False)):
        reference = REFERENCE.fullmatch(text) if isinstance(text, str) else None
        if reference is not None and reference[1].startswith(f"{section}."):
            OmegaConf.update(cfg, key, OmegaConf.select(cfg, key))


NO_SWEEP = "several values, where a saved run has one (a list is [1,2])"


def put_into_saved(cfg: DictConfig, words: list[str], faults: list[str]) -> None:
    """Set single values in a saved config. Below an open node, keys may be new."""
    fixed = groups([conf_dir()])
    for word in words:
        override = read_override(word, faults, NO_SWEEP)
        if override is None:
            continue
        key, text = override.key_or_group, word.partition("=")[2]
        may_be_new = any(key.startswith(f"{node}.") for node in open_nodes()) or in_tracker(key)
        if key == "monitor.tracker":
            add_trackers(cfg, override.value())
        if key in fixed:
            fault = (
                f"{word}: the groups of a run are fixed; only single values can change, as {key}.name=value"
            )
        elif override.is_delete():
            fault = f"{word}: nothing of a run can be taken away; give it another value, as {key}=null"
        else:
            fault = put(cfg, key, override.value(), text, may_be_new, [conf_dir()])
        faults += [fault] if fault else []


def with_secrets(found: dict[str, Any], secrets: Any) -> dict[str, Any]:
    """Return saved values with the known secrets filled in."""
    secret_values = secrets if isinstance(secrets, dict) else {}
    filled: dict[str, Any] = map_config(
        found,
        lambda key, value: secret_values.get(key, value) if value == HIDDEN and hides(key, value) else value,
    )
    return filled


def missing_secrets(cfg: DictConfig) -> list[str]:
    """Return a line for each secret that is not stored in the run folder."""
    return [
        f"{key}: a secret that is not kept in this folder (.secrets.json); give it again, as {key}=..."
        for key, value in config_leaves(OmegaConf.to_container(cfg, resolve=False))
        if value == HIDDEN and hides(key, value)
    ]
