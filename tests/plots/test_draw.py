"""Pictures that cannot be drawn: the run has ended well all the same, and says what to do."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir, write_identity
from trainrun.plots import draw

pytestmark = pytest.mark.train
REAL_DRAWING = draw.start_drawing_process  # before the tests replace it

OWN = """
from pathlib import Path

class InTheWay:
    def on_step(self, step, epoch, row):
        Path("run/plots").touch()  # a file where the folder of the pictures belongs
"""


def test_a_run_whose_pictures_cannot_be_drawn_has_ended_all_the_same(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "own.py").write_text(OWN)
    words = [
        "trainer.max_steps=4",
        "trainer.num_threads=1",
        "monitor.progress_bar=false",
        "hydra.run.dir=run",
    ]
    assert main([*words, "monitor.mine._target_=own.InTheWay"]) == 0
    run = workdir / "run"
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "not all pictures" in line]
    place = run / "plots"
    assert told == (
        f"not all pictures were drawn: {place}: cannot be written (File exists); "
        f"where that is mended: trainrun report {run}"
    )
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert (run / "report.html").is_file()
    place.unlink()
    assert main(["report", "run"]) == 0
    assert (place / "loss.png").is_file()


@pytest.mark.parametrize(
    ("work", "name"), [(draw.draw_all_plots, "draw_run_plots"), (draw.write_run_report, "draw_report")]
)
def test_a_full_disk_is_said_with_the_folder(
    work: Callable[[RunDir], str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_to_full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # of a write: without the name of a file

    monkeypatch.setattr(draw, name, write_to_full_disk)
    assert f"{tmp_path}: cannot be written (No space left on device)" in work(RunDir(tmp_path))


def test_the_process_draws_and_notes_problems_in_the_log(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.nice", lambda niceness: 0)
    run = make_run(tmp_path / "run")
    write_identity(run, {"run_id": "x"})
    draw.main([str(run.root)])
    assert sorted(path.name for path in run.plots.iterdir())[-1] == "time.png"
    assert not run.log.read_text()
    shutil.rmtree(run.plots)
    run.plots.touch()
    draw.main([str(run.root)])
    assert "not all pictures were drawn" in run.log.read_text()
    shutil.rmtree(run.root)
    draw.main([str(run.root)])
    assert not run.root.exists()  # the folder of a run that is gone is not made again


def test_a_machine_without_room_for_a_process_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("subprocess.Popen", no_process)
    assert "Cannot allocate memory" in REAL_DRAWING(RunDir(tmp_path))


def test_ctrl_c_at_the_end_of_a_run_does_not_reach_the_drawing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is sent to the processes of the terminal's foreground group, which are of the run's session."""
    started: list[dict[str, Any]] = []

    def start(command: list[str], **options: Any) -> SimpleNamespace:
        started.append(options)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr("subprocess.Popen", start)
    assert REAL_DRAWING(RunDir(tmp_path)) == ""
    assert [options["start_new_session"] for options in started] == [True]


def test_a_run_draws_itself_where_no_process_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in draw.BATCH_SYSTEMS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getppid", lambda: 7)
    assert not draw.is_killed_with_parent()
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert draw.is_killed_with_parent()
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert draw.is_killed_with_parent()
