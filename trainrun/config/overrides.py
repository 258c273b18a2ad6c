"""Apply overrides to a config: Hydra composes the chosen options, then each setting is set on its own.

Hydra alone would stop at the first wrong setting. Setting each value separately finds all faults of a command line
in one composition.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainrun.config import messages
from trainrun.config.argv import CUSTOM, find_conf_dir, list_groups, list_options
from trainrun.config.messages import check_config_file, explain_yaml_error, filter_config_files
from trainrun.config.schema import MonitorConfig, RunConfig, is_tracker, list_open_nodes, settings
from trainrun.instantiate import TARGET
from trainrun.limits import ANY, NODES, fits_kind, parse_seconds
from trainrun.model.choices import WORDS

ROOT = "trainrun.yaml"  # in a config folder: which option of each group is used
SECTIONS = ("data", "model", "task", "trainer", "scheduler", "monitor")  # that each root config must have

SWEEP = "several values need --multirun (a sweep); a list is [1,2]"
BOOLEANS = ("true", "false", "on", "off", "yes", "no", "y", "n", "t", "f", "1", "0")
# Options of Hydra's own that no run reads; without them composing takes 0.8x its time.
LEFT_OUT = (
    "~hydra/launcher", "~hydra/sweeper", "~hydra/output", "~hydra/env",
    "~hydra/help", "~hydra/hydra_help", "~hydra/hydra_logging", "~hydra/job_logging",
)  # fmt: skip

BY_NAME = tuple(  # below these every name is the user's own
    f"{key}." for key, found in settings().items() if found.opens in (NODES, ANY) or key in ("step", "loop")
)
MODEL_KEYS = tuple(f"model.{name}" for name in WORDS)
_user_dirs: list[Path] = []


def check_override(word: str) -> str:
    """Return what is wrong with the text of one override; "" if it is right. Its value is not converted here."""
    key, equals, value = word.lstrip("+").partition("=")
    if not equals or set(value) & set("{(,$"):  # a reference, or several values of a sweep
        return ""
    kind = settings()[key].kind if key in settings() else None
    if kind is bool and value.lower() not in BOOLEANS:
        return f"{key}={value}: must be true or false"
    if not value and (kind is str or (isinstance(kind, UnionType) and fits_kind("", kind))):
        return f"{key}=: has no value; give one, or leave it out"
    cores = os.cpu_count() or 1
    if key == "trainer.num_threads" and value.isdigit() and int(value) > cores:
        return f"{key}={value}: this machine has {cores} cores; use at most {cores}, or auto"
    return ""


class TrainrunSearchPath(SearchPathPlugin):
    """A Hydra plugin that searches the user's config folders before trainrun's, in this process only."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in _user_dirs:
            search_path.prepend("user", f"file://{folder}", anchor="main")


def build_schema_node() -> DictConfig:
    """Return the schema as a new OmegaConf node that can be changed. A deep copy would take 9 times as long."""
    schema: DictConfig = pickle.loads(_pickle_schema())
    return schema


@cache
def _pickle_schema() -> bytes:
    """Build the schema as an OmegaConf node that can be changed; OmegaConf makes frozen dataclasses read-only."""
    schema: DictConfig = OmegaConf.structured(RunConfig)
    _make_writable(schema)
    schema.monitor._set_flag("struct", False)  # trackers have names of their own
    return pickle.dumps(schema)


def _make_writable(section: DictConfig) -> None:
    section._set_flag("readonly", None)
    for key in section:
        inner = section._get_node(key)
        if isinstance(inner, DictConfig) and not inner._is_none():
            _make_writable(inner)


@cache
def _register_with_hydra() -> None:
    """Register the search path and the schema with Hydra, once per process, because the schema takes 10 ms."""
    Plugins.instance().register(TrainrunSearchPath)
    node = build_schema_node()
    node.trainer.max_epochs = MISSING  # so that it is seen whether anybody sets it
    ConfigStore.instance().store(name="trainrun_schema", node=node, provider="trainrun")


def compose_overrides(words: list[str], folders: list[Path], faults: list[str]) -> DictConfig | None:
    """Return the config with all valid overrides. A line for each invalid override is added to `faults`.

    Return None if the files of the config folders cannot be composed.
    """
    files = [
        path for folder in folders[:-1] for path in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml")])
    ]
    broken = [fault for path in filter_config_files(files) if (fault := check_config_file(path))]
    if broken:
        faults += broken
        return None
    read = [override for word in allow_new_keys(words, folders) if (override := parse_override(word, faults))]
    known_groups = list_groups(folders)
    choices, settings = [], []
    for override in read:
        if not _is_option_choice(override, known_groups):
            settings.append(override)
        elif fault := _describe_missing_option(override, folders):
            faults.append(fault)
        else:
            choices.append(str(override.input_line))
    cfg = _compose_choices(choices, folders, faults)
    if cfg is not None and (fault := _check_root_config(cfg, folders)):
        faults[:] = [fault]  # the others follow from it
        return None
    if cfg is not None:
        expand_split_references(cfg)
        if cfg.monitor.tracker is not None:
            add_trackers(cfg, cfg.monitor.tracker)
        for override in settings:
            if override.key_or_group == "monitor.tracker":
                add_trackers(cfg, override.value())
        refused = [override for override in settings if _apply_override(cfg, override, folders)]
        # once more, as what is said of one may depend on the others
        faults += [fault for override in refused if (fault := _apply_override(cfg, override, folders))]
        _set_default_epochs(cfg)
    return cfg


def _check_root_config(cfg: DictConfig, folders: list[Path]) -> str:
    """Return a message if a root config of the user lacks sections; else ""."""
    lacking = [name for name in SECTIONS if name not in cfg]
    roots = [folder / ROOT for folder in folders if (folder / ROOT).is_file()]
    if not lacking:
        return ""
    return (
        f"{roots[0]}: takes the place of trainrun's own {ROOT} and lacks {', '.join(lacking)}; "
        "rename it, as experiment/mine.yaml in that folder, and add experiment=mine"
    )


SAME_SOURCE = "${data.train}"  # of data.val and data.test: another split of what data.train reads


def expand_split_references(cfg: DictConfig) -> None:
    """Replace a reference to the whole node `data.train` by one reference for each argument.

    Overrides can then change single arguments of a split.
    """
    data = OmegaConf.to_container(cfg.data, resolve=False)
    assert isinstance(data, dict)
    for name in ("val", "test"):
        if data[name] == SAME_SOURCE and isinstance(data["train"], dict):
            cfg.data[name] = build_references(data["train"])


def build_references(train: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a node that refers to `data.train`: its `_target_`, and a reference for each other
    argument.
    """
    return {
        name: value if name == TARGET or str(value).startswith("${") else f"${{data.train.{name}}}"
        for name, value in train.items()
    }


def _set_default_epochs(cfg: DictConfig) -> None:
    """Set the default number of epochs, unless a limit in steps, samples or tokens ends the run."""
    trainer = OmegaConf.to_container(cfg.trainer, resolve=False)
    if OmegaConf.is_missing(cfg.trainer, "max_epochs") and isinstance(trainer, dict):
        lifted = trainer["max_steps"] is not None
        try:
            parse_seconds(trainer["max_duration"])
        except ValueError:  # of another unit
            lifted = True
        cfg.trainer.max_epochs = None if lifted else settings()["trainer.max_epochs"].default


def load_tracker_nodes() -> dict[str, dict[str, Any]]:
    """Return the nodes of the trackers that `monitor.tracker` can name, by name."""
    nodes: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("trackers.yaml").read_bytes())
    return nodes


def add_trackers(cfg: DictConfig, names: Any) -> None:
    """Replace the built-in trackers by the trackers that `monitor.tracker` names; null removes all trackers.

    A wrong name is reported later.
    """
    wanted, before = (
        value if isinstance(value, list | ListConfig) else [value] * (value is not None)
        for value in (names, cfg.monitor.tracker)
    )
    for name, node in load_tracker_nodes().items():
        if name in wanted and name not in cfg.monitor:
            cfg.monitor[name] = node
        elif (name in before or names is None) and name not in wanted:
            cfg.monitor.pop(name, None)


def move_trackers(cfg: DictConfig) -> list[str]:
    """Move the trackers from the keys of `monitor` into the field `listeners`.

    Return a message for each key that is neither a setting nor a tracker.
    """
    setting_names = [item.name for item in fields(MonitorConfig)]
    faults: list[str] = []
    for name in [name for name in cfg.monitor if name not in setting_names]:
        node = cfg.monitor.pop(name)
        if node is None or isinstance(node, DictConfig):
            cfg.monitor.listeners[name] = node
        else:
            key = f"monitor.{name}"
            faults.append(messages.explain_unknown_key(key, f"{key}={node}", "monitor", setting_names))
    return faults


def parse_override(word: str, faults: list[str], if_several: str = SWEEP) -> Override | None:
    """Return an override as parsed by Hydra. Return None, and add a message to `faults`, if a run cannot use it.

    if_several: the message for several values, which only a sweep can have.
    """
    typed = word.lstrip("+") or word
    override = None
    with contextlib.suppress(HydraException):
        override = _build_override_parser().parse_override(word)
    key = override.key_or_group if override is not None else ""
    is_hydra_key = key == "hydra" or key.startswith(("hydra.", "hydra/"))
    if override is not None and key and not is_hydra_key and not override.is_sweep_override():
        return override
    several = f"{typed}: {if_several}"
    faults.append(
        (messages.explain_unused_hydra_setting(typed) if is_hydra_key else several)
        if key
        else messages.explain_unparsable_override(typed)
    )
    return None


@cache
def _build_override_parser() -> OverridesParser:
    return OverridesParser.create()


def _is_option_choice(override: Override, known: list[str]) -> bool:
    """Return whether Hydra reads an override as the choice of an option."""
    key = override.key_or_group
    is_group = key in known or "/" in key or override.package is not None
    return is_group and not isinstance(override.value(), dict)


def _describe_missing_option(override: Override, folders: list[Path]) -> str:
    """Return why a chosen option does not exist; "" if it exists, or if Hydra reports the fault itself."""
    group, option = override.key_or_group, override.value()
    wanted, known_options = option if isinstance(option, list) else [option], list_options(group, folders)
    if override.is_delete() or (
        known_options and (option is None or set(map(str, wanted)) <= {*known_options})
    ):
        return ""
    if any((folder / group / f"{option}.yaml").is_file() for folder in folders):
        return ""
    return messages.explain_unknown_option(group, option, known_options)


def _compose_choices(words: list[str], folders: list[Path], faults: list[str]) -> DictConfig | None:
    """Compose the config from the chosen options; None if a file is not valid YAML.

    An option that Hydra refuses is removed from `words` and explained in `faults`. Then the others are composed
    again.
    """
    while True:
        try:
            return _compose_with_hydra(words, folders[:-1])
        except yaml.YAMLError as error:
            faults.append(explain_yaml_error(error))
            return None
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            fault, culprit = messages.explain_composition_error(error, words, folders)
            faults.append(fault)
            if culprit is None:
                return None
            words[:] = [word for word in words if word != culprit]


def _compose_with_hydra(words: list[str], user_dirs: list[Path]) -> DictConfig:
    _user_dirs[:] = reversed(user_dirs)
    _register_with_hydra()
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(find_conf_dir()), version_base="1.3", job_name="trainrun"):
        return compose("trainrun", overrides=[*words, *LEFT_OUT], return_hydra_config=True)


def _apply_override(cfg: DictConfig, override: Override, folders: list[Path]) -> str:
    key, text = override.key_or_group, str(override.input_line).partition("=")[2]
    if override.is_delete():
        return _remove_key(cfg, key, text, folders)
    may_be_new = override.is_add() or override.is_force_add()
    return set_config_value(cfg, key, override.value(), text, may_be_new, folders)


def set_config_value(
    cfg: DictConfig, key: str, value: Any, text: str, may_be_new: bool, folders: list[Path]
) -> str:
    """Set one value. Return what is wrong with it, or "". text: the value as typed."""
    try:
        if fault := explain_misplaced_key(cfg, key, f"{key}={text}", may_be_new, folders):
            return fault
        OmegaConf.update(cfg, key, value, merge=True, force_add=may_be_new)
    except OmegaConfBaseException as error:
        return messages.explain_wrong_value(error, key, text, folders)
    return ""


def explain_misplaced_key(cfg: DictConfig, key: str, word: str, may_be_new: bool, folders: list[Path]) -> str:
    """Return why a key does not exist; "" if it exists or may be new."""
    node: Any = cfg
    parts = key.split(".")
    for place, part in enumerate(parts):
        if isinstance(node, ListConfig) or (may_be_new and _lacks_key(node, part)):
            return ""  # by number, which OmegaConf looks at, or new, in place of a name too
        if not isinstance(node, DictConfig) or _lacks_key(node, part):
            return messages.explain_missing_key(key, word, ".".join(parts[:place]), node, folders)
        node = OmegaConf.select(cfg, ".".join(parts[: place + 1])) if place + 1 < len(parts) else None
    return ""


def _lacks_key(node: Any, part: str) -> bool:
    return part not in node.keys() if isinstance(node, DictConfig) else isinstance(node, str | None)  # noqa: SIM118


def _remove_key(cfg: DictConfig, key: str, text: str, folders: list[Path]) -> str:
    """Remove a key (`~key`), so that the default of the target applies. Return what is wrong, or ""."""
    if text:
        return f"~{key}={text}: remove a setting without a value, as ~{key}"
    if fault := explain_misplaced_key(cfg, key, f"~{key}", False, folders):
        return fault
    above, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, above) if above else cfg
    try:
        with open_dict(cfg):
            del node[name]
    except OmegaConfBaseException as error:
        return messages.explain_wrong_value(error, key, "", folders)
    return ""


def is_tracker_argument(key: str) -> bool:
    """Return whether a key is an argument of a tracker, such as `monitor.mlflow.uri`."""
    return is_tracker(key) and key.count(".") > 1


def allow_new_keys(overrides: list[str], folders: list[Path]) -> list[str]:
    """Return the overrides with `++` where a key may be new: in custom nodes, whose signature is checked later."""
    chosen = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    targets = [key.removesuffix("._target_") for key in chosen if key.endswith("._target_")]
    named = [key for key in targets if any(f"{key}.".startswith(f"{node}.") for node in list_open_nodes())]
    own_groups, user_dirs = list_groups([find_conf_dir()]), folders[:-1]

    def allows_new_key(key: str) -> bool:
        group = key.partition(".")[0]
        if any(key == f"{node}._target_" or key.startswith(f"{node}.") for node in named):
            return True
        if key.startswith(BY_NAME) or key in MODEL_KEYS or is_tracker_argument(key):
            return True
        if not any(key.startswith(node + ".") for node in list_open_nodes()):
            return False
        option = chosen.get(group, "").strip('"')
        return option == CUSTOM or any((folder / group / f"{option}.yaml").is_file() for folder in user_dirs)

    def add_plus(word: str) -> str:
        """Return the override with `++` if its key may be new; else without any `+`.

        In the closed schema, a `+` would add a misspelt setting that no code reads.
        """
        bare = word.lstrip("+")
        key = bare.partition("=")[0]
        if allows_new_key(key):
            return f"++{bare}"
        if not key:
            return word
        of_the_user = key not in own_groups and (key in list_groups(user_dirs) or "/" in key)
        return (
            word if of_the_user or key.startswith(tuple(f"{node}." for node in list_open_nodes())) else bare
        )

    return [word if word[:1] == "~" else add_plus(word) for word in overrides]
