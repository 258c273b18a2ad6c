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

from trainrun.formatting import counted, duration, figure, quantity
from trainrun.interfaces import RunFacts
from trainrun.monitor import notebook
from trainrun.monitor.bar import ProgressBar
from trainrun.monitor.console import Console, place_line, start_lines

FACTS = RunFacts(
    "digits-mlp", "runs/x", "cpu", 2, 32, 4, 1437, 360, 45, 900, 20, "MLP (layers)", 19210, 19210,
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
    console.on_eval(135, 3.0, {"val/acc": 0.921, "val/loss": 0.25, "val/seconds": 0.01})
    console.on_note("saved [bold]checkpoint[/bold] :smile:")
    console.on_eval(900, 20.0, {"test/loss": 0.2, "test/acc": 0.95})
    console.on_end(SUMMARY)
    console.close()


def test_lines_without_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    stream = io.StringIO()
    run(Console(stream=stream), str(tmp_path))
    assert (
        stream.getvalue()
        == f"""\
digits-mlp on cpu
  model   MLP (layers), 19,210 parameters
  data    1,437 training samples, 360 for validation
  step    batch 32 x accumulate 4 x ranks 2 = 256
  update  AdamW, lr 0.001, schedule cosine
  length  900 steps, 45 an epoch, 20 epochs
  chosen  data.engine=resident: 0.4 MiB fits in memory
          parallel.devices=2: [two] cores
  folder  {tmp_path}
epoch 3/20  step 135  train/loss 0.2135  val/loss 0.25  val/acc 0.921  5.5k samples/s
saved [bold]checkpoint[/bold] :smile:
test  test/loss 0.2  test/acc 0.95
ended at step 900: trainer.max_epochs=20 reached
  best    val/acc 0.9812 at step 810
  time    1:05, 5.91k samples/s
  files   {tmp_path}/checkpoints
"""
    )


def test_less_is_said_without_verbose_and_of_what_is_unknown() -> None:
    stream = io.StringIO()
    console = Console(verbose=False, stream=stream)
    console.on_start(FACTS, 0)
    assert stream.getvalue() == "digits-mlp  runs/x\n"
    stream.seek(0)
    open_end = replace(
        FACTS, num_train=None, num_val=None, steps_per_epoch=None, total_steps=None, total_epochs=None,
        num_trainable=10, choices=(),
    )  # fmt: skip
    Console(stream=stream).on_start(open_end, 1500)
    assert (
        stream.getvalue()
        == """\
digits-mlp on cpu, resumed at step 1,500
  model   MLP (layers), 19,210 parameters, 10 of them trained
  data    an unknown number of training samples
  step    batch 32 x accumulate 4 x ranks 2 = 256
  update  AdamW, lr 0.001, schedule cosine
  length  an unknown number of steps
  folder  runs/x
"""
    )


def test_a_run_without_validation_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainrun.monitor.console.QUIET_SECONDS", 0.0)
    stream = io.StringIO()
    console = Console(verbose=False, stream=stream)
    console.on_start(FACTS, 0)
    console.on_step(50, 1.111111, {"train/loss": 0.3, "lr": 1e-3})
    console.on_batch(51)
    console.on_batch(52)
    assert stream.getvalue().splitlines()[1:] == ["epoch 1.111/20  step 50  train/loss 0.3"]


def test_a_line_has_the_validation_of_its_step_alone_and_no_step_is_said_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainrun.monitor.console.QUIET_SECONDS", 0.0)
    stream = io.StringIO()
    console = Console(verbose=False, stream=stream)
    console.on_start(FACTS, 0)
    for step in range(1, 151):
        console.on_batch(step)
        if step % 50 == 0:
            console.on_step(step, step / 45, {"train/loss": 1 / step})
        if step % 100 == 0:
            console.on_eval(step, step / 45, {"val/loss": 0.5})
    console.on_end(SUMMARY)
    assert stream.getvalue().splitlines()[1:4] == [
        "epoch 1.111/20  step 50  train/loss 0.02",
        "epoch 2.222/20  step 100  train/loss 0.01  val/loss 0.5",
        "epoch 3.333/20  step 150  train/loss 0.006667",
    ]


@pytest.mark.parametrize(
    ("steps_per_epoch", "total_steps", "step", "epoch", "place"),
    [
        (10**6, 5000, 1200, 0.0012, "step 1,200/5,000"),  # a data set of every window of a text
        (None, 5000, 1200, 0.0, "step 1,200/5,000"),  # an endless one
        (None, None, 1200, 0.0, "step 1,200"),
        (None, None, 1200, 3.0, "epoch 3/20  step 1,200"),  # it has an end after all
        (45, 900, 135, 3.0, "epoch 3/20  step 135"),
        (45, 60, 50, 1.111, "epoch 1.111/1.333  step 50"),  # trainer.max_steps ends it, not max_epochs=20
    ],
)
def test_epochs_are_said_of_runs_that_see_one(steps_per_epoch, total_steps, step, epoch, place) -> None:
    facts = replace(FACTS, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
    assert place_line(step, epoch, facts) == place


def test_the_length_names_epochs_where_they_end_the_run() -> None:
    facts = replace(FACTS, steps_per_epoch=10**6, total_steps=5000)
    assert "  length  5,000 steps, 1,000,000 an epoch" in start_lines(facts, 0, True)
    assert ProgressBar(facts, 0).draw(80, 1200, []).plain.startswith("training  ")


def test_the_newest_numbers_are_said_at_the_end_and_once() -> None:
    stream = io.StringIO()
    console = Console(verbose=False, stream=stream)
    console.on_start(FACTS, 0)
    console.on_eval(50, 1.0, {"val/loss": 0.5})
    console.on_step(100, 2.0, {"train/loss": 0.3, "train/acc": 0.9, "lr": 1e-3})
    console.on_end(SUMMARY)
    said = stream.getvalue().splitlines()
    assert said[1:3] == [
        "epoch 1/20  step 50  val/loss 0.5",
        "epoch 2/20  step 100  train/loss 0.3  train/acc 0.9",
    ]
    assert said[3].startswith("ended at step")


def test_only_recent_log_points_count_for_the_speed() -> None:
    stream = io.StringIO()
    console = Console(window=2, stream=stream)
    for step, per_second in ((1, 1.0), (3, 100.0), (4, 400.0)):
        console.on_step(step, 0.0, speed(per_second))
    console.on_eval(4, 1.0, {"val/loss": 1.0})  # 300 samples in 2.25 seconds
    assert stream.getvalue() == "epoch 1  step 4  val/loss 1  133 samples/s\n"


def test_a_terminal_shows_a_bar_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    before = sys.stdout, set(threading.enumerate())
    stream = io.StringIO()
    console = Console(interactive=True, stream=stream)
    console.on_start(FACTS, 0)
    console.on_batch(450)
    console.on_step(450, 10.0, {"train/loss": 0.25} | speed(5900.0))
    console.on_eval(450, 10.0, {"val/acc": 0.9, "val/loss": 0.5})
    console._live.refresh()  # type: ignore[union-attr]
    console.on_note("saved [bold]x[/bold] :smile:")
    print("a print of the user's")
    console.on_end(SUMMARY)
    for _ in range(2):
        console.close()
    shown = ESCAPES.sub("", stream.getvalue())
    assert "epoch 11/20" in shown
    assert "450/900  50%" in shown
    assert "5.9k samples/s  train/loss 0.25  val/loss 0.5  val/acc 0.9" in shown
    assert "saved [bold]x[/bold] :smile:" in shown
    assert "a print of the user's" in shown
    last = "epoch 10/20  step 450  train/loss 0.25  val/loss 0.5  val/acc 0.9  5.9k samples/s\n"
    assert shown.count("step 450  ") == 1  # no lines beside the bar; the newest numbers stay when it goes
    assert shown.index("a print of the user's") < shown.index(last) < shown.index("ended at step")
    assert shown.endswith(
        "  best    val/acc 0.9812 at step 810\n  time    1:05, 5.91k samples/s\n  files   runs/x\n"
    )
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
    assert "epoch 3/20  step 135" in stream.getvalue()


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


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_the_bar_fits_the_terminal(width: int) -> None:
    first = bar_of(100_000, 45, 20).draw(width, 50_000, ["train/loss 0.5"]).plain.splitlines()[0]
    if width >= 60:
        assert len(first) <= width
        assert first.count("━") == min(40, width - len(first.replace("━", "")))
    else:
        assert "━" not in first


def test_the_bar_shows_the_share_of_waiting_of_the_last_half_minute() -> None:
    now, waited = [0.0], [0.0]
    bar = bar_of(1000, None, None, clock=lambda: now[0], waited=lambda: waited[0])
    shown = []
    for now[0], waited[0] in ((0.0, 0.5), (10.0, 5.5), (41.0, 20.5), (51.0, 23.0)):
        shown.append(bar.draw(80, 0, ["lr 1"]).plain.splitlines()[-1])
    assert shown == ["lr 1", *(f"lr 1  waits for data {share} %" for share in (50, 48, 25))]


def test_the_time_left_follows_the_recent_speed() -> None:
    times = iter((0.0, 0.0, 10.0, 100.0, 110.0, 129.0))
    bar = bar_of(1000, None, None, clock=lambda: next(times))
    assert "? left" in bar.draw(80, 0, []).plain
    for step in (10, 100, 200, 390):
        drawn = bar.draw(80, step, []).plain
    assert "1:01 left" in drawn  # 610 steps at 10 a second, not at 3


def test_a_bar_of_unknown_length_and_in_plain_letters() -> None:
    assert bar_of(None, None, None).draw(80, 1234, []).plain.splitlines()[0] == "training  step 1,234  0.0 s"
    plain = bar_of(10, 5, None, 5, ascii_only=True).draw(80, 5, []).plain
    assert plain.splitlines()[0] == f"epoch 2  {'#' * 20}{'-' * 20}  5/10  50%  ? left"


def test_numbers_are_readable() -> None:
    shown = [figure(value) for value in (0.123456, 1e-5, 3.0, 19210, float("nan"), True, None, "x")]
    assert shown == ["0.1235", "1e-05", "3", "19,210", "nan", "True", "None", "x"]
    assert [quantity(value) for value in (0.0, 9.5, 999.9, 5912.3, 12.34e6)] == [
        "0",
        "9.5",
        "1k",
        "5.91k",
        "12.3M",
    ]
    assert [duration(value) for value in (0.0, 1e-6, 0.04, 0.096, 9.94, 9.96, 59.7, 125.0, 3725.0)] == [
        "0.0 s", "1 ms", "40 ms", "0.1 s", "9.9 s", "10 s", "1:00", "2:05", "1:02:05",
    ]  # fmt: skip


def test_one_is_not_many() -> None:
    assert [counted(number, "epoch") for number in (0, 1, 2000, None)] == [
        "0 epochs", "1 epoch", "2,000 epochs", "an unknown number of epochs",
    ]  # fmt: skip


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return False


def test_a_closed_terminal_or_pipe_ends_no_training() -> None:
    run(Console(stream=ClosedPipe()))


def test_tokens_are_shown_as_such() -> None:
    stream = io.StringIO()
    console = Console(False, True, False, 20, stream)
    console.on_start(FACTS, 0)
    console.on_step(450, 10.0, {"train/loss": 0.25, "tokens_per_second": 5900.0, "step_seconds": 0.1})
    console.on_eval(450, 10.0, {"val/loss": 0.5})
    console.on_end({"step": 450, "seconds": 12.0, "tokens_per_second": 6100.0, "samples_per_second": None})
    text = stream.getvalue()
    assert "5.9k tokens/s" in text
    assert "12 s, 6.1k tokens/s" in text
    assert "samples/s" not in text


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
    assert "val/" not in capsys.readouterr().out  # the bar has it
    console.close()
    number = len(shown)
    console.on_batch(12)
    assert len(shown) == number
    shell.kernel = None  # IPython in a terminal
    Console().on_start(FACTS, 0)
    assert len(shown) == number
