"""What people see: golden lines without a terminal, the bar with one."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainrun.interfaces import RunFacts
from trainrun.monitor import notebook
from trainrun.monitor.bar import ProgressBar
from trainrun.monitor.console import Console
from trainrun.monitor.run_lines import start_lines

FACTS = RunFacts(
    "digits-mlp", "runs/x", "cpu", 2, 32, 4, 1437, 360, 45, 900, 20, "MLP", 19210, 19210,
    ("data.engine=resident: 0.4 MiB fits in memory", "parallel.devices=2: [two] cores"),
    "AdamW, lr 0.001, schedule cosine",
)  # fmt: skip
SUMMARY = {
    "reason": "trainer.max_epochs=20 reached", "monitor": "val/acc", "value": 0.98125, "best_step": 810,
    "step": 900, "seconds": 65.2, "samples_per_second": 5912.3,
}  # fmt: skip
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def speed(per_second: float, batch: float = 100.0) -> dict[str, float]:
    """Of a row whose steps have so many samples."""
    return {"samples_per_second": per_second, "step_seconds": batch / per_second}


def run(console: Console, folder: str = "runs/x") -> None:
    console.on_start(replace(FACTS, folder=folder), 0)
    console.on_step(100, 2.22, {"train/loss": 0.3, "train/acc": 0.9, "lr": 1e-3} | speed(5000.0))
    console.on_step(150, 2.9, {"train/loss": 0.21345} | speed(6000.0, 240.0))
    console.on_eval(
        135,
        3.0,
        {"train/loss": 0.2135, "train/acc": 0.9, "val/acc": 0.921, "val/loss": 0.25, "val/seconds": 0.01},
    )
    console.on_note("saved [bold]checkpoint[/bold] :smile:")
    console.on_eval(900, 20.0, {"test/loss": 0.2, "test/acc": 0.95})
    console.on_end(SUMMARY)
    console.close()


def test_lines_without_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    stream = io.StringIO()
    run(Console(stream=stream, best=lambda: ("val/acc", 135)), str(tmp_path))
    assert (
        stream.getvalue()
        == f"""\
digits-mlp on cpu
  data       1,437 training samples, 360 for validation
  model      MLP, 19,210 parameters
  optimizer  AdamW, lr 0.001, schedule cosine
  batch      32 x 4 accumulated x 2 ranks = 256
  length     900 steps, 45 an epoch, 20 epochs
  folder     {tmp_path}
epoch   step  train/loss  val/loss   val/acc   samples/s
 3/20    135      0.2135    0.2500    0.9210*       5.5k
saved [bold]checkpoint[/bold] :smile:
test  test/loss 0.2  test/acc 0.95
ended at step 900: trainer.max_epochs=20 reached
  best       val/acc 0.9812 at step 810
  time       1:05 of training at 5.91k samples/s
  next       trainrun evaluate {tmp_path}
"""
    )


CHOICES = "  chosen     data.engine=resident: 0.4 MiB fits in memory\n             parallel.devices=2: [two] cores\n"


def test_log_has_all_choices_and_the_lines_of_a_screen_of_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    log, lines = io.StringIO(), io.StringIO()
    run(Console(interactive=True, stream=io.StringIO(), log=log))
    run(Console(stream=lines))
    assert log.getvalue().replace(CHOICES, "") == lines.getvalue()
    assert CHOICES in log.getvalue()


def test_a_closed_screen_leaves_the_log_whole() -> None:
    log, lines = io.StringIO(), io.StringIO()
    run(Console(stream=ClosedPipe(), log=log))
    run(Console(stream=lines))
    assert log.getvalue().replace(CHOICES, "") == lines.getvalue()


def test_a_run_without_validation_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainrun.monitor.console.QUIET_SECONDS", 0.0)
    stream = io.StringIO()
    console = Console(verbose=False, stream=stream)
    console.on_start(FACTS, 0)
    console.on_step(50, 1.111111, {"train/loss": 0.3, "lr": 1e-3})
    console.on_batch(51)
    console.on_batch(52)
    head, line = stream.getvalue().splitlines()[1:]
    assert head.split() == ["epoch", "step", "train/loss"]
    assert line.split() == ["1.11/20", "50", "0.3000"]


def test_the_length_names_epochs_where_they_end_the_run() -> None:
    facts = replace(FACTS, steps_per_epoch=10**6, total_steps=5000)
    assert "  length     5,000 steps, 1,000,000 an epoch" in start_lines(facts, 0, True)
    assert ProgressBar(facts, 0).draw(80, 1200, []).plain.startswith("training  ━")


def test_a_terminal_shows_a_bar_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    before = sys.stdout, set(threading.enumerate())
    stream = io.StringIO()
    console = Console(interactive=True, stream=stream)
    console.on_start(FACTS, 0)
    console.on_batch(450)
    console.on_step(450, 10.0, {"train/loss": 0.25} | speed(5900.0))
    console.on_eval(450, 10.0, {"train/loss": 0.25, "val/acc": 0.9, "val/loss": 0.5})
    console._live.refresh()  # type: ignore[union-attr]
    console.on_note("saved [bold]x[/bold] :smile:")
    print("a print of the user's")
    console.on_end(SUMMARY)
    for _ in range(2):
        console.close()
    shown = ESCAPES.sub("", stream.getvalue())
    assert "epoch 10/20" in shown
    assert "450/900  50%" in shown
    assert "train/loss 0.25  val/loss 0.5  5.9k samples/s  val/acc 0.9" in shown
    assert "saved [bold]x[/bold] :smile:" in shown
    assert "a print of the user's" in shown
    line = "10/20    450      0.2500    0.5000    0.9000       5.9k\n"
    assert shown.count(line) == 1  # above the bar, and it stays
    assert shown.index(line) < shown.index("a print of the user's") < shown.index("ended at step")
    assert shown.endswith("  time       1:05 of training at 5.91k samples/s\n  folder     runs/x\n")
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # the cursor is back
    assert sys.stdout is before[0]
    for thread in set(threading.enumerate()) - before[1]:
        thread.join(30)  # it was told to end
        assert not thread.is_alive()


@pytest.mark.parametrize(("progress", "terminal"), [(False, "xterm"), (True, "dumb")])
def test_no_bar_where_none_is_wanted_or_possible(
    progress: bool, terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", terminal)
    stream = io.StringIO()
    run(Console(interactive=True, progress=progress, stream=stream))
    assert "\x1b" not in stream.getvalue()
    assert " 3/20    135 " in stream.getvalue()


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_prints_without_the_lock_of_the_bar() -> None:
    """A child that prints while the parent's drawing thread held its lock would wait for ever."""
    code = f"""
import os, sys, threading
from trainrun.interfaces import RunFacts
from trainrun.monitor.console import Console
console = Console(interactive=True)
console.on_start({FACTS!r}, 0)
held, done = threading.Event(), threading.Event()
def draw():
    with console._live._lock, console._live.console._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=draw)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    print("from the child", flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
done.set()
thread.join()
console.close()
sys.exit(status)
"""
    result = subprocess.run(
        # Python 3.12 warns of the fork, and the warning would wait for the lock
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TERM": "xterm"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "from the child" in result.stdout


@pytest.mark.process
def test_rich_is_not_imported_without_a_terminal() -> None:
    code = f"""
import sys
from trainrun.interfaces import RunFacts
from trainrun.monitor.console import Console
console = Console()
console.on_start({FACTS!r}, 0)
console.on_end({SUMMARY!r})
assert not [name for name in sys.modules if name.partition(".")[0] == "rich"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


def bar_of(
    total: int | None, length: int | None, epochs: int | None, start: int = 0, **kwargs: Any
) -> ProgressBar:
    facts = replace(FACTS, total_steps=total, steps_per_epoch=length, total_epochs=epochs)
    return ProgressBar(facts, start, **{"clock": lambda: 0.0} | kwargs)


@pytest.mark.parametrize("width", [30, 44, 60, 80, 100, 200])
def test_bar_shows_whole_fields_that_fit(width: int) -> None:
    bar = bar_of(100_000, 45, 20, 50_000, activity=lambda: "validating 40/79")
    values = ["val/acc 0.912", "train/loss 0.5", "val/loss 0.6", "5.9k samples/s", "waits for data 3 %"]
    first, second = bar.draw(width, 50_000, values).plain.splitlines()
    assert len(first) <= width
    assert len(second) <= width
    assert set(second.split("  ")) <= set(values)
    assert second.startswith("val/acc 0.912")
    assert "validating 40/79" in first
    assert "0:00 < ?" in first
    assert (first.count("━") >= 8) == (width >= 60)
    assert ("epoch 1/20" in first) == (width >= 80)


def test_the_bar_shows_the_share_of_waiting_of_the_last_half_minute() -> None:
    now, waited = [0.0], [0.0]
    bar = bar_of(1000, None, None, clock=lambda: now[0], waited=lambda: waited[0])
    shown = []
    for now[0], waited[0] in ((0.0, 0.5), (10.0, 5.5), (41.0, 20.5), (51.0, 23.0)):
        shown.append(bar.draw(80, 0, ["lr 1"]).plain.splitlines()[-1])
    assert shown == ["lr 1", *(f"lr 1  waits for data {share} %" for share in (50, 48, 25))]


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return False


def test_a_closed_terminal_or_pipe_ends_no_training() -> None:
    run(Console(stream=ClosedPipe()))


def test_a_notebook_has_a_bar_of_html(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that remembers what the cell shows."""
    shown: list[str] = []

    def display(html: str, display_id: bool) -> Any:
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    shell = SimpleNamespace(kernel="one")
    fake = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display, HTML=str))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setattr(notebook, "SECONDS", 0.0)
    console = Console()
    console.on_start(FACTS, 0)
    console.on_step(10, 1.0, {"train/loss": 0.5, "step_seconds": 0.1, "<b>": 1.0})
    console.on_eval(10, 1.0, {"val/<b>": 0.25})
    console.on_batch(11)
    assert 'value="11" max="' in shown[-1]
    assert "train/loss 0.5" in shown[-1]
    assert "val/&lt;b&gt; 0.25" in shown[-1]
    assert "<th>val/&lt;b&gt;</th>" in shown[-1]
    assert "<td>0.2500</td>" in shown[-1]
    assert "val/" not in capsys.readouterr().out  # the table has it
    console.close()
    assert "ended" in shown[-1]
    number = len(shown)
    console.on_batch(12)
    assert len(shown) == number
    shell.kernel = None  # IPython in a terminal
    Console().on_start(FACTS, 0)
    assert len(shown) == number
