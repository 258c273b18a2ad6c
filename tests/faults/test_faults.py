"""The harness in small: runs are broken on purpose and lose nothing; with a defect planted they do, and it is seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills and forks as Linux has them")


def faults(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of `scripts/faults.py`."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "faults.py"), *words, "--judges=1", f"--folder={folder}"],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONWARNINGS": "default"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


SUITES = "F1", "F3", "F4", "F7", "F8", "F9", "F10", "F16", "F17", "F19", "F24"


def test_no_run_is_lost_and_none_has_other_bits(tmp_path: Path) -> None:
    """One case of each suite: in one process, they share the runs without a fault that they are compared with."""
    code, output = faults(tmp_path, *SUITES, "--size=0.001")
    assert code == 0, output
    last = output.splitlines()[-1]
    told = re.fullmatch(r"all +\d+ +(\d+) +0 +0 +0 +0 +\d+  seed 1", last)
    assert told is not None, output
    assert int(told[1]) >= 36


def test_some_planted_defects_are_found(tmp_path: Path) -> None:
    code, output = faults(tmp_path, "--controls", "--size=0")
    assert code == 0, output
    assert "MISSED" not in output
    assert len(re.findall(r"^found ", output, re.MULTILINE)) == 7
