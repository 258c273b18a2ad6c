"""What a killed process leaves in the temporary directory is taken away by the next; what is in use is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainrun.benchmark.worker_process import OWNER, scratch_folder

pytestmark = pytest.mark.process

HOLDS = """
import sys, time
from trainrun.benchmark.worker_process import scratch_folder
with scratch_folder() as folder:
    (folder / "store").write_text("used")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("_here")
def test_the_folder_of_a_killed_process_goes_and_others_stay(tmp_path: Path) -> None:
    environ = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (tmp_path / "trainrun-of-mine").mkdir()  # somebody else's, by the look of it
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / OWNER).write_text("")
        (tmp_path / "trainrun-link").symlink_to(tmp_path / "elsewhere")
        with scratch_folder() as own, scratch_folder() as second:
            assert left.is_dir()  # its process lives
            assert own.is_dir()
            assert second.is_dir()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (left / "store").exists()
        with scratch_folder():
            assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"trainrun-of-mine", "elsewhere", "trainrun-link"}
    assert (tmp_path / "elsewhere" / OWNER).exists()
