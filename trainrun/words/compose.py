"""From words to a `RunConfig`: Hydra composes, and every mistake becomes one readable line.

Hydra stops at the first mistake; here the word that is wrong is taken out and the rest is composed
again, so that all faults are listed at once. Nothing of Hydra or OmegaConf is left afterwards.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainrun.config import OPEN_NODES, RunConfig, conf_dir, groups, options, user_conf_dirs
from trainrun.data.cache.spec import parse_cache
from trainrun.errors import EXIT_DONE, ConfigError, DataError
from trainrun.words.argv import CUSTOM, Words, split_words, translate, with_one_warmup
from trainrun.words.checks import check, word_fault
from trainrun.words.data_path import follow_path, unread_path
from trainrun.words.explain import explain, explain_value, first_line
from trainrun.words.renamed import in_words_of_today
from trainrun.words.tuned import stale
from trainrun.words.yaml_limits import limit_fault, read_yaml_text, yaml_fault

_user_dirs: list[Path] = []


class TrainrunSearchPath(SearchPathPlugin):
    """Puts the user's config folders in front of ours; registered for this process only."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in _user_dirs:
            search_path.prepend("user", f"file://{folder}", anchor="main")


@dataclass(frozen=True)
class Composition:
    """A checked config. overrides: the words as Hydra got them; own: what the runner itself was told."""

    config: RunConfig
    choices: dict[str, str]
    overrides: list[str]
    own: dict[str, str]
    notes: list[str] = field(default_factory=list)


def prepare(argv: list[str], working_dir: Path) -> tuple[Words, list[Path]]:
    """The command line ready for Hydra, and every folder of configs, the user's first."""
    words = split_words(argv)
    folders = [*user_conf_dirs(words.config_dirs, working_dir), conf_dir()]
    known = groups(folders)
    translate(words, lambda group, option: option in options(group, folders), lambda name: name in known)
    return words, folders


def compose_run(argv: list[str], working_dir: Path | None = None) -> Composition:
    """The config that the words ask for. Raises ConfigError with every fault of it."""
    words, folders = prepare(argv, working_dir or Path.cwd())
    try:
        return _composition(words, folders, working_dir or Path.cwd())
    except ConfigError as error:
        raise ConfigError(*[words.as_typed(fault) for fault in error.faults]) from error


def _composition(words: Words, folders: list[Path], working_dir: Path) -> Composition:
    wrong = {word: fault for word in words.overrides if (fault := word_fault(word))}
    faults = list(wrong.values())
    overrides = [word for word in words.overrides if word not in wrong]
    composed = _compose_without_faults(with_one_warmup(overrides), folders, faults)
    if composed is None:
        raise ConfigError(*faults)
    cfg, kept = composed
    choices = {
        key: str(value) for key, value in cfg.hydra.runtime.choices.items() if not key.startswith("hydra")
    }
    try:
        config = to_run_config(cfg)
    except ConfigError as error:
        raise ConfigError(*faults, *error.faults) from error
    except OmegaConfBaseException as error:
        raise ConfigError(*faults, explain_value(error, str(error.full_key or "config"), "")) from error
    faults += [*faults_of(config), *unread_path(config)]
    if faults:
        raise ConfigError(*faults)
    config.run_name = config.run_name or (
        f"{_named(config.data.name, config.data.train)}-{_named(choices.get('model', 'model'), config.model)}"
    )
    words.notes += stale_preset(config, choices.get("preset", "none"), folders, working_dir)
    return Composition(config, choices, kept, words.own, words.notes)


def _named(option: str, node: Any) -> str:
    """Of what is the user's own, the class or function that it names."""
    target = node.get("_target_") if option == CUSTOM and isinstance(node, dict) else None
    name = str(target).rpartition(".")[2]
    return name if target and name.isidentifier() else option


def stale_preset(config: RunConfig, preset: str, folders: list[Path], working_dir: Path) -> list[str]:
    """One line where the preset was measured on something else."""
    files = [folder / "preset" / f"{preset}.yaml" for folder in folders]
    file = next((file for file in files if preset != "none" and file.is_file()), None)
    told = stale(file, config, working_dir) if file is not None else ""
    return [told] if told else []


def faults_of(config: RunConfig) -> list[str]:
    """Of the values, and of those words that a room reads itself."""
    faults = check(config)
    try:
        parse_cache(config.data.cache)
    except DataError as error:
        faults.append(str(error))
    return faults


def to_run_config(cfg: DictConfig) -> RunConfig:
    """Plain dataclasses with every reference resolved."""
    merged = OmegaConf.merge(OmegaConf.structured(RunConfig), {k: v for k, v in cfg.items() if k != "hydra"})
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise ConfigError(*[f"{key}: needs a value; add {key}=..." for key in missing])
    config = OmegaConf.to_object(merged)
    assert isinstance(config, RunConfig)
    return config


def save_config(config: RunConfig) -> str:
    """The config as YAML text, to be read by `load_config`."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def plain_config(path: Path) -> dict[str, Any]:
    """The plain values of a config that a run has saved; raises ConfigError. Nothing in it is looked up or run."""
    text = read_yaml_text(path)
    try:
        found = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a config of a run ({first_line(error)})") from error
    if not isinstance(found, dict) or not found.get("model"):
        raise ConfigError(f"{path}: not a config of a run (it is empty, or names no model)")
    for key, value in leaves(found):
        if isinstance(value, str) and "${" in value:
            raise ConfigError(
                f"{path}: {key}={value[:80]}: a reference; a run saves its config with all of them resolved"
            )
    return {str(name): value for name, value in found.items()}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values that hold no others, with their keys."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        yield key, value
        return
    for name, item in items:
        yield from leaves(item, f"{key}.{name}" if key else str(name))


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """A saved config with single values changed. Raises ConfigError; group choices are fixed by now."""
    return with_words(plain_config(path), path, overrides)


def with_words(found: dict[str, Any], path: Path, overrides: list[str]) -> RunConfig:
    """The config that `path` holds as plain values, with the words of a command line."""
    try:
        saved = in_words_of_today(OmegaConf.create(found), path)
        cfg = OmegaConf.merge(OmegaConf.structured(RunConfig), saved)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key = str(getattr(error, "full_key", None) or "config")
        raise ConfigError(f"{path}: not a config of a run ({key}: {first_line(error)})") from error
    assert isinstance(cfg, DictConfig)
    words = split_words(overrides)
    known = groups([conf_dir()])
    translate(words, lambda *_: False, lambda name: False)
    faults = words.twice
    for word in words.overrides:
        key, equals, value = word.lstrip("+").partition("=")
        if not equals or key in known:
            faults.append(
                f"{word}: the groups of a run are fixed; only single values can change, as {key}.name=value"
            )
            continue
        if fault := word_fault(word):
            faults.append(fault)
            continue
        try:
            open_node = any(key.startswith(node + ".") for node in OPEN_NODES)
            OmegaConf.update(cfg, key, yaml.safe_load(value), force_add=open_node)
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            faults.append(explain_value(error, key, value))
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(*faults, explain_value(error, str(error.full_key or "config"), "")) from error
    assert isinstance(config, RunConfig)
    follow_path(config.data, OmegaConf.select(saved, "data.path"))
    faults += faults_of(config)
    if faults:
        raise ConfigError(*[words.as_typed(fault) for fault in faults])
    return config


def _compose_without_faults(
    overrides: list[str], folders: list[Path], faults: list[str]
) -> tuple[DictConfig, list[str]] | None:
    """Composes; a word that Hydra refuses is explained in `faults`, taken out, and the rest tried again."""
    words = _opened(overrides, folders)
    for folder in folders[:-1]:
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]):
            if fault := limit_fault(path):
                faults.append(fault)
    if faults:
        return None
    while True:
        try:
            return _hydra_compose(words, folders[:-1]), words
        except yaml.YAMLError as error:
            faults.append(yaml_fault(error))
            return None
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            fault, culprit = explain(error, words, folders)
            faults.append(fault)
            if culprit is None:
                return None
            words = [word for word in words if word != culprit]


@cache
def _register() -> None:
    """Our search path and our schema, made known to Hydra once: the schema takes 10 ms."""
    Plugins.instance().register(TrainrunSearchPath)
    ConfigStore.instance().store(name="trainrun_schema", node=RunConfig, provider="trainrun")


def _hydra_compose(overrides: list[str], user_dirs: list[Path]) -> DictConfig:
    _user_dirs[:] = reversed(user_dirs)
    _register()
    logging.getLogger("hydra").setLevel(logging.ERROR)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name="trainrun"):
        return compose("trainrun", overrides=overrides, return_hydra_config=True)


def _opened(overrides: list[str], folders: list[Path]) -> list[str]:
    """Keys below a node of the user's own may be new: the target's signature decides, not Hydra."""
    chosen = dict(word.partition("=")[::2] for word in overrides)
    targets = [key.removesuffix("._target_") for key in chosen if key.endswith("._target_")]
    named = [key for key in targets if any(f"{key}.".startswith(f"{node}.") for node in OPEN_NODES)]
    user_dirs = folders[:-1]

    def is_open(key: str) -> bool:
        group = key.partition(".")[0]
        if any(key == f"{node}._target_" or key.startswith(f"{node}.") for node in named):
            return True
        if group in ("user", "loop") or key.startswith("monitor.listeners."):
            return True
        if not any(key.startswith(node + ".") for node in OPEN_NODES):
            return False
        option = chosen.get(group, "").strip('"')
        return option == CUSTOM or any((folder / group / f"{option}.yaml").is_file() for folder in user_dirs)

    return [word if word[:1] == "~" else _with_plus(word, is_open) for word in overrides]


def _with_plus(word: str, is_open: Callable[[str], bool]) -> str:
    """`++` where a key may be new, as typed in the rest of an open node, and none where the schema is closed:
    with a `+` Hydra would add a misspelt setting that nobody reads."""
    bare = word.lstrip("+")
    key = bare.partition("=")[0]
    if is_open(key):
        return f"++{bare}"
    return word if "." not in key or key.startswith(tuple(f"{node}." for node in OPEN_NODES)) else bare


def hydra_question(words: Words, folders: list[Path]) -> int:
    """Hydra's own questions (--cfg job, --info, --hydra-help, shell completion), answered by Hydra."""
    _user_dirs[:] = reversed(folders[:-1])
    _register()
    sys.argv = ["trainrun", *words.flags, *_opened(words.overrides, folders)]
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="trainrun")(lambda _: None)()
    return EXIT_DONE
