"""`trainrun convert` as a command: what it prints to people and to files."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from trainrun.cli import main
from trainrun.data.convert import progress
from trainrun.data.convert.progress import Shown, progress_bar


def test_quiet_lines_where_no_terminal_is(trainrun, workdir: Path):
    done = trainrun("convert", "digits", "out", "--to", "npy", "data.train.val_fraction=0.5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" samples")[0] for line in lines[1:3]] == ["train: 899", "val: 898"]
    assert lines[-2].endswith("32 samples read back are the same")
    assert lines[-1] == "use it with: data=arrays data.path=out data.num_classes=10"
    assert len(lines) == 5
    assert "\x1b" not in done.stdout


def test_help_names_it(capsys):
    assert main(["--help"]) == 0
    assert "convert      data in another format" in capsys.readouterr().out
    assert main(["--help", "convert"]) == 0


def test_a_bar_on_a_terminal(monkeypatch):
    """Redrawn when a tenth of a second has gone, and at the end."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress_bar(console) as bar:
        assert bar is not None
        drawn = []
        monkeypatch.setattr(bar, "refresh", lambda: drawn.append(bar.tasks[0].completed))
        shown = Shown(bar, "train", total=10, start=2)
        for count in range(1, 8):
            clock[0] += 0.04
            shown.at(count)
        shown.at(8, now=True)
    assert drawn[:5] == [2, 3, 6, 9, 10], "the first one when the part begins"


def test_no_bar_elsewhere():
    with progress_bar(Console(file=io.StringIO())) as bar:
        assert bar is None
        Shown(bar, "train", 10, 0).at(3)
