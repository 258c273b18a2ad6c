"""Help and manual on a terminal: within its width, rendered, paged; in a pipe as they are."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from tests.monitor.test_encodings import in_terminal
from trainrun.cli.long_text import render_markdown, wrap_code, wrap_columns
from trainrun.cli.main import COMMANDS
from trainrun.cli.manual_pages import load_topics
from trainrun.config.argv import find_conf_dir
from trainrun.config.help_text import build_help_text

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TOPICS = ((), ("trainer",), ("data",), ("monitor",), ("model=gpt",), ("all",))


@pytest.mark.parametrize("width", [30, 44, 60, 80, 100, 200])
@pytest.mark.parametrize("asked", TOPICS)
def test_help_fits_the_window_without_losing_a_word(asked: tuple[str, ...], width: int) -> None:
    text = build_help_text(list(asked), COMMANDS, [find_conf_dir()])
    lines = wrap_columns(text, width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_list_that_fits_is_left_as_it_is() -> None:
    text = build_help_text(["precision"], COMMANDS, [find_conf_dir()])
    assert wrap_columns(text, 300) == "\n".join(line.rstrip() for line in text.splitlines())


def test_second_column_is_wrapped_below_itself() -> None:
    lines = wrap_columns("  name=value          one two three four five six seven eight", 50).splitlines()
    assert lines[0].startswith("  name=value")
    column = lines[0].index("one")
    assert lines[1][:column].strip() == ""
    assert lines[1][column:].strip()


def test_markdown_is_rendered_and_commands_stay_whole() -> None:
    command = "trainrun data=csv data.path=plants.csv data.train.target=kind model=mlp trainer.max_epochs=5"
    markdown = (
        f"# Title\n\nSome `code` and **bold** words that are long enough to be wrapped.\n\n    {command}\n"
    )
    lines = ESCAPES.sub("", render_markdown(markdown, 44)).splitlines()
    begin = next(row for row, line in enumerate(lines) if line.startswith("    trainrun"))
    pasted = " ".join(line.strip().removesuffix("\\").strip() for line in lines[begin:])
    assert pasted == command
    assert all(len(line) <= 44 for line in lines)
    assert not any("`" in line or "**" in line for line in lines)


@pytest.mark.parametrize("page", load_topics())
def test_every_page_fits_the_window(page: str) -> None:
    for width in (44, 80):
        lines = ESCAPES.sub("", render_markdown(load_topics()[page], width)).splitlines()
        assert [line for line in lines if len(line) > width] == []


def test_python_that_is_broken_inside_brackets_means_the_same() -> None:
    code = "pair = torch.cat([torch.zeros(64, 10), torch.ones(64, 10)], dim=1)  # a batch of two halves"
    lines = wrap_code(code, 40)
    assert all(len(line) <= 40 for line in lines)
    assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(code))


def test_word_of_a_command_that_is_wider_than_the_window_is_one_word_for_a_shell() -> None:
    command = f"trainrun data.path={'x' * 60} seed=1"
    lines = wrap_code(command, 40)
    assert all(len(line) <= 40 for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == command.split()


@pytest.mark.process
def test_long_page_goes_to_the_pager_of_a_terminal_alone(tmp_path: Path) -> None:
    pager = {"PAGER": "sed -e s/^/paged:/", "LINES": "20", "COLUMNS": "60"}
    code, shown = in_terminal(["help", "data"], tmp_path, pager)
    assert code == 0
    assert all(line.startswith("paged:") for line in shown.splitlines())
    code, shown = in_terminal(["help", "trainer.max_steps"], tmp_path, pager)
    assert code == 0
    assert "paged:" not in shown
    code, shown = in_terminal(["help", "data"], tmp_path, {**pager, "PAGER": "no_such_pager"})
    assert code == 0
    assert "paged:" not in shown
    assert shown.strip()
