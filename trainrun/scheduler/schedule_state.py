"""The state of torch's schedulers as a tree that survives JSON.

Their state_dict is every attribute they have: constants of the config, tables with integer keys and
functions among them. What JSON would change is left out; the freshly built scheduler has it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def plain(tree: Any) -> Any:
    """A copy without the entries (of dicts) that are not plain values, or whose keys are not strings."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items() if isinstance(key, str) and _is_plain(value)}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | Tensor)
