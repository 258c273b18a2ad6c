"""What a person reads: the help of every command and group, and the lines of a short run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from approved import approve, masked

from trainrun.cli.main import COMMANDS, main

SHORT = (
    "trainer.max_epochs=2",
    "trainer.num_threads=1",
    "monitor.plots=false",
    "data.engine=resident",
    "output_dir=run",
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as end:  # of argparse
        code = end.code or 0
    assert code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    approve(shown([command, "--help"], capsys))


@pytest.mark.parametrize(
    "words", [["--help"], ["--help", "all"], ["--help", "model=gpt"], ["--help", "trainer.max_time"]]
)
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    approve(shown(words, capsys))


def without_numbers(text: str) -> str:
    """Lines up to the account of time, without numbers and their units, which differ from run to run."""
    lines = masked(text).partition("\n  time ")[0]
    lines = re.sub(r"-?\d[\d.,:]*(?:e[-+]?\d+)?[kMGT]?(?: ?(?:ms|s|min|%)\b|%)?\*?", "#", lines)
    return re.sub(r" +", " ", lines)


def test_lines_of_a_run_its_resume_and_the_commands_on_it(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [[*SHORT], ["resume", "run", "trainer.max_epochs=3"], ["evaluate", "run"], ["predict", "run"]]
    approve("\n".join(without_numbers(shown(words, capsys)) for words in runs))
