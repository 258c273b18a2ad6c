"""Check that the package of a tracker is installed without importing it; the tracker's thread imports it."""

from __future__ import annotations

import importlib.util

from trainrun.errors import ConfigError


def require_package(package: str, extra: str) -> None:
    """Raise ConfigError, with the extra to install, if the package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"monitor.tracker={extra}: needs a package that is not installed ({package}): pip install "
            f"'trainrun[{extra}]'"
        )
