"""`data.path`, which formats read as `${data.path}`: one that nothing reads is refused, and a saved run follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainrun.config import DataConfig, RunConfig


def unread_path(config: RunConfig) -> list[str]:
    """A fault where no node has the path: the run would train on other data than its words name."""
    path = config.data.path
    if path is None:
        return []
    nodes = dataclasses.asdict(config)
    del nodes["data"]["path"]
    if any(value == path for value in _values(nodes)):
        return []
    return [
        f"data.path={path}: nothing reads it with data={config.data.name}; say what it is, as data=csv, data=text or "
        "data=image_folder (trainrun --help data), or leave it out"
    ]


def follow_path(data: DataConfig, before: str | None) -> None:
    """Put `data.path` where a saved run, whose references are resolved, has the path of `before`."""
    for node in (data.train, data.val, data.test):
        if isinstance(node, dict):
            _exchange(node, before, data.path)


def _exchange(node: dict[Any, Any], before: str | None, path: str | None) -> None:
    for key, value in node.items():
        if isinstance(value, dict):
            _exchange(value, before, path)
        elif value == before and (before is not None or key == "path"):
            node[key] = path


def _values(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for value in node.values():
            yield from _values(value)
    elif isinstance(node, list):
        for value in node:
            yield from _values(value)
    else:
        yield node
