"""Ranks of these tests are real processes: a script of a few lines, started by the launcher."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from trainrun.folder.run_folder import RunDir

ROOT = Path(__file__).parents[2]
WORDS_OF_OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRAINRUN_STORE")
HEAD = """
import sys
from pathlib import Path
from trainrun.folder.run_folder import RunDir
run = RunDir(Path(sys.argv[1]))
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def rank_env(tmp_path: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in WORDS_OF_OTHERS}
    # TMPDIR: a killed driver leaves its folder behind
    return env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}


@pytest.fixture
def script(tmp_path: Path, run_dir: RunDir) -> Callable[[str], list[str]]:
    """Text of a rank -> its command. In the text `run` is the run folder."""

    def write(text: str) -> list[str]:
        path = tmp_path / "rank_script.py"
        path.write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
        return [sys.executable, str(path), str(run_dir.root)]

    return write
