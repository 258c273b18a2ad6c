"""A run in a terminal of each width, without colours, and in a pipe: what stays on the screen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from faults.forks import ForkedCommand

from tests.monitor.test_encodings import in_terminal
from tests.quiet_runs import QUIET

WORDS = [*(word for word in QUIET if "progress_bar" not in word), "trainer.max_epochs=3", "output_dir=run"]
COLOR = re.compile(r"\x1b\[(?:[0-9;]*;)?[39][0-7]m")


def lines_that_stay(shown: str) -> list[str]:
    """Return the lines of a terminal: what was erased or written over is left out."""
    lines = [""]
    row = 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\r\n]+", shown):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            pass
        elif match := re.fullmatch(r"\x1b\[(\d*)A", part):
            row -= int(match[1] or 1)
        elif re.fullmatch(r"\x1b\[[02]?K", part):
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] += part
    return [line for line in lines if line.strip()]


@pytest.mark.process
@pytest.mark.parametrize(("width", "extra"), [(44, {}), (80, {"NO_COLOR": "1"}), (200, {})])
def test_evaluations_stay_above_the_bar(width: int, extra: dict[str, str], tmp_path: Path) -> None:
    code, shown = in_terminal(
        WORDS, tmp_path, {"COLUMNS": str(width), "PYTHONIOENCODING": "utf-8", **extra}, True
    )
    assert code == 0, shown
    lines = lines_that_stay(shown)
    rows = [line for line in lines if re.match(r" +[123]/3 ", line)]
    assert [row.split()[0] for row in rows] == ["1/3", "2/3", "3/3"]
    assert all(len(line) <= width for line in lines if not {"trainrun", "folder"} & set(line.split()))
    assert not any("training  " in line for line in lines)  # the bar is gone
    assert bool(COLOR.search(shown)) == (not extra)
    assert any(line.endswith("  trainrun resume run trainer.max_epochs=6") for line in lines)


@pytest.mark.process
def test_pipe_has_the_same_lines_as_the_log(tmp_path: Path) -> None:
    process = ForkedCommand(*WORDS, folder=tmp_path)
    shown, errors = process.communicate()
    assert process.returncode == 0, errors
    log = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert "\x1b" not in shown
    assert [line for line in shown.splitlines() if line not in log] == []


@pytest.mark.process
def test_summary_shows_choices_and_layers(tmp_path: Path) -> None:
    words = [*WORDS[:-2], "trainer.max_steps=2", "output_dir=run", "--summary"]
    code, shown = in_terminal(words, tmp_path, {"COLUMNS": "100"}, is_forked=True)
    assert code == 0, shown
    lines = [line.split() for line in lines_that_stay(shown)]
    assert ["layer", "class", "output", "parameters"] in lines
    assert any(line[:1] == ["chosen"] for line in lines)
    (total,) = [line for line in lines if line[:2] == ["all", "Mlp"]]
    (model,) = [line for line in lines if line[:2] == ["model", "Mlp,"]]
    assert total[-1] == model[2]


@pytest.mark.process
@pytest.mark.parametrize("width", [44, 80])
def test_messages_are_wrapped_between_words_on_a_terminal(width: int, tmp_path: Path) -> None:
    code, shown = in_terminal(["model=nosuch", "trainer.max_epoch=3"], tmp_path, {"COLUMNS": str(width)})
    assert code == 2
    lines = shown.splitlines()
    assert all(len(line) <= width for line in lines)
    done = subprocess.run(
        [sys.executable, "-m", "trainrun", "model=nosuch", "trainer.max_epoch=3"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert " ".join(lines).split() == done.stderr.split()
    assert len(done.stderr.splitlines()) < len(lines)
