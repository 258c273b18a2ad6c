"""Pictures that cannot be drawn: the run has ended well all the same, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainrun.cli.main import main

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
