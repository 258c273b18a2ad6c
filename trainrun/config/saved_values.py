"""Configs as files: secrets are kept apart, what the environment gave is a reference, and YAML is looked at first.

A value that `${oc.env:NAME}` gave is a `FromEnvironment`: a string that remembers how it was written. Saved, it is that
reference again, and a run that goes on looks it up again. Texts of settings that are named like a secret are saved as
`***`, and themselves in `.secrets.json`, which only their owner may read.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf

from trainrun.config.schema import config_leaves, map_config
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import read_bytes
from trainrun.output import HIDDEN, hides

ENVIRONMENT = "${oc.env:"
REFERENCE = re.compile(r"\$\{([\w.\[\]]+)\}")
HOME_FOLDER = re.compile(r"~[\w.-]*[/\\]")
MAX_BYTES, MAX_DEPTH, MAX_VALUES = 256 * 2**10, 64, 50_000  # of a YAML file
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Any_ = TypeVar("Any_")


class FromEnvironment(str):
    """A value with the reference that gave it."""

    reference: str

    @classmethod
    def of(cls, value: str, reference: str) -> FromEnvironment:
        found = cls(value)
        found.reference = reference
        return found

    def __repr__(self) -> str:
        """What messages show of it."""
        return repr(self.reference)


def is_environment(text: Any) -> bool:
    """Whether all references in it are to the environment."""
    return isinstance(text, str) and ENVIRONMENT in text and text.count("${") == text.count(ENVIRONMENT)


def remember(cfg: DictConfig, config: Any_) -> Any_:
    """Has the config remember which of its texts came from the environment. cfg: the same, as it was composed."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    texts = {key: value for key, value in config_leaves(raw) if isinstance(value, str) and "${" in value}
    for _ in range(3):  # references to references to references
        texts = {key: REFERENCE.sub(partial(_meant, texts), text) for key, text in texts.items()}
    known = {key: text for key, text in texts.items() if ENVIRONMENT in text}

    def kept(key: str, value: Any) -> Any:
        return FromEnvironment.of(value, known[key]) if key in known and isinstance(value, str) else value

    return map_config(config, kept) if known else config


def with_home_folder(config: Any_) -> Any_:
    """Return the config with the home folder for a `~` that begins a path, as a shell has it."""

    def expanded(_: str, value: Any) -> Any:
        return os.path.expanduser(value) if isinstance(value, str) and HOME_FOLDER.match(value) else value

    found: Any_ = map_config(config, expanded)
    return found


def _meant(texts: dict[str, str], found: re.Match[str]) -> str:
    """What a reference to another setting leads to, where that is a reference too."""
    return texts.get(found[1], found[0])


def resolved(config: Any_) -> Any_:
    """With plain strings, as OmegaConf takes them."""
    return map_config(config, lambda _, value: str(value) if isinstance(value, FromEnvironment) else value)  # type: ignore[no-any-return]


def public(config: Any_) -> tuple[Any_, dict[str, Any]]:
    """What may be saved, and the secrets of it by key."""
    secrets: dict[str, Any] = {}

    def shown(key: str, value: Any) -> Any:
        if isinstance(value, FromEnvironment):
            return value.reference
        if hides(key, value):
            secrets[key] = value
            return HIDDEN
        return value

    return map_config(config, shown), secrets


def read_yaml_text(path: Path, aliases: bool = False) -> str:
    """The text of a YAML file that is safe to parse. Raises ConfigError that names the limit, or the fault's line.

    aliases: `*name` may stand for other values, as in the user's own files; a run saves none.
    """
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
        check_yaml(text, aliases)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}: line {line}: not UTF-8 text (byte {error.object[error.start]:#x})"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a config: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {yaml_place(error)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    return text


def check_yaml(text: str, aliases: bool) -> None:
    """Raise ValueError for what is too large or nests too deep: 300 bytes with aliases can mean gigabytes."""
    sizes: dict[str, int] = {}  # values behind an anchor, each alias in it counted as what it stands for
    around: list[tuple[str | None, int]] = []  # open collections: their anchor, and the count before them
    count = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise ValueError(f"*{event.anchor[:40]} stands for other values; a run saves each as it is")
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor[:40]} stands for itself, or for nothing")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            sizes[event.anchor or ""] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            sizes.pop(event.anchor or "", None)
            around.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = around.pop()
            sizes[anchor or ""] = count - before
        if len(around) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values, aliases counted as what they stand for")


def yaml_place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = (
        getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).partition("\n")[0]
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else str(problem)
