"""A terminal whose encoding lacks characters shows others in their place, and fails nothing."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from faults.forks import ForkedCommand

from tests.monitor.test_console import FACTS
from tests.quiet_runs import QUIET
from trainrun.folder.run_folder import RunDir
from trainrun.folder.status import read_status
from trainrun.monitor.bar import start_bar
from trainrun.output import EncodableStream, make_encodable, redraw_line, say

TEXT = "größer … ━━ ▁█ 5 µs ± 日本 \udcff"
ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "C": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r", "utf-8", "utf-16"])
def test_any_text_can_be_written(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    say(TEXT, stream)
    EncodableStream(stream).write(TEXT)
    monkeypatch.setattr(sys, "stdout", stream)
    redraw_line(TEXT)
    stream.flush()
    assert stream.buffer.getvalue()


def test_similar_characters_stand_for_those_that_are_missing() -> None:
    assert make_encodable("5 µs … ━▁█", "ascii") == "5 us ~ -_#"
    assert make_encodable("5 µs …", "latin-1") == "5 µs ~"
    assert make_encodable("5 µs … ━", "utf-8") == "5 µs … ━"
    assert make_encodable("日", "ascii") == "\\u65e5"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_bar_that_is_cut_off_is_drawn(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    live = start_bar(FACTS, lambda: 450, lambda: ["train/loss 0.123456", "größe 日本 0.5"], stream)
    assert live is not None
    live.refresh()
    live.stop()


def test_fault_in_the_bar_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    live = start_bar(FACTS, lambda: 450, lambda: 1 / 0, stream)  # type: ignore[arg-type,return-value]
    assert live is not None
    live.refresh()
    live.stop()
    assert "ZeroDivisionError" in stream.getvalue()


def in_terminal(
    words: list[str], folder: Path, env: dict[str, str], is_forked: bool = False
) -> tuple[int, str]:
    """Run a command in a terminal, of 40 columns if `env` does not say; return its exit code and what it wrote.

    is_forked: fork this process, which has imported torch; of Python's own variables PYTHONIOENCODING alone is read.
    """
    leader, follower = pty.openpty()
    env = {"TERM": "xterm", "COLUMNS": "40", **env}
    process: ForkedCommand | subprocess.Popen[bytes]
    if is_forked:
        process = ForkedCommand(*words, env=env, folder=folder, output=follower)
    else:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainrun", *words], stdin=follower, stdout=follower, stderr=follower, cwd=folder,
            env=os.environ | env,
        )  # fmt: skip
    os.close(follower)
    written = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # Linux's way to say that nobody writes any more
            break
        if not block:
            break
        written += block
    os.close(leader)
    return process.wait(), written.decode("utf-8", "replace")


@pytest.mark.process
@pytest.mark.parametrize("name", ENCODINGS)
def test_run_and_watch_in_a_terminal_of_any_encoding(name: str, tmp_path: Path) -> None:
    words = [word for word in QUIET if "progress_bar" not in word]
    words += ["trainer.max_steps=30", "output_dir=run"]
    is_forked = "PYTHONIOENCODING" in ENCODINGS[name]
    code, shown = in_terminal(words, tmp_path, ENCODINGS[name], is_forked)
    assert code == 0, shown
    assert read_status(RunDir(tmp_path / "run"))["state"] == "done"
    assert "\x1b[?25h" in shown  # the bar was there, and gave the cursor back
    code, shown = in_terminal(["watch", "run"], tmp_path, ENCODINGS[name], is_forked)
    assert code == 0, shown
    assert "val/loss" in shown
