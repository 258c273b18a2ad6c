"""Read and write configs as files: references stay references, secrets are stored separately, YAML is checked first.

A reference such as `data.train.path: ${data.path}` is saved as it was written. A run resumed with another
`data.path` then follows it. A value of `${oc.env:NAME}` or `~/data` becomes a `FromEnvironment`, a string that
remembers its reference, and the environment is read again at each start, on each machine. Values of settings with
secret-like names are saved as `***`. Their real values are in `.secrets.json`, which only the owner of the file can
read.
"""

from __future__ import annotations

import contextlib
import os
import re
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from trainrun.config.schema import (
    RunConfig,
    convert_to_plain_values,
    iterate_config_leaves,
    map_config,
    replace_values,
)
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import read_bytes
from trainrun.output import HIDDEN, is_secret_value

ENVIRONMENT = "${oc.env:"
REFERENCE = re.compile(r"\$\{([^\W\d]\w*(?:\.\w+)*)\}")  # to another setting
UNESCAPED = re.compile(r"(?<!\\)\$\{")
HOME_FOLDER = re.compile(r"~[\w.-]*[/\\]")
MAX_BYTES, MAX_DEPTH, MAX_VALUES = 256 * 2**10, 64, 50_000  # of a YAML file
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Any_ = TypeVar("Any_")


@cache
def build_config_loader() -> Any:
    """Return OmegaConf's loader, which reads `1e-3` as a number and refuses a key that is there twice.

    It parses with libyaml, if that is installed, in a tenth of the time.
    """
    loader = get_yaml_loader()
    if LOADER is yaml.SafeLoader:
        return loader

    class Loader(yaml.cyaml.CParser, loader):  # type: ignore[misc, valid-type]
        def __init__(self, stream: str) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


class FromEnvironment(str):
    """A string from the environment. reference: the text `${oc.env:NAME}` or `~/data` that it came from."""

    reference: str

    @classmethod
    def resolve(cls, value: str, reference: str) -> FromEnvironment:
        text = cls(value)
        text.reference = reference
        return text

    def __repr__(self) -> str:
        """Return the reference, so that messages do not show the value."""
        return repr(self.reference)


def is_environment_reference(text: Any) -> bool:
    """Return whether a text has references, and all of them are to environment variables."""
    return isinstance(text, str) and ENVIRONMENT in text and text.count("${") == text.count(ENVIRONMENT)


def add_references(cfg: DictConfig, config: RunConfig) -> RunConfig:
    """Return the config with the references of its values recorded. cfg: the same config as composed by Hydra."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    texts = {
        key: value for key, value in iterate_config_leaves(raw) if isinstance(value, str) and "${" in value
    }
    references = {
        key.replace("monitor.listeners.", "monitor."): text
        for key, text in texts.items()
        if REFERENCE.search(text)
    }
    for _ in range(3):  # references to references to references
        texts = {key: REFERENCE.sub(partial(_follow_reference, texts), text) for key, text in texts.items()}
    from_environment = {key: text for key, text in texts.items() if ENVIRONMENT in text}

    def mark_environment_value(key: str, value: Any) -> Any:
        text = from_environment.get(key)
        return FromEnvironment.resolve(value, text) if text is not None and isinstance(value, str) else value

    marked: RunConfig = map_config(config, mark_environment_value)
    return replace_values(marked, {"references": references})


def build_values_to_save(config: RunConfig) -> dict[str, Any]:
    """Return the values for `config.yaml`: secrets are hidden, and a reference stays if it resolves to the same
    value.
    """
    values = convert_to_plain_values(config)
    saved = convert_to_plain_values(map_config(separate_secrets(config)[0], _escape_references))
    for key, text in vars(config)["references"].items():
        if not REFERENCE.fullmatch(text):
            continue
        section, _, name = key.rpartition(".")
        with contextlib.suppress(LookupError, TypeError):
            value = read_nested_value(values, key)
            if not isinstance(value, dict) and value == read_nested_value(values, text[2:-1]):
                read_nested_value(saved, section)[name] = text
    return saved


def _escape_references(_: str, value: Any) -> Any:
    """Return a text with `${` escaped for OmegaConf, unless it refers to environment variables."""
    if not isinstance(value, str) or "${" not in value or is_environment_reference(value):
        return value
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)


def read_nested_value(values: dict[str, Any], key: str) -> Any:
    """Return the value at a dotted key of nested dicts. Raise LookupError or TypeError if there is none."""
    value: Any = values
    for name in key.split("."):
        value = value[name]
    return value


def resolve_references(values: dict[str, Any]) -> dict[str, Any]:
    """Return saved values with each reference to another setting replaced by its value.

    Raise ValueError for references that no run saves: to a missing setting, to a section, inside a list, in a
    circle, or to lists that would fill the memory.
    """
    num_values = 0

    def resolve_value(key: str, value: Any) -> Any:
        nonlocal num_values
        if not isinstance(value, str) or not UNESCAPED.search(value) or is_environment_reference(value):
            return value
        try:
            read_nested_value(values, key)
            target = value
            for _ in range(MAX_DEPTH):
                if not (isinstance(target, str) and REFERENCE.fullmatch(target)):
                    break
                target = read_nested_value(values, target[2:-1])
            else:
                raise LookupError
        except (LookupError, TypeError):
            raise ValueError(f"{key}={value[:80]}: refers to a value that does not exist") from None
        num_values += len(target) if isinstance(target, list) else 1
        is_whole = not isinstance(target, dict) and "${" not in str(target).replace(ENVIRONMENT, "")
        if not is_whole or num_values > MAX_VALUES:
            raise ValueError(f"{key}={value[:80]}: not a reference to one setting")
        return target

    resolved_values: dict[str, Any] = map_config(values, resolve_value)
    return resolved_values


def expand_home_folder(config: Any_) -> Any_:
    """Return the config with a leading `~` of each path replaced by the home folder."""

    def expand_path(_: str, value: Any) -> Any:
        if not isinstance(value, str) or not HOME_FOLDER.match(value):
            return value
        return FromEnvironment.resolve(os.path.expanduser(value), value)

    result: Any_ = map_config(config, expand_path)
    return result


def _follow_reference(texts: dict[str, str], reference: re.Match[str]) -> str:
    """Return the reference at which a reference points; the reference itself if it points at a value."""
    return texts.get(reference[1], reference[0])


def drop_environment_references(config: Any_) -> Any_:
    """Return the config with values from the environment as plain strings, which OmegaConf requires."""
    return map_config(config, lambda _, value: str(value) if isinstance(value, FromEnvironment) else value)  # type: ignore[no-any-return]


def separate_secrets(config: Any_) -> tuple[Any_, dict[str, Any]]:
    """Return a config with its secrets hidden, and the secrets by key."""
    secrets: dict[str, Any] = {}

    def hide_secret(key: str, value: Any) -> Any:
        if isinstance(value, FromEnvironment):
            return value.reference
        if is_secret_value(key, value):
            secrets[key] = value
            return HIDDEN
        return value

    return map_config(config, hide_secret), secrets


def read_yaml_text(path: Path, aliases: bool = False) -> str:
    """Return the text of a YAML file that is safe to parse. Raise ConfigError with the line of the fault.

    aliases: whether `*name` is allowed. The user's files may have aliases; saved configs have none.
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
        raise ConfigError(f"{path}: not YAML: {describe_yaml_error(error)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    return text


def check_yaml(text: str, aliases: bool) -> None:
    """Raise ValueError for YAML that is too large or nested too deeply. 300 bytes with aliases can expand to
    gigabytes.
    """
    sizes: dict[str, int] = {}  # values behind an anchor, each alias in it counted as what it stands for
    around: list[tuple[str | None, int]] = []  # open collections: their anchor, and the count before them
    count = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise ValueError(f"*{event.anchor[:40]} refers to other values; write out each value")
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor[:40]} refers to itself, or to nothing")
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


def describe_yaml_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = (
        getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).partition("\n")[0]
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else str(problem)
