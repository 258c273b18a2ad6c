"""Apply overrides: Hydra composes the chosen options, and the settings are set one by one.

Hydra stops at the first wrong setting. Here each setting is parsed by Hydra's grammar and set in the composed config
on its own, so one composition reports all faults of a command line.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
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
from trainrun.config.argv import CUSTOM, conf_dir, groups, options
from trainrun.config.messages import base_60_faults, configs, limit_fault, yaml_fault
from trainrun.config.schema import MonitorConfig, RunConfig, is_tracker, open_nodes, settings
from trainrun.instantiate import TARGET
from trainrun.limits import ANY, NODES, fits_kind, parse_seconds
from trainrun.model.choices import WORDS

ROOT = "trainrun.yaml"  # in a config folder: which option of each group is used
SECTIONS = ("data", "model", "task", "trainer", "scheduler", "monitor")  # that each root config must have

SWEEP = "several values make a sweep: add --multirun (a list is [1,2])"
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


def override_fault(word: str) -> str:
    """Return what is wrong with one override as typed, before its value is converted; "" if it is right."""
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
    """A Hydra plugin that puts the user's config folders before trainrun's; registered for this process only."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in _user_dirs:
            search_path.prepend("user", f"file://{folder}", anchor="main")


def schema_node() -> DictConfig:
    """Return the schema as an OmegaConf node that can be changed; frozen dataclasses would be read-only."""
    return copy.deepcopy(_make_schema())


@cache
def _make_schema() -> DictConfig:
    """Make the schema for merging with OmegaConf, which would keep frozen dataclasses read-only."""
    schema: DictConfig = OmegaConf.structured(RunConfig)
    _unlock(schema)
    schema.monitor._set_flag("struct", False)  # trackers have names of their own
    return schema


def _unlock(section: DictConfig) -> None:
    section._set_flag("readonly", None)
    for key in section:
        inner = section._get_node(key)
        if isinstance(inner, DictConfig) and not inner._is_none():
            _unlock(inner)


@cache
def _register() -> None:
    """Register the search path and the schema with Hydra, once: the schema takes 10 ms."""
    Plugins.instance().register(TrainrunSearchPath)
    node = schema_node()
    node.trainer.max_epochs = MISSING  # so that it is seen whether anybody sets it
    ConfigStore.instance().store(name="trainrun_schema", node=node, provider="trainrun")


def composed(words: list[str], folders: list[Path], faults: list[str]) -> DictConfig | None:
    """Return the config with all valid overrides; `faults` gets a line for each invalid one.

    Return None if the files of the config folders cannot be composed.
    """
    files = [
        path for folder in folders[:-1] for path in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml")])
    ]
    broken = [fault for path in configs(files) if (fault := limit_fault(path))]
    if broken:
        faults += broken
        return None
    read = [override for word in opened(words, folders) if (override := read_override(word, faults))]
    known_groups = groups(folders)
    choices, settings = [], []
    for override in read:
        if not _is_choice(override, known_groups):
            settings.append(override)
        elif fault := _no_option(override, folders):
            faults.append(fault)
        else:
            choices.append(str(override.input_line))
    cfg = _composed_choices(choices, folders, faults)
    if cfg is not None and (fault := _root_fault(cfg, folders)):
        faults[:] = [fault]  # the others follow from it
        return None
    if cfg is not None:
        faults += base_60_faults(files, folders[:-1], [*choices, *LEFT_OUT]) if files else []
        fill_splits(cfg)
        if cfg.monitor.tracker is not None:
            add_trackers(cfg, cfg.monitor.tracker)
        for override in settings:
            if override.key_or_group == "monitor.tracker":
                add_trackers(cfg, override.value())
        refused = [override for override in settings if _put(cfg, override, folders)]
        # once more, as what is said of one may depend on the others
        faults += [fault for override in refused if (fault := _put(cfg, override, folders))]
        _fill_epochs(cfg)
    return cfg


def _root_fault(cfg: DictConfig, folders: list[Path]) -> str:
    """Return what is wrong with a root config of the user, which may lack sections; empty if nothing."""
    lacking = [name for name in SECTIONS if name not in cfg]
    roots = [folder / ROOT for folder in folders if (folder / ROOT).is_file()]
    if not lacking:
        return ""
    return (
        f"{roots[0]}: takes the place of trainrun's own {ROOT} and lacks {', '.join(lacking)}; "
        "rename it, as experiment/mine.yaml in that folder, and add experiment=mine"
    )


SAME_SOURCE = "${data.train}"  # of data.val and data.test: another split of what data.train reads


def fill_splits(cfg: DictConfig) -> None:
    """Replace a reference to the whole node `data.train` by one reference per argument, so that overrides can change
    single ones.
    """
    data = OmegaConf.to_container(cfg.data, resolve=False)
    assert isinstance(data, dict)
    for name in ("val", "test"):
        if data[name] == SAME_SOURCE and isinstance(data["train"], dict):
            cfg.data[name] = references_to(data["train"])


def references_to(train: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that refer to those of `data.train`. Its `_target_` is copied."""
    return {
        name: value if name == TARGET or str(value).startswith("${") else f"${{data.train.{name}}}"
        for name, value in train.items()
    }


def _fill_epochs(cfg: DictConfig) -> None:
    """Set the default number of epochs, unless another limit than time ends the run."""
    trainer = OmegaConf.to_container(cfg.trainer, resolve=False)
    if OmegaConf.is_missing(cfg.trainer, "max_epochs") and isinstance(trainer, dict):
        lifted = trainer["max_steps"] is not None
        try:
            parse_seconds(trainer["max_duration"])
        except ValueError:  # of another unit
            lifted = True
        cfg.trainer.max_epochs = None if lifted else settings()["trainer.max_epochs"].default


def tracker_nodes() -> dict[str, dict[str, Any]]:
    """Return the nodes that `monitor.tracker` can name."""
    nodes: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("trackers.yaml").read_bytes())
    return nodes


def add_trackers(cfg: DictConfig, names: Any) -> None:
    """Replace the trackers by the nodes that `monitor.tracker` names; null removes all.

    Errors are reported later.
    """
    wanted, before = (
        value if isinstance(value, list | ListConfig) else [value] * (value is not None)
        for value in (names, cfg.monitor.tracker)
    )
    for name, node in tracker_nodes().items():
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
            faults.append(messages.unknown_key(key, f"{key}={node}", "monitor", setting_names))
    return faults


def read_override(word: str, faults: list[str], if_several: str = SWEEP) -> Override | None:
    typed = word.lstrip("+") or word
    override = None
    with contextlib.suppress(HydraException):
        override = _parser().parse_override(word)
    key = override.key_or_group if override is not None else ""
    is_hydra_key = key == "hydra" or key.startswith(("hydra.", "hydra/"))
    if override is not None and key and not is_hydra_key and not override.is_sweep_override():
        return override
    several = f"{typed}: {if_several}"
    faults.append(
        (messages.unread(typed) if is_hydra_key else several) if key else messages.explain_unreadable(typed)
    )
    return None


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _is_choice(override: Override, known: list[str]) -> bool:
    """Return whether Hydra reads an override as the choice of an option."""
    key = override.key_or_group
    is_group = key in known or "/" in key or override.package is not None
    return is_group and not isinstance(override.value(), dict)


def _no_option(override: Override, folders: list[Path]) -> str:
    """Return what is wrong with a chosen option; "" if its file exists, or if Hydra reports the fault itself."""
    group, option = override.key_or_group, override.value()
    wanted, known_options = option if isinstance(option, list) else [option], options(group, folders)
    if override.is_delete() or (
        known_options and (option is None or set(map(str, wanted)) <= {*known_options})
    ):
        return ""
    if any((folder / group / f"{option}.yaml").is_file() for folder in folders):
        return ""
    return messages.no_option(group, option, known_options)


def _composed_choices(words: list[str], folders: list[Path], faults: list[str]) -> DictConfig | None:
    """Compose the config from chosen options.

    An option that Hydra refuses is removed from `words` and explained in `faults`; then the rest is composed again.
    """
    while True:
        try:
            return _hydra_compose(words, folders[:-1])
        except yaml.YAMLError as error:
            faults.append(yaml_fault(error))
            return None
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            fault, culprit = messages.explain_composition(error, words, folders)
            faults.append(fault)
            if culprit is None:
                return None
            words[:] = [word for word in words if word != culprit]


def _hydra_compose(words: list[str], user_dirs: list[Path]) -> DictConfig:
    _user_dirs[:] = reversed(user_dirs)
    _register()
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name="trainrun"):
        return compose("trainrun", overrides=[*words, *LEFT_OUT], return_hydra_config=True)


def _put(cfg: DictConfig, override: Override, folders: list[Path]) -> str:
    key, text = override.key_or_group, str(override.input_line).partition("=")[2]
    if override.is_delete():
        return _remove_key(cfg, key, text, folders)
    may_be_new = override.is_add() or override.is_force_add()
    return put(cfg, key, override.value(), text, may_be_new, folders)


def put(cfg: DictConfig, key: str, value: Any, text: str, may_be_new: bool, folders: list[Path]) -> str:
    """Set one value. Return what is wrong with it, "" if nothing is. text: the value as typed."""
    try:
        if fault := misplaced(cfg, key, f"{key}={text}", may_be_new, folders):
            return fault
        OmegaConf.update(cfg, key, value, merge=True, force_add=may_be_new)
    except OmegaConfBaseException as error:
        return messages.explain_value(error, key, text, folders)
    return ""


def misplaced(cfg: DictConfig, key: str, word: str, may_be_new: bool, folders: list[Path]) -> str:
    """Return why a key does not exist; "" if it does or may be new."""
    node: Any = cfg
    parts = key.split(".")
    for place, part in enumerate(parts):
        if isinstance(node, ListConfig) or (may_be_new and _lacks(node, part)):
            return ""  # by number, which OmegaConf looks at, or new, in place of a name too
        if not isinstance(node, DictConfig) or _lacks(node, part):
            return messages.no_place(key, word, ".".join(parts[:place]), node, folders)
        node = OmegaConf.select(cfg, ".".join(parts[: place + 1])) if place + 1 < len(parts) else None
    return ""


def _lacks(node: Any, part: str) -> bool:
    return part not in node.keys() if isinstance(node, DictConfig) else isinstance(node, str | None)  # noqa: SIM118


def _remove_key(cfg: DictConfig, key: str, text: str, folders: list[Path]) -> str:
    """Remove a key (`~key`), so that the target's default applies. Return a message, or ""."""
    if text:
        return f"~{key}={text}: a setting is taken away without a value, as ~{key}"
    if fault := misplaced(cfg, key, f"~{key}", False, folders):
        return fault
    above, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, above) if above else cfg
    try:
        with open_dict(cfg):
            del node[name]
    except OmegaConfBaseException as error:
        return messages.explain_value(error, key, "", folders)
    return ""


def in_tracker(key: str) -> bool:
    return is_tracker(key) and key.count(".") > 1


def opened(overrides: list[str], folders: list[Path]) -> list[str]:
    """Return the overrides with `++` where new keys are allowed: in custom nodes, whose target's signature is
    checked later.
    """
    chosen = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    targets = [key.removesuffix("._target_") for key in chosen if key.endswith("._target_")]
    named = [key for key in targets if any(f"{key}.".startswith(f"{node}.") for node in open_nodes())]
    own_groups, user_dirs = groups([conf_dir()]), folders[:-1]

    def is_open(key: str) -> bool:
        group = key.partition(".")[0]
        if any(key == f"{node}._target_" or key.startswith(f"{node}.") for node in named):
            return True
        if key.startswith(BY_NAME) or key in MODEL_KEYS or in_tracker(key):
            return True
        if not any(key.startswith(node + ".") for node in open_nodes()):
            return False
        option = chosen.get(group, "").strip('"')
        return option == CUSTOM or any((folder / group / f"{option}.yaml").is_file() for folder in user_dirs)

    def with_plus(word: str) -> str:
        """Return the override with `++` if its key may be new, else without `+`.

        In the closed schema, `+` would add a misspelt setting that no code reads.
        """
        bare = word.lstrip("+")
        key = bare.partition("=")[0]
        if is_open(key):
            return f"++{bare}"
        if not key:
            return word
        of_the_user = key not in own_groups and (key in groups(user_dirs) or "/" in key)
        return word if of_the_user or key.startswith(tuple(f"{node}." for node in open_nodes())) else bare

    return [word if word[:1] == "~" else with_plus(word) for word in overrides]
