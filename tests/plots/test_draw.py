"""Pictures that cannot be drawn: the run has ended well all the same, and says what to do."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir
from trainrun.plots.draw import draw

pytestmark = pytest.mark.train

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


def test_a_full_disk_is_said_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_to_full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # of a write: without the name of a file

    for name in ("draw_run", "draw_time", "draw_report"):
        monkeypatch.setattr(f"trainrun.plots.draw.{name}", write_to_full_disk)
    problem = draw(RunDir(tmp_path))
    assert problem == f"{tmp_path}: cannot be written (No space left on device)"
