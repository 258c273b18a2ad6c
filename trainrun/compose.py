"""From words to a `RunConfig`: Hydra composes, and every mistake becomes one readable line.

Hydra stops at the first mistake; here the word that is wrong is taken out and the rest is composed
again, so that all faults are listed at once. Nothing of Hydra or OmegaConf is left afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainrun.checks import check, nearest
from trainrun.config import OPEN_NODES, RunConfig, conf_dir
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.words import Words, split_words, translate

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


def user_conf_dirs(extra: list[str], working_dir: Path) -> list[Path]:
    """Folders searched before ours: each --config-dir, then ./conf where it has one of our groups."""
    folders = [Path(folder).expanduser().resolve() for folder in extra]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: no such folder")
    beside = (working_dir / "conf").resolve()
    if beside != conf_dir() and any((beside / group).is_dir() for group in groups([conf_dir()])):
        folders.append(beside)
    return folders


def groups(folders: list[Path]) -> list[str]:
    return sorted({item.name for folder in folders for item in folder.iterdir() if item.is_dir()})


def options(group: str, folders: list[Path]) -> list[str]:
    return sorted({item.stem for folder in folders for item in (folder / group).glob("*.yaml")})


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
    faults: list[str] = []
    composed = _compose_without_faults(words.overrides, folders, faults)
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
        raise ConfigError(*faults, f"{error.full_key or 'config'}: {_first_line(error)}") from error
    faults += check(config)
    if faults:
        raise ConfigError(*faults)
    config.run_name = config.run_name or f"{config.data.name}-{choices.get('model', 'model')}"
    return Composition(config, choices, kept, words.own, words.notes)


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


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """A saved config with single values changed. Raises ConfigError; group choices are fixed by now."""
    try:
        cfg = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(path))
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not a config of a run ({_first_line(error)})") from error
    assert isinstance(cfg, DictConfig)
    words = split_words(overrides)
    known = groups([conf_dir()])
    translate(words, lambda *_: False, lambda name: False)
    faults: list[str] = []
    for word in words.overrides:
        key, equals, value = word.lstrip("+").partition("=")
        if not equals or key in known:
            faults.append(
                f"{word}: the groups of a run are fixed; only single values can change, as {key}.name=value"
            )
            continue
        try:
            open_node = any(key.startswith(node + ".") for node in OPEN_NODES)
            OmegaConf.update(cfg, key, yaml.safe_load(value), force_add=open_node)
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            faults.append(_explain_value(error, key, value))
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, RunConfig)
    faults += check(config)
    if faults:
        raise ConfigError(*faults)
    return config


def _compose_without_faults(
    overrides: list[str], folders: list[Path], faults: list[str]
) -> tuple[DictConfig, list[str]] | None:
    """Composes; a word that Hydra refuses is explained in `faults`, taken out, and the rest tried again."""
    words = _opened(overrides, folders)
    while True:
        try:
            return _hydra_compose(words, folders[:-1]), words
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            fault, culprit = _explain(error, words, folders)
            faults.append(fault)
            if culprit is None:
                return None
            words = [word for word in words if word != culprit]


def _hydra_compose(overrides: list[str], user_dirs: list[Path]) -> DictConfig:
    _user_dirs[:] = reversed(user_dirs)
    Plugins.instance().register(TrainrunSearchPath)
    ConfigStore.instance().store(name="trainrun_schema", node=RunConfig, provider="trainrun")
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
        return option == "custom" or any(
            (folder / group / f"{option}.yaml").is_file() for folder in user_dirs
        )

    return [
        f"++{word}" if word[:1] not in "+~" and is_open(word.partition("=")[0]) else word
        for word in overrides
    ]


def _explain(error: Exception, words: list[str], folders: list[Path]) -> tuple[str, str | None]:
    """One line for the user, and the word to take out; None where no single word is to blame."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        culprit = _word_of(words, lambda key: key == group)
        names = [name for name in error.options if "/" not in name]
        text = f"{group}={option}: there is no such {group}.{nearest(option, names)} Choose from: {', '.join(names)}"
        return text, culprit
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as key=value ({_first_line(error)})", str(error.override)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        key = str(cause.full_key)
        culprit = _word_of(words, lambda typed: typed == key or typed.startswith(key + "."))
        value = culprit.partition("=")[2] if culprit else ""
        if culprit is None:
            return _first_line(error), None
        return _explain_value(cause, culprit.partition("=")[0].lstrip("+~"), value, folders), culprit
    if "Ambiguous value" in str(error):
        culprit = _word_of(words, lambda key: f"'{key}=" in str(error))
        return f"{culprit}: several values make a sweep: add --multirun (a list is [1,2])", culprit
    for word in words:
        name = word.partition("=")[0].lstrip("+~")
        if f"'{name}'" in str(error):
            return _unknown_key(name, word, None, folders), word
        if not name:
            return f"{word}: cannot be read as key=value", word
    return _first_line(error), None


def _explain_value(error: Exception, key: str, value: str, folders: list[Path] | None = None) -> str:
    if isinstance(error, OmegaConfBaseException):
        text = _first_line(error)
        if "not in" in text or "is not in struct" in text:
            return _unknown_key(key, f"{key}={value}", error.parent_node, folders)
        for kind, word in (
            ("Integer", "a whole number"),
            ("Float", "a number"),
            ("Boolean", "true or false"),
        ):
            if f"converted to {kind}" in text:
                return f"{key}={value}: must be {word}"
    return f"{key}={value}: {_first_line(error)}"


def _unknown_key(key: str, word: str, parent: Any, folders: list[Path] | None) -> str:
    head, _, last = key.rpartition(".")
    names: list[str] = []
    with contextlib.suppress(AttributeError, TypeError):
        names = [str(name) for name in parent if str(name) != "hydra"]
    if not head:
        names = sorted({*names, *groups(folders or [conf_dir()])})
        kind = "no such group or setting"
    else:
        kind = "no such setting"
    near = nearest(last, names)
    known = "" if near or not names else f" Known there: {', '.join(names[:12])}"
    return f"{word}: {kind}.{near.replace('mean ', 'mean ' + (head + '.' if head else ''))}{known}"


def _word_of(words: list[str], wanted: Any) -> str | None:
    return next((word for word in words if wanted(word.partition("=")[0].lstrip("+~"))), None)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def hydra_question(words: Words, folders: list[Path]) -> int:
    """Hydra's own questions (--cfg job, --info, --hydra-help, shell completion), answered by Hydra."""
    _user_dirs[:] = reversed(folders[:-1])
    Plugins.instance().register(TrainrunSearchPath)
    ConfigStore.instance().store(name="trainrun_schema", node=RunConfig, provider="trainrun")
    sys.argv = ["trainrun", *words.flags, *_opened(words.overrides, folders)]
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="trainrun")(lambda _: None)()
    return EXIT_DONE
