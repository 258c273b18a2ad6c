"""A run followed through its folder: what is said while it goes on, when it ends, and when nobody is there any more."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from tests.plots.chart_pages import charts_in
from trainrun.assemble import monitors
from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir, write_json
from trainrun.live import follow
from trainrun.live.follow import Follower
from trainrun.watch.live_page import build_live_page
from trainrun.watch.live_page import main as draw_pages
from trainrun.watch.screen import RunsView, SweepView

pytestmark = pytest.mark.process


def gone() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def make(root: Path, state: str = "running", pid: int | None = None, host: str = "") -> RunDir:
    run = RunDir(root)
    root.mkdir()
    run.config.write_text("run_name: a\n")
    owner = {"pid": pid or os.getpid(), "host": host or socket.gethostname()}
    run.lock.write_text(json.dumps(owner))
    write_json(run.status, {"state": state, "message": "no <b>luck"})
    facts = {"name": "<b>mine</b>", "device": "cpu", "total_steps": 200, "choices": [], "steps_per_epoch": 50}
    rows = [{"kind": "start", "step": 0, "time": 0.0, "facts": facts}]
    rows += [
        {
            "kind": "train",
            "step": step,
            "time": step / 10,
            "epoch": step / 50,
            "train/loss": 1 / step,
            "lr": 0.1,
        }
        for step in range(10, 101, 10)
    ]
    rows += [{"kind": "eval", "step": 100, "time": 10.0, "epoch": 2.0, "val/loss": 0.5, "val/acc": 0.25},
             {"kind": "ledger", "step": 100, "time": 10.0, "seconds": {"start-up": 5.0, "data": 1.0, "forward": 3.0}},
             {"kind": "note", "step": 100, "time": 10.0, "text": "saved <i>"}]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.identity.write_text("{}")
    return run


def test_rows_are_read_as_they_come_and_again_where_a_resume_cut_them(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    told = Follower(run)
    text = run.metrics.read_text()
    run.metrics.write_text(text[:-20])  # the last line is being written
    told.read()
    assert (told.step, told.latest["train/loss"], list(told.notes)) == (100, 0.01, [])
    assert told.position_text() == "step 100/200  50 %  10 s left"
    assert told.share_waiting == 0.25
    run.metrics.write_text(text)
    told.read()
    assert list(told.notes) == ["step 100: saved <i>"]
    run.metrics.write_text("".join(text.splitlines(keepends=True)[:4]))
    told.read()
    assert (told.step, len(told.curves["train/loss"])) == (30, 3)


@pytest.mark.parametrize("most", [4, 5, 6, 9])
def test_a_long_run_is_thinned_and_keeps_its_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(follow, "MOST_POINTS", most)
    told = Follower(make(tmp_path / "a"))
    told.read()
    points = told.curves["train/loss"]
    assert len(points) <= most
    assert (points[-1].step, points[-1].value) == (100, 0.01)
    assert points == sorted(points)


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("stopped", 0), ("failed", 1)])
def test_it_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    make(tmp_path / "a", state)
    assert main(["watch", str(tmp_path / "a")]) == code
    first, line, end = capsys.readouterr().out.splitlines()
    assert first.startswith("<b>mine</b>  cpu  ")
    assert line.startswith("step 100/200  50 %  train/loss 0.01  val/loss 0.5  val/acc 0.25")
    assert line.endswith("waits for data 25 %")
    assert end == f"{state}: no <b>luck"


def test_a_start_that_was_killed_is_dead_and_a_wrong_pause_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    write_json(folder / ".lock", {"pid": 2**30, "host": socket.gethostname()})
    assert main(["watch", str(folder), "--every", "2"]) == 1
    assert f"trainrun resume '{folder}'" in capsys.readouterr().err
    for text in ("0s", "x", "0"):
        assert main(["watch", str(folder), "--every", text]) == 2
        assert f"--every {text}: must be seconds" in capsys.readouterr().err


def test_a_dead_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a", pid=gone())
    assert main(["watch", str(tmp_path / "a")]) == 1
    assert "dead: nobody trains there any more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "silent", "state"), [("", 0.0, "running"), ("far", 900.0, "running"), ("far", 0.0, "dead")]
)
def test_of_another_machine_only_a_long_silence_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, silent: float, state: str
) -> None:
    monkeypatch.setattr(follow, "SILENT_SECONDS", silent)
    told = Follower(make(tmp_path / "a", host=host))
    told.read()
    assert told.state() == state


def test_a_sweep_and_a_mistyped_folder(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s").mkdir()
    for name in ("0-lr=1", "1-lr=2"):
        make(Path("s", name), "done")
    Path("s/.lock").write_text(json.dumps({"pid": gone(), "host": socket.gethostname()}))
    jobs = [
        {"num": 0, "words": [f"lr={number}", "seed=1"], "folder": name, "result": {}}
        for number, name in enumerate(("0-lr=1", "1-lr=2", "../x", "2-lr=3"))
    ]
    write_json(Path("s/sweep.json"), {"calls": [], "jobs": jobs})
    assert main(["watch", "s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "sweep done"  # nobody says by what they are judged
    assert [line.partition(": ")[0] for line in lines if "step 100/200" in line] == ["0-lr=1", "1-lr=2"]
    view = SweepView(Path("s"))
    view.read()
    console = rich.console.Console(file=(shown := io.StringIO()), width=120, height=24)
    console.print(view.draw(console))
    lines = shown.getvalue().splitlines()
    assert lines[0] == "2/3 done  1 not begun"
    assert [line.split()[:2] for line in lines[2:]] == [["1-lr=2", "done"], ["0-lr=1", "done"]]
    assert main(["watch", "nowhere"]) == 2
    assert "RUN_DIR=nowhere: no run is there" in capsys.readouterr().err


def test_the_best_of_running_runs_is_known_by_their_first_row(workdir: Path) -> None:
    for name, value in (("a", 0.25), ("b", 0.5)):
        run = make(Path(name))
        text = run.metrics.read_text().replace(
            '"total_steps"', '"monitor": "val/acc", "mode": "max", "total_steps"'
        )
        run.metrics.write_text(text.replace('"val/acc": 0.25', f'"val/acc": {value}'))
    view = RunsView([Path(name).absolute() for name in "ab"])
    view.read()
    assert [(row.value, row.is_best) for row in view.table_rows()] == [("0.25", False), ("0.5", True)]


def test_several_runs_are_a_table_with_the_best_marked(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rate, value in (("a", 1, 0.5), ("b", 2, 0.25), ("c", 3, 0.75)):
        run = make(Path(name), "done" if name != "c" else "running")
        run.overrides.write_text(f"optimizer.lr={rate}\nseed=1\noutput_dir={name}\n")
        if name != "c":
            status = {"state": "done", "monitor": "val/loss", "mode": "min", "value": value, "message": ""}
            write_json(run.status, status)
    Path("notes").mkdir()
    view = RunsView([Path(name).absolute() for name in "abc"])
    view.read()
    assert view.ended == ""
    console = rich.console.Console(file=(shown := io.StringIO()), width=160)
    console.print(view.draw(console))
    rows = [line.split() for line in shown.getvalue().splitlines()[1:4]]
    assert [row[:3] for row in rows] == [
        ["optimizer.lr=1", "a", "done"], ["*", "optimizer.lr=2", "b"], ["optimizer.lr=3", "c", "running"],
    ]  # fmt: skip
    assert main(["watch", "a", "notes", "b", "nowhere"]) == 0
    said = capsys.readouterr()
    assert said.err == "note: skipped, no run: notes, nowhere\n"
    assert said.out.splitlines()[-1] == "all done, the best is b"


def test_a_run_that_lasts_begins_its_page_and_ends_it(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def popen(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen(*words, **more))
        return begun[-1]

    monkeypatch.setattr(monitors, "LIVE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(monitors, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
    assert (
        main(
            ["trainer.max_steps=4", "monitor.log_every_n_steps=1", "trainer.num_threads=1", "output_dir=run"]
        )
        == 0
    )
    (page,) = begun
    assert page.returncode == -signal.SIGKILL
    assert "trainrun.watch.live_page" in " ".join(page.args)  # type: ignore[arg-type]
    assert "data-reload=" not in Path("run/report.html").read_text()


def test_the_page_reloads_itself_while_the_run_goes_on_and_escapes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path / "a")
    told = Follower(run)
    told.read()
    page = build_live_page(told, reloads=True)
    assert '<body data-reload="5">' in page
    assert "<b>mine" not in page
    assert "saved <i>" not in page
    assert [chart["title"] for chart in charts_in(page)] == ["loss", "acc", "lr"]
    assert [[one["name"] for one in chart["series"]] for chart in charts_in(page)] == [
        ["train", "val"],
        ["val"],
        ["lr"],
    ]
    for name in ("nice", "sched_setscheduler"):  # of the process of these tests
        monkeypatch.setattr(os, name, lambda *_: None, raising=False)
    draw_pages([str(run.root), str(gone())])  # the training is gone: one last page
    assert "data-reload=" not in run.report.read_text()
