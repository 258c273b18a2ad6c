"""YAML is looked at before it is parsed: 300 bytes of it can mean gigabytes, or a stack without an end."""

from __future__ import annotations

from pathlib import Path

import yaml

from trainrun.errors import ConfigError
from trainrun.runs.run_folder import read_bytes

MAX_BYTES = 256 * 2**10
MAX_DEPTH = 64
MAX_VALUES = 50_000
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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
        raise ConfigError(f"{path}: not YAML: {place_of(error)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    return text


def limit_fault(path: Path) -> str:
    """Why Hydra must not look at a file of `conf/`; what is no YAML at all it says itself, where it is chosen."""
    try:
        text = read_yaml_text(path, aliases=True)
        first = next(
            (event for event in yaml.parse(text, Loader=LOADER) if isinstance(event, yaml.NodeEvent)), None
        )
    except ConfigError as error:
        return "" if isinstance(error.__cause__, yaml.YAMLError | OSError) else str(error)
    is_map = first is None or isinstance(first, yaml.MappingStartEvent)
    return "" if is_map else f"{path}: must hold `key: value` lines, not a list or a single value"


def yaml_fault(error: yaml.YAMLError) -> str:
    """Describe what is wrong in a file that Hydra has read: its name, the place, the problem."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    name = mark.name if mark is not None else getattr(error, "name", "a config file")
    return f"{name}: not YAML: {place_of(error)}"


def place_of(error: yaml.YAMLError) -> str:
    """The line and column of an error, and what is wrong there."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = (
        getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).partition("\n")[0]
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else str(problem)


def check_yaml(text: str, aliases: bool = False) -> None:
    """Raises ValueError for what is too large or nests too deep, yaml.YAMLError for what is no YAML."""
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
