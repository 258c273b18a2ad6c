"""YAML is looked at before it is parsed: 300 bytes of it can mean gigabytes, or a stack without an end.

Size, depth, and the number of values with every alias (`*name`) counted as what it stands for. The look is an
event each, of which nothing is built: a file of 3 kB takes 0.1 ms with libyaml.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from trainrun.errors import ConfigError
from trainrun.rundir import read_bytes

MAX_BYTES = 256 * 2**10
MAX_DEPTH = 64
MAX_VALUES = 50_000
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml_text(path: Path) -> str:
    """The text of a YAML file that is safe to parse. Raises ConfigError that names the limit, or the fault's line."""
    try:
        data = read_bytes(path, MAX_BYTES)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line}: not UTF-8 text (byte {data[error.start]:#x})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a config ({error})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        check_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not a config: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {told(error, text)}") from error
    return text


def limit_fault(path: Path) -> str:
    """Why Hydra must not look at a file of `conf/`; what is no YAML at all it says itself, where it is chosen."""
    try:
        check_yaml(text := read_bytes(path, MAX_BYTES).decode("utf-8"))
        first = next(
            (event for event in yaml.parse(text, Loader=LOADER) if isinstance(event, yaml.NodeEvent)), None
        )
    except UnicodeDecodeError as error:
        return f"{path}: not UTF-8 text (byte {error.object[error.start]:#x} at {error.start})"
    except ValueError as error:
        return f"{path}: {error}"
    except (yaml.YAMLError, OSError):
        return ""
    is_map = first is None or isinstance(first, yaml.MappingStartEvent)
    return "" if is_map else f"{path}: must hold `key: value` lines, not a list or a single value"


def yaml_fault(error: yaml.YAMLError) -> str:
    """Describe what is wrong in a file that Hydra has read: its name, the place, the problem."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        name, position = getattr(error, "name", "a config file"), getattr(error, "position", 0)
        return f"{name}: not YAML: {getattr(error, 'reason', error)} (position {position})"
    return f"{mark.name}: not YAML: line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', error)}"


def check_yaml(text: str) -> None:
    """Raises ValueError for what is too large, yaml.YAMLError for what is no YAML."""
    sizes: dict[str, int] = {}  # values behind an anchor
    open_nodes: list[
        tuple[str | None, int]
    ] = []  # collections around the event: anchor, and the count before it
    count = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor[:40]} stands for itself, or for nothing")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            if event.anchor is not None:
                sizes.pop(event.anchor, None)
            open_nodes.append((event.anchor, count))
            count += 1
            if len(open_nodes) > MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH}")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values, aliases counted as what they stand for")


def told(error: yaml.YAMLError, text: str) -> str:
    """Where, what, and the line itself."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    if mark is None:
        return str(problem)
    lines = text.splitlines()
    shown = f": {lines[mark.line].strip()[:80]}" if mark.line < len(lines) else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{shown}"
