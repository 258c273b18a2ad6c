"""The pictures and the page of a run, whatever ended it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainrun.cli.main import main

WORDS = (
    "monitor.hardware=false", "monitor.progress_bar=false", "trainer.num_threads=1", "trainer.max_steps=6",
    "monitor.log_every_n_steps=1", "output_dir=run",
)  # fmt: skip
HOOK = "hook.end._target_=tests.runs.test_page_at_every_end.Raises"


class Raises:
    def __init__(self, kind: str, at: int = 4) -> None:
        self.error: BaseException = KeyboardInterrupt() if kind == "interrupt" else RuntimeError("boom <b>")
        self.at = at

    def on_step_end(self, run: Any, state: Any) -> None:
        if state.step == self.at:
            raise self.error


def banner(folder: Path) -> str:
    """What stands at the top of the page."""
    page = (folder / "report.html").read_text()
    head, _, rest = page.partition('<p class="banner')
    assert "<table>" not in head
    return rest.partition("</p>")[0]


@pytest.mark.parametrize("at", [1, 4])
def test_failure_has_its_pictures_and_its_message_on_the_page(at: int, workdir: Path) -> None:
    assert main([*WORDS, HOOK, "hook.end.kind=fault", f"hook.end.at={at}"]) == 1
    run = workdir / "run"
    assert (run / "plots" / "loss.png").exists() == (at > 1)
    for _ in range(2):
        assert "failed" in banner(run)
        assert "RuntimeError: boom &lt;b&gt;" in banner(run)
        assert main(["report", "run"]) == 0


def test_run_of_nan_has_its_pictures(workdir: Path) -> None:
    assert main([*WORDS, "optimizer=sgd", "optimizer.lr=1e30"]) == 1
    assert (workdir / "run" / "plots" / "loss.png").exists()
    assert "failed" in banner(workdir / "run")


def test_interrupt_has_its_pictures(workdir: Path) -> None:
    assert main([*WORDS, HOOK, "hook.end.kind=interrupt"]) == 130
    assert (workdir / "run" / "plots" / "loss.png").exists()
    assert "stopped" in banner(workdir / "run")


def test_run_that_ends_well_says_so(workdir: Path) -> None:
    assert main([*WORDS]) == 0
    assert "done" in banner(workdir / "run")
    assert "trainer.max_steps=6 reached" in banner(workdir / "run")
    assert 'class="banner bad"' not in (workdir / "run" / "report.html").read_text()


def test_nothing_is_drawn_where_nobody_wants_pictures(workdir: Path) -> None:
    assert main([*WORDS, HOOK, "hook.end.kind=fault", "monitor.plots=false"]) == 1
    assert not (workdir / "run" / "report.html").exists()


def test_fault_of_a_picture_hides_no_failure(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainrun.plots import draw

    monkeypatch.setattr(draw, "draw_all_plots", lambda run: 1 / 0)
    assert main([*WORDS, HOOK, "hook.end.kind=fault"]) == 1
    assert '"failed"' in (workdir / "run" / "status.json").read_text()
