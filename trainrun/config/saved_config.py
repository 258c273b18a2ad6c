"""Read the config of a saved run, fill in its secrets, and apply overrides to it."""

from __future__ import annotations

import contextlib
import glob
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainrun.config.aliases import print_note_once, resolve_alias
from trainrun.config.argv import (
    CommandLine,
    find_conf_dir,
    list_groups,
    split_command_line,
    translate_overrides,
)
from trainrun.config.compose import drop_reported_faults, replace_value_aliases
from trainrun.config.messages import explain_broken_reference, read_first_error_line
from trainrun.config.overrides import (
    add_trackers,
    build_schema_node,
    check_override,
    is_tracker_argument,
    move_trackers,
    parse_override,
    set_config_value,
)
from trainrun.config.rules import check_data_path
from trainrun.config.saved_values import (
    REFERENCE,
    Any_,
    FromEnvironment,
    add_references,
    build_config_loader,
    expand_home_folder,
    read_yaml_text,
    resolve_references,
)
from trainrun.config.schema import (
    DataConfig,
    RunConfig,
    iterate_config_leaves,
    list_open_nodes,
    map_config,
    validation_nodes,
)
from trainrun.config.validate import SHARED, check_config, check_target_arguments
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, read_json, read_origin
from trainrun.instantiate import TARGET
from trainrun.model.choices import WORDS
from trainrun.output import HIDDEN, is_secret_value

KEYS_OF_ANY_CLASS = {  # in a node: what the runner itself reads, and the learning rate, which every optimizer takes
    "model": tuple(WORDS),
    "optimizer": ("lr", "no_decay", "layer_decay", "groups"),
    "scheduler": tuple(SHARED["scheduler"]),
}


def keep_saved_mode(saved: DictConfig, overrides: list[str]) -> list[str]:
    """Return the override that keeps the saved parallel mode; [] if it is not needed.

    It is needed if the number of ranks is typed but no mode, because the number alone would choose ddp.
    """
    mode = OmegaConf.select(saved, "parallel.mode")
    names_devices = any(
        re.match(r"\+*((parallel|trainer)\.)?(devices|nproc_per_node)=", word) for word in overrides
    )
    names_mode = any(re.match(r"\+*parallel(\.mode)?=", word) for word in overrides)
    keeps_mode = names_devices and not names_mode and mode not in (None, "single")
    return [f"parallel.mode={mode}"] if keeps_mode else []


def reset_devices(saved: DictConfig, words: list[str]) -> list[str]:
    """Return the override that resets `parallel.devices` if a run of several ranks continues as a single one; else
    [].
    """
    typed = dict(word.lstrip("+").partition("=")[::2] for word in words)
    devices = OmegaConf.select(saved, "parallel.devices")
    number = len(devices) if isinstance(devices, ListConfig) else devices
    is_single = typed.get("parallel.mode") == "single" and "parallel.devices" not in typed
    has_several = isinstance(number, int) and number > 1
    return ["parallel.devices=auto"] if is_single and has_several else []


def describe_unchanged_paths(data: DataConfig, given: set[str], measured: str) -> Iterator[str]:
    """Yield a line for each split that a new `data.path` does not change, because the split has its own path.

    measured: the split that a command evaluates. A split of a built-in reader then reads the new path. For "", as
        in a training, the lines are printed instead.
    """
    wanted_split = measured or "val"
    for split, node in {**validation_nodes(data), "test": data.test}.items():
        kind = split.partition("/")[0]
        if wanted_split not in (split, kind) or not isinstance(node, dict):
            continue
        key, name = f"data.{split.replace('/', '.')}", f"{kind}_path"
        own_path = node.get(name)
        if measured:
            reads_path = any(value == data.path for _, value in iterate_config_leaves(node))
            if own_path is None and not reads_path:
                yield f"data.path={data.path}: {key} reads other data; set the arguments of {key}.{TARGET}"
            continue
        is_inherited = own_path == (data.train or {}).get(name)
        source = f"data.train.{name}" if is_inherited else f"{key}.{name}"
        if own_path not in (None, data.path) and source not in given:
            print_note_once(
                f"data.path={data.path}: used for training only; {key} reads {source}={own_path}; for other samples "
                f"there set {source}={data.path}"
            )


PATH_KEY = re.compile(r"(path|root|dir|folder|file|from|teacher|tokenizer)$")


def may_be_path(key: str, value: str) -> bool:
    """Return whether a value may name a file or folder, judging by its key and its form."""
    return bool(PATH_KEY.search(key) or os.sep in value or Path(value).suffix)


def find_path_roots(run: RunDir, found: dict[str, Any]) -> list[Path]:
    """Return the folders against which the relative paths of a run are resolved, in order of preference.

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
            make_paths_absolute(found, here) != found and has_moved == began.is_dir()
        ):  # or nothing is there to be mistaken for it
            print_note_once(
                f"{run.root}: began in {began}, which is another place; its relative paths lead from {here}"
            )
        if began.is_dir():
            return [here, began] if has_moved else [began]
    return []


def make_paths_absolute(values: Any_, base: Path) -> Any_:
    """Return a copy in which every relative path that exists below `base` is absolute."""

    def make_absolute(key: str, value: Any) -> Any:
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
        return (
            FromEnvironment.resolve(there, value.reference) if isinstance(value, FromEnvironment) else there
        )

    return map_config(values, make_absolute)  # type: ignore[no-any-return]


def load_saved_values(path: Path) -> dict[str, Any]:
    """Return the saved config of a run as plain values, with references unresolved. Raise ConfigError.

    Nothing that the config names is imported.
    """
    text = read_yaml_text(path)
    try:
        parsed = yaml.load(text, Loader=build_config_loader())
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a config of a run ({read_first_error_line(error)})") from error
    if not isinstance(parsed, dict) or not parsed.get("model"):
        raise ConfigError(f"{path}: not a config of a run (it is empty, or names no model)")
    values = {str(name): value for name, value in parsed.items()}
    try:
        resolve_references(values)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return values


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """Return a saved config with overrides applied. Raise ConfigError. Options of groups cannot be changed."""
    return apply_overrides(load_saved_values(path), path, overrides)


def parse_saved_overrides(overrides: list[str]) -> CommandLine:
    """Return the overrides of a command for a saved run, parsed, with aliases translated."""
    words = split_command_line(overrides)
    translate_overrides(words, lambda *_: False, lambda name: False)
    return words


def merge_overrides(earlier: Iterable[str], words: Sequence[str]) -> list[str]:
    """Return the typed settings of a run, replaced by those of a later command that have the same key.

    A later choice for a group also removes earlier settings inside the group. Folders of runs are left out.
    """

    def read_key(word: str) -> str:
        return resolve_alias(word.lstrip("+~").partition("=")[0], lambda _: False)

    keys = {read_key(word) for word in words} | {"hydra.run.dir"}
    inside = tuple(f"{key}." for key in keys if "." not in key)
    left = [word for word in earlier if read_key(word) not in keys and not read_key(word).startswith(inside)]
    return [*left, *words]


def apply_overrides(found: dict[str, Any], path: Path, overrides: list[str], measured: str = "") -> RunConfig:
    """Return the config of saved values with the overrides of a command line. Raise ConfigError.

    found: the saved values. path: the file that they come from. measured: the only split that the command evaluates,
        to which a new `data.path` must apply.
    """
    run = RunDir(path.parent)
    roots = find_path_roots(run, found)
    for root in roots:
        found = make_paths_absolute(found, root)
    cfg = build_saved_node(found, path, read_secrets(run))
    saved_path = None
    with contextlib.suppress(OmegaConfBaseException):  # of an environment variable that is not set here
        saved_path = OmegaConf.select(cfg, "data.path")
    words = parse_saved_overrides([*keep_saved_mode(cfg, overrides), *overrides])
    faults = change_saved_node(cfg, words)
    config = build_saved_config(cfg, faults)
    if roots:  # what the command line and the environment name
        for base in (Path.cwd(), *roots):
            config = make_paths_absolute(config, base)
    faults += check_config(config)
    changed_keys = {word.lstrip("+~").partition("=")[0] for word in words.overrides}
    if "data.path" in changed_keys and config.data.path != saved_path:
        faults += check_data_path(config)
        faults += describe_unchanged_paths(config.data, changed_keys, measured)
    target_faults = check_target_arguments(config)  # of changed arguments: with the others it has trained
    changed_faults = {key: target_faults[key] for key in target_faults if key in changed_keys}
    faults += drop_reported_faults(changed_faults, faults)
    if faults:
        raise ConfigError(*map(words.restore_typed_setting, faults))
    return config


def read_secrets(run: RunDir) -> Any:
    """Return the secrets that are stored in a run folder, by key; None without any."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(run.secrets)
    return None


def build_saved_node(found: dict[str, Any], path: Path, secrets: Any) -> DictConfig:
    """Return saved values as a node of the schema. Raise ConfigError if they do not fit it."""
    try:
        node: DictConfig = pickle.loads(_merge_into_schema(pickle.dumps(fill_secrets(found, secrets))))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key = str(getattr(error, "full_key", None) or "config")
        raise ConfigError(f"{path}: not a config of a run ({key}: {read_first_error_line(error)})") from error
    return node


def change_saved_node(cfg: DictConfig, words: CommandLine) -> list[str]:
    """Set the values of a command line in a saved config. Return a message for each that cannot be set."""
    faults = list(words.twice)
    for key, folder in words.own.items():
        faults.append(f"{key}={folder}: a run stays in its folder")
    settable = []
    for word in words.overrides:
        if fault := check_override(word):
            faults.append(fault)
        else:
            settable.append(word)
    clear_replaced_nodes(cfg, words)
    set_saved_values(cfg, [*settable, *reset_devices(cfg, settable)], faults)
    return faults


def build_saved_config(cfg: DictConfig, faults: list[str]) -> RunConfig:
    """Return a node of the schema as a config. Messages are added to `faults`. Raise ConfigError if that fails."""
    faults += describe_missing_secrets(cfg)
    faults += move_trackers(cfg)
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(*faults, explain_broken_reference(error)) from error
    assert isinstance(config, RunConfig)
    return add_references(cfg, expand_home_folder(replace_value_aliases(config)))


@lru_cache(maxsize=1)  # a command reads the config of a run several times, with its overrides and without
def _merge_into_schema(values: bytes) -> bytes:
    """Return a node of the schema with saved values. Both are pickled, so that no caller changes what another gets."""
    cfg = build_schema_node()
    cfg.merge_with(OmegaConf.create(pickle.loads(values)))
    return pickle.dumps(cfg)


def clear_replaced_nodes(cfg: DictConfig, words: CommandLine) -> None:
    """Remove the saved arguments of a class that the command line replaces by another, as in `model=my_net.Net`.

    With `model._target_=my_net.Net` the arguments stay, which suits a subclass.
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
    """Replace each reference into a section by the value, so that the section can be cleared."""
    for key, text in iterate_config_leaves(OmegaConf.to_container(cfg, resolve=False)):
        reference = REFERENCE.fullmatch(text) if isinstance(text, str) else None
        if reference is not None and reference[1].startswith(f"{section}."):
            OmegaConf.update(cfg, key, OmegaConf.select(cfg, key))


NO_SWEEP = "several values, where a saved run has one (a list is [1,2])"


def set_saved_values(cfg: DictConfig, words: list[str], faults: list[str]) -> None:
    """Set the values of overrides in a saved config. Below an open node, keys may be new."""
    fixed = list_groups([find_conf_dir()])
    for word in words:
        override = parse_override(word, faults, NO_SWEEP)
        if override is None:
            continue
        key, text = override.key_or_group, word.partition("=")[2]
        may_be_new = any(key.startswith(f"{node}.") for node in list_open_nodes()) or is_tracker_argument(key)
        if key == "monitor.tracker":
            add_trackers(cfg, override.value())
        if key in fixed:
            fault = (
                f"{word}: a group cannot change in an existing run; change single values, as {key}.name=value"
            )
        elif override.is_delete():
            fault = f"{word}: settings of a run cannot be removed; give another value, as {key}=null"
        else:
            fault = set_config_value(cfg, key, override.value(), text, may_be_new, [find_conf_dir()])
        faults += [fault] if fault else []


def fill_secrets(found: dict[str, Any], secrets: Any) -> dict[str, Any]:
    """Return saved values with `***` replaced by the secrets that are known."""
    secret_values = secrets if isinstance(secrets, dict) else {}
    filled: dict[str, Any] = map_config(
        found,
        lambda key, value: (
            secret_values.get(key, value) if value == HIDDEN and is_secret_value(key, value) else value
        ),
    )
    return filled


def describe_missing_secrets(cfg: DictConfig) -> list[str]:
    """Return a line for each secret of a config that is not stored in the run folder."""
    return [
        f"{key}: a secret that is not stored in this folder (.secrets.json); give it again, as {key}=..."
        for key, value in iterate_config_leaves(OmegaConf.to_container(cfg, resolve=False))
        if value == HIDDEN and is_secret_value(key, value)
    ]
