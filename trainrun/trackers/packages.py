"""Whether the package of a tracker is there, without importing it: that is done where it cannot slow the training."""

from __future__ import annotations

import importlib.util

from trainrun.errors import ConfigError


def needed(package: str, extra: str) -> None:
    """Raise ConfigError that names the extra."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"monitor.tracker={extra}: needs a package that is not there ({package}): pip install 'trainrun[{extra}]'"
        )
