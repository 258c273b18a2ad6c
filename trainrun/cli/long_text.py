"""Long texts on a terminal: hanging indents, rendered Markdown, and a pager for texts longer than the screen.

In a pipe or a file a text is printed unchanged, one setting per line, so that other programs can search it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from typing import Any

from trainrun.output import make_encodable, make_printable, print_encodable, say

NARROW_COLUMN = 24  # of the second column where the window is narrow
COMMAND_STARTS = ("trainrun ", "python ", "torchrun ", "pip ", "srun ", "bash ")
COMMENT = re.compile(r"(?:^|(?<=\s))# *(?=\S)")
UNQUOTED_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
WIDEST_PROSE = 100  # columns; longer lines of prose are hard to read
COLUMNS = re.compile(r"( *)(\S.*?)(?: {2,}(\S.*))?$")


def print_long_text(text: str) -> None:
    """Print a help text. After its first heading, the text is Markdown."""
    if not sys.stdout.isatty():
        say(text)
        return
    size = shutil.get_terminal_size()
    lists, heading, pages = text.partition("\n# " if text.startswith("# ") else "\n## ")
    if text.startswith("#"):
        lists, heading, pages = "", "", text
    parts = [wrap_columns(make_printable(lists), size.columns)] if lists else []
    if pages:
        parts.append(render_markdown(heading.lstrip("\n") + pages, size.columns))
    show_in_pager("\n".join(parts), size.lines)


def wrap_columns(text: str, width: int) -> str:
    """Return a list of two columns in at most `width` characters a line. The second column is wrapped and aligned."""
    lines = text.splitlines()
    too_wide = {find_second_column(line) for line in lines if len(line) > width}
    return "\n".join(part for line in lines for part in wrap_line(line, width, too_wide))


def find_second_column(line: str) -> int:
    """Return the position of the second column in a line; -1 without one."""
    match = COLUMNS.fullmatch(line.rstrip())
    return -1 if match is None else match.start(3)


def wrap_line(line: str, width: int, too_wide: set[int]) -> list[str]:
    """Return one line of a list, wrapped to at most `width` characters, with a hanging indent.

    too_wide: positions of the second column in lists with lines that do not fit. The first column of such a list is
        made narrower.
    """
    match = COLUMNS.fullmatch(line.rstrip())
    if match is None:
        return [line.rstrip()]
    indent, head, body = match[1], match[2], match[3]
    if body is None:
        return fill_lines(head, indent, indent + "    ", width)
    column = match.start(3)
    if column in too_wide and column > 0.45 * width:
        column = min(NARROW_COLUMN, width // 3)
    first = indent + head
    if len(first) + 2 > column:
        return [
            *fill_lines(head, indent, indent + "    ", width),
            *fill_lines(body, " " * column, " " * column, width),
        ]
    return fill_lines(body, first.ljust(column), " " * column, width)


def fill_lines(text: str, first: str, others: str, width: int) -> list[str]:
    """Return a text as lines of at most `width` characters, broken between words. first, others: indents of the
    lines.
    """
    return textwrap.wrap(
        text,
        max(width, len(others) + 10),
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
    )


def wrap_code(line: str, width: int) -> list[str]:
    """Return a line of code, a command or an output as lines of at most `width` characters.

    A comment moves above its line. A command stays a single command for the shell. Python code stays valid if it is
    broken inside brackets.
    """
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    if match := COMMENT.search(line):
        code = line[: match.start()].rstrip()
        comment = fill_lines(line[match.end() :], f"{indent}# ", f"{indent}# ", width)
        return [*comment, *(wrap_code(code, width) if code else [])]
    if line.startswith(COMMAND_STARTS):
        return wrap_command(line, width)
    return fill_lines(line.strip(), indent, indent + "    ", width)


def wrap_command(command: str, width: int) -> list[str]:
    """Return a command as several lines that a shell joins: each but the last ends with a backslash."""
    first, *words = UNQUOTED_WORD.findall(command)
    lines = [first]
    for word in words:
        if len(f"{lines[-1]} {word} \\") <= width:
            lines[-1] += f" {word}"
            continue
        lines[-1] += " \\"
        rest = f"  {word}"
        while len(rest) > width - 2:  # without an indent behind it, a backslash breaks inside a word
            lines.append(rest[: width - 1] + "\\")
            rest = rest[width - 1 :]
        lines.append(rest)
    return lines


def render_markdown(markdown: str, width: int) -> str:
    """Return Markdown rendered for a terminal. If NO_COLOR is set, it has no colours."""
    from rich.console import Console
    from rich.markdown import Markdown, MarkdownElement
    from rich.text import Text
    from rich.theme import Theme

    class CodeBlock(MarkdownElement):
        """A block of code: indented, not filled as prose is."""

        new_line = True

        def on_text(self, context: Any, text: Any) -> None:
            self.text = str(text)

        def __rich_console__(self, console: Any, options: Any) -> Any:
            indent = "    "
            code = self.text.rstrip().splitlines()
            lines = [part for line in code for part in wrap_code(line, width - len(indent))]
            text = "\n".join(indent + line for line in lines)
            yield Text(text, no_wrap=True, overflow="ignore")

    class Page(Markdown):
        elements = {**Markdown.elements, "fence": CodeBlock, "code_block": CodeBlock}

    theme = Theme({"markdown.code": "bold", "markdown.h1": "bold", "markdown.h2": "bold underline"})
    console = Console(
        file=io.StringIO(), force_terminal=True, width=min(width, WIDEST_PROSE), theme=theme, highlight=False
    )
    with console.capture() as capture:
        console.print(Page(markdown, hyperlinks=False), crop=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def show_in_pager(text: str, screen_lines: int) -> None:
    """Print a text. A text longer than the screen is shown in `$PAGER`, or in `less` if it is installed."""
    command = shlex.split(os.environ.get("PAGER", "less"))
    if text.count("\n") + 2 > screen_lines and command and shutil.which(command[0]):
        environment = {"LESS": "-FRX", **os.environ}
        with contextlib.suppress(BrokenPipeError):  # the pager was left before the end
            shown = make_encodable(text, sys.stdout.encoding or "utf-8")
            subprocess.run(command, input=shown, text=True, env=environment, errors="replace", check=False)
        return
    print_encodable(text)
