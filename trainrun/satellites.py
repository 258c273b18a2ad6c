"""The one hook for parts of the package that a training does without, such as `plots` and `summary`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType


def satellite(name: str, without: str, tell: Callable[[str], None]) -> ModuleType | None:
    """Import the module `trainrun.<name>`; where its folder was taken away, tell so in one line and return None.

    without: what the run goes on without, as "no pictures are drawn".
    """
    folder = f"trainrun.{name.partition('.')[0]}"
    try:
        return importlib.import_module(f"trainrun.{name}")
    except ModuleNotFoundError as error:
        if error.name not in (folder, f"trainrun.{name}"):
            raise
        tell(f"{folder} is not installed: {without}")
        return None


def missing_satellite(error: Exception) -> str:
    """What to say of a command whose folder was taken away; empty for every other error."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name or not name.startswith("trainrun."):
        return ""
    return f"{name} is not installed: this command needs it; install the whole package again"
