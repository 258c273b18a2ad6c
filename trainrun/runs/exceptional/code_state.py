"""What of the user's code is not committed, and which trainrun it is."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from threading import Timer

MOST_DIFF_BYTES = 2**20
DIFF_SECONDS = 5.0
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


def uncommitted(working_dir: Path) -> str:
    """The changes of the files that git knows, without those named like secrets; empty where there are none."""
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
            found = process.stdout.read(MOST_DIFF_BYTES + 1)
            process.kill()
            late.cancel()
    except OSError:
        return ""
    text = found[:MOST_DIFF_BYTES].decode("utf-8", "replace")
    return text if len(found) <= MOST_DIFF_BYTES else f"{text}\n[cut: more than {MOST_DIFF_BYTES:,} bytes]\n"


def version_line() -> str:
    """`trainrun 0.1.0 (torch 2.13.0, Python 3.11.7)`, without importing torch; the folder where it is not installed."""
    own = _version("trainrun") or f"from {Path(__file__).parents[2]}"
    return f"trainrun {own} (torch {_version('torch')}, Python {platform.python_version()})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
