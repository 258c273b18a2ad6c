"""Standard streams that are closed, full or broken end no training and change no exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

WORDS = "trainer.max_steps=3 monitor.plots=false monitor.hardware=false trainer.limit_val_batches=1 output_dir=run"
COMMAND = f"{sys.executable} -m trainrun"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """bash, for `pipefail`."""
    words = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "streams",
    ["| head -1", "> /dev/full", "<&- >&- 2>&-"],
)
def test_the_exit_code_of_a_run_is_that_of_its_status(tmp_path: Path, streams: str) -> None:
    done = shell(f"{COMMAND} {WORDS} {streams}", tmp_path)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], done.returncode) == ("done", 0, 0)
    full = streams == "> /dev/full"
    assert done.stderr.count("stdout: No space left on device; what follows is not shown") == full
    assert "Traceback" not in done.stderr


def test_ranks_do_not_mind_either(tmp_path: Path) -> None:
    done = shell(f"{COMMAND} {WORDS} parallel=ddp > /dev/full 2>&-", tmp_path)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"], done.returncode) == ("done", 3, 0)


def test_help_is_quiet_where_nobody_reads_on(tmp_path: Path) -> None:
    done = shell(f"{COMMAND} --help | head -1", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def test_what_a_closed_number_is_opened_for_is_no_file_of_ours(tmp_path: Path) -> None:
    code = (
        "from trainrun.runtime.streams import guard_streams; guard_streams(); "
        "file = open('kept', 'w'); print('lost'); assert file.fileno() > 2; file.write('kept')"
    )
    done = shell(
        f'PYTHONPATH={Path(__file__).parents[2]} {sys.executable} -c "{code}" <&- >&- 2>&-', tmp_path
    )
    assert (done.returncode, (tmp_path / "kept").read_text()) == (0, "kept")


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
