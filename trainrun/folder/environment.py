"""The environment of a run: machine, packages, and commit and changes of the user's code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from threading import Timer
from typing import Any

from trainrun.errors import EXIT_DONE
from trainrun.output import mask_argument, report_result, say

MOST_DIFF_BYTES = 2**20
DIFF_SECONDS = 5.0
GIT_SECONDS = 5.0
# The user's own files may name programs, which are not run for this.
DIFF = (
    "-c",
    "core.fsmonitor=false",
    "diff",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "HEAD",
    "--",
    ":/",
)
SECRETS = (
    "*.env",
    "*.env.*",
    "*.pem",
    "*.key",
    "*secret*",
    "*credential*",
    "*token*.json",
    "*id_rsa*",
    "*.netrc",
)


def describe_environment(working_dir: Path) -> dict[str, Any]:
    """Return the content of `environment.json`. torch is not imported: the ranks add their devices later."""
    return {
        "command": [mask_argument(word) for word in sys.argv],
        "working_dir": str(working_dir),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.release()}-{platform.machine()}",  # `platform()` starts a process
        "cores": os.cpu_count(),
        "packages": list_packages(),
        "git": _describe_commit(working_dir),
    }


def list_packages() -> dict[str, str]:
    """Return the versions of installed packages, read from folder names. Reading their files would take 50 times as
    long.
    """
    versions: dict[str, str] = {}
    for place in sys.path:
        with suppress(OSError):
            for entry in os.listdir(place or "."):
                stem, _, kind = entry.rpartition(".")
                name, _, version = stem.partition("-")
                if kind in ("dist-info", "egg-info") and version:
                    versions.setdefault(name.lower().replace("_", "-"), version)
    return dict(sorted(versions.items()))


def _describe_commit(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether there are changes; None without a repository or without git."""
    try:
        commit = _run_git(folder, "rev-parse", "HEAD")
        changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def _run_git(folder: Path, *words: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
    )
    return result.stdout.strip()


def read_uncommitted_changes(working_dir: Path) -> str:
    """Return the uncommitted changes as a diff, without files whose names suggest secrets; "" if there are none."""
    left_out = [f":(exclude,icase,top,glob)**/{name}" for name in SECRETS]
    try:
        with subprocess.Popen(
            ["git", "-C", str(working_dir), *DIFF, *left_out],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            late = Timer(DIFF_SECONDS, process.kill)
            late.start()
            assert process.stdout is not None
            diff = process.stdout.read(MOST_DIFF_BYTES + 1)
            process.kill()
            late.cancel()
    except OSError:
        return ""
    text = diff[:MOST_DIFF_BYTES].decode("utf-8", "replace")
    return text if len(diff) <= MOST_DIFF_BYTES else f"{text}\n[cut: more than {MOST_DIFF_BYTES:,} bytes]\n"


def show_version(words: list[str]) -> int:
    """Print the versions of trainrun, torch and Python: `trainrun --version`."""
    say(format_versions())
    report_result(version=format_versions())
    return EXIT_DONE


def format_versions() -> str:
    """Return `trainrun 0.1.0 (torch 2.13.0, Python 3.11.7)`, without importing torch."""
    version = _package_version("trainrun") or f"from {Path(__file__).parents[1]}"
    return f"trainrun {version} (torch {_package_version('torch')}, Python {platform.python_version()})"


def _package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
