"""Optional packages of some formats: imported where they are used, and named in the message if they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from trainrun.errors import DataError


def import_extra(module: str, option: str, name: str) -> Any:
    """Import an optional module. Raise DataError if it is missing, with `pip install trainrun[name]` in the message."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is there, but misses something itself
        shown = module if package == "google" else package
        raise DataError(f"data={option} needs {shown}: pip install 'trainrun[{name}]'") from error
