"""Standard output that is full or that nobody reads ends no training and changes no exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.forks import ForkedCommand

pytestmark = pytest.mark.process

WORDS = [
    "trainer.max_steps=3", "monitor.plots=false", "monitor.hardware=false", "trainer.limit_val_batches=1",
    "output_dir=run",
]  # fmt: skip
COMMAND = f"{sys.executable} -m trainrun"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """bash, for `pipefail`."""
    words = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(params=["closed pipe", "full disk"])
def lost_output(request: pytest.FixtureRequest) -> Iterator[int]:
    """A descriptor that takes nothing of what is written to it."""
    if request.param == "full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    yield output
    os.close(output)


@pytest.mark.parametrize("parallel", ["single", "ddp"])
def test_lost_output_does_not_change_the_exit_code(tmp_path: Path, lost_output: int, parallel: str) -> None:
    process = ForkedCommand(*WORDS, f"parallel={parallel}", folder=tmp_path, output=lost_output)
    process.communicate()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("done", 3, 0)
    assert process.returncode == 0


def test_help_is_quiet_where_nobody_reads_on(tmp_path: Path) -> None:
    done = shell(f"{COMMAND} --help | head -1", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("flag", ["", "-u"])
def test_all_that_is_printed_comes_out(tmp_path: Path, flag: str) -> None:
    code = (
        "from trainrun.runtime.streams import guard_streams; guard_streams(); import sys; "
        "print('é' * 100000); print('last', file=sys.stderr)"
    )
    done = shell(
        f'PYTHONPATH={Path(__file__).parents[2]} {sys.executable} {flag} -X utf8 -c "{code}"', tmp_path
    )
    assert (done.stdout, done.stderr) == ("é" * 100000 + "\n", "last\n")
