"""Help and mistakes are answered before torch is imported: it alone takes seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["help", "data"], 0),
        (["data.batch_size=abc"], 2),
        (["model=no_such_model"], 2),
        (["trainer.max_epoch=3"], 2),
        (["no_such_command"], 2),
        (["--multirun", "optimizer.lr=interval(0,1)"], 2),
    ],
)
def test_no_torch(words: list[str], code: int, tmp_path: Path):
    command = [sys.executable, "-X", "importtime", "-m", "trainrun", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    imported = set(re.findall(r"^import time:[ \d]+\|[ \d]+\|\s+([\w.]+)$", done.stderr, re.MULTILINE))
    assert "trainrun.cli.main" in imported
    refused = {
        "torch",
        "matplotlib",
        "sklearn",
        *(["yaml", "omegaconf", "logging"] if words == ["--help"] else []),
    }
    assert not {name for name in imported if name.split(".")[0] in refused}
    assert list(tmp_path.iterdir()) == []
