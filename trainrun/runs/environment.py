"""What a run was made with: versions, machine, and the state of the user's code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from trainrun.masking import masked_word

PACKAGES = (
    "trainrun",
    "torch",
    "numpy",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "matplotlib",
)


def describe(working_dir: Path) -> dict[str, Any]:
    """Plain values for `environment.json`. Imports no torch: devices are named by the ranks."""
    return {
        "command": [masked_word(word) for word in sys.argv],
        "working_dir": str(working_dir),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.release()}-{platform.machine()}",  # `platform()` starts a process
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git(working_dir),
    }


def version_line() -> str:
    """`trainrun 0.1.0 (torch 2.13.0, Python 3.11.7)`, without importing torch; the folder where it is not installed."""
    own = _version("trainrun") or f"from {Path(__file__).parents[1]}"
    return f"trainrun {own} (torch {_version('torch')}, Python {platform.python_version()})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and whether there are changes; None if there is no repository or no git."""
    try:
        commit = _run_git(folder, "rev-parse", "HEAD")
        changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def _run_git(folder: Path, *words: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5, check=True
    )
    return result.stdout.strip()
