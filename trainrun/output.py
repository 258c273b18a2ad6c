"""Print texts and format numbers for people. Control characters in names and values are escaped, secrets are masked."""

from __future__ import annotations

import codecs
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# Control characters but tab and new line, and what changes the direction of a text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
COMMAND = "trainrun"
INDENT = 13  # of the text behind the name of a line, in the first and last lines of a run
RESULT: dict[str, Any] = {}  # of the running command, as `--json` prints it
UNITS = ("tokens", "pixels", "samples", "items")  # what a task counts; items: something else
SPEEDS = {f"{unit}_per_second": f"{unit}/s" for unit in UNITS}


def make_printable(text: object, encoding: str = "utf-8") -> str:
    r"""Return a text with secrets masked. Control characters and characters that the encoding lacks become `\x1b`."""
    shown = mask_secrets(str(text))
    if not shown.isprintable():  # all that CONTROLS names is not printable
        shown = CONTROLS.sub(lambda found: ascii(found[0])[1:-1], shown)
    return make_encodable(shown, encoding)


def format_path_to_paste(path: Path) -> str:
    """Return a path quoted for a shell; relative if it is below the working directory."""
    return shlex.quote(os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path))


SUBSTITUTE = "trainrun.substitute"  # a codec error handler, as "replace" is
# One character each, so that columns stay aligned.
IN_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True)), **dict.fromkeys("━─╸╺╴╶", "-"), **dict.fromkeys("│┃", "|"),
    "…": "~", "°": "o", "µ": "u", "•": "*", "■": "*",
}  # fmt: skip


def substitute_characters(error: UnicodeError) -> tuple[str, int]:
    r"""Return a replacement for characters that an encoding lacks: a similar one, or `\u65e5`. A codec error
    handler.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    shown = "".join(
        IN_ASCII.get(character) or character.encode("ascii", "backslashreplace").decode()
        for character in lacking
    )
    return shown, error.end


codecs.register_error(SUBSTITUTE, substitute_characters)


def make_encodable(text: str, encoding: str) -> str:
    """Return the text with characters that the encoding lacks replaced."""
    return text.encode(encoding, SUBSTITUTE).decode(encoding)


class EncodableStream:
    """A text stream that replaces characters that its encoding lacks, so that no write fails."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._stream.write(make_encodable(text, self.encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def say(text: object = "", file: IO[str] | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print a text, with control characters escaped and secrets masked. file: None is standard output.

    Messages to standard error are wrapped between words if that is a terminal.
    """
    shown = make_printable(text)
    if file is not None and file is sys.stderr and file.isatty():
        width = shutil.get_terminal_size().columns
        shown = "\n".join(wrap_message(line, width) for line in shown.split("\n"))
    print_encodable(shown, file, end, flush)


def report_result(**values: Any) -> None:
    """Add values to the result of the running command, which `--json` prints."""
    RESULT.update(values)


def print_note(text: str) -> None:
    """Print a note to standard error."""
    say(f"note: {text}", file=sys.stderr, flush=True)


def wrap_message(line: str, width: int | None) -> str:
    """Return a line with a hanging indent, wrapped to `width` characters. Commands, paths and code are not wrapped.

    A line that begins with two spaces belongs to a block with names of ten letters, such as the first lines of a
    run.
    """
    in_block = line.startswith("  ")
    text = line[INDENT:] if in_block else line
    is_whole = " " not in text or f" {COMMAND} " in line or line.startswith("    ")
    if width is None or len(line) <= width or is_whole:
        return line
    return textwrap.fill(
        line, max(width, 2 * INDENT), subsequent_indent=" " * (INDENT if in_block else 2),
        break_long_words=False, break_on_hyphens=False, replace_whitespace=False,
    )  # fmt: skip


def print_encodable(text: str, file: IO[str] | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print a text that `make_printable` returned. Characters that the encoding of the file lacks are replaced."""
    out = file or sys.stdout
    print(make_encodable(text, getattr(out, "encoding", None) or "utf-8"), file=out, end=end, flush=flush)


def table_width(otherwise: int = sys.maxsize) -> int:
    """Return the width of the terminal that standard output goes to; `otherwise` if it goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else otherwise


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return a table as text that fits `width` characters (default: the terminal). Columns without a text are left out.

    If the aligned rows do not fit, rows and columns are swapped. If that does not fit either, each row becomes a
    paragraph.
    """
    width = table_width() if width is None else width
    columns = [number for number in range(len(head)) if not rows or any(row[number] for row in rows)]
    lines = [[row[number] for number in columns] for row in (head, *rows)]
    for table in (lines, list(zip(*lines, strict=True))):
        text = align_columns(table)
        if max(map(len, text.split("\n"))) <= width:
            return text
    return "\n".join(format_row(lines[0], line, width) for line in lines[1:])


def align_columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def format_row(head: Sequence[str], row: Sequence[str], width: int) -> str:
    """Return a row of a table as its first cell, and below it the other cells as `name: text`."""
    lines = textwrap.wrap(row[0], width, subsequent_indent="  ", break_on_hyphens=False) or [""]
    room = 0  # left in the last line
    for name, cell in zip(head[1:], row[1:], strict=True):
        if cell in ("", "-"):
            continue
        text = f"{name}: {cell}" if name else cell
        if len(text) + 2 <= room:
            lines[-1] += f"  {text}"
        else:
            lines += textwrap.wrap(
                text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False,
            )  # fmt: skip
        room = width - len(lines[-1]) if not lines[-1].startswith("    ") else 0
    return "\n".join(lines)


def redraw_line(text: str = "") -> None:
    """Replace the last line of the terminal by a text."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(f"\r\033[K{make_printable(text, encoding)}", end="", flush=True)


def print_uncaught_error(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Print the traceback of an uncaught exception. This is a `sys.excepthook`."""
    import traceback

    say("".join(traceback.format_exception(error)), file=sys.stderr, end="")


def format_number(value: object) -> str:
    """Format a fraction with four significant digits, a whole number in groups of three digits, and other values as
    text.
    """
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        is_whole = value.is_integer() and abs(value) < 1e9
        return f"{int(value):,}" if is_whole else f"{value:.4g}"
    return str(value)


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Format metrics as `train/loss 0.21`, `val/loss 0.25`, `val/acc 0.921`. Losses come first."""
    names = sorted(metrics, key=lambda name: (0, name) if name.endswith("/loss") else (1, ""))
    return [f"{name} {format_number(metrics[name])}" for name in names]


def format_quantity(value: float) -> str:
    """Format a number with three digits and a letter: 950, 5.9k, 12.3M."""
    if not math.isfinite(value):
        return str(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Format seconds as 40 ms, 0.4 s, 12 s, 2:05 or 1:02:05."""
    if not math.isfinite(seconds):
        return "?"
    if 0 < seconds < 0.095:
        return f"{max(1000 * seconds, 1):.0f} ms"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    hours, minutes = divmod(rounded // 60, 60)
    return f"{hours}:{minutes:02}:{rounded % 60:02}" if hours else f"{minutes}:{rounded % 60:02}"


def find_throughput(row: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the throughput in a row or summary and its unit; None without one. Tokens are preferred to samples."""
    return next(((row[name], unit) for name, unit in SPEEDS.items() if row.get(name) is not None), None)


def format_short_list(names: Sequence[str], most: int = 5) -> str:
    """Return the first names of a list, as `a, b and 3 more`."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def choose_fitting_fields(widths: Sequence[int], ranks: Sequence[int], room: int, gap: int = 2) -> list[int]:
    """Return the numbers of the fields that fit side by side into `room` characters.

    Fields with the largest rank are left out first.
    """
    numbers = list(range(len(widths)))
    while len(numbers) > 1 and sum(widths[one] + gap for one in numbers) - gap > room:
        numbers.remove(max(numbers, key=lambda one: ranks[one]))
    return numbers


def format_clock_time(seconds: float) -> str:
    """Format seconds as 0:12, 2:05 or 1:02:05."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(number: int | None, thing: str) -> str:
    """Format a number with its noun: 1 epoch, 2,000 steps, an unknown number of samples."""
    if number is None:
        return f"an unknown number of {thing}s"
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def format_ordinal(number: int) -> str:
    """Format a number as 1st, 2nd, 3rd, 9th, 11th."""
    teen = number % 100 in (11, 12, 13)
    return f"{number:,}" + ("th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th"))


HIDDEN = "***"
# The last name of a setting whose text is a secret. Other secrets are given as ${oc.env:NAME}.
SECRET_NAME = re.compile(
    r"(.*_)?(passwords?|passwd|pwd|passphrase|secrets?|secret_(access_)?key|api_?keys?)|"
    r"((hf|api|auth|access|bearer)_?)?token|credentials?|authorization"
)
SETTING = re.compile(r"""([\w.\-\[\]]*\w)=('[^'\n]*'|"[^"\n]*"|\[[^\]\n]*\]|\{[^}\n]*\}|[^\s'"]\S*)""")
PAIR = re.compile(  # in a dict, as it is typed or as Python shows it
    r"""([{,]\s*(['"]?)([\w.\-]+)\2\s*:\s*)('[^'\n]*'|"[^"\n]*"|\[[^\]\n]*\]|[^\s,'"{}\[\]][^,{}\[\]\n]*)"""
)
PLAIN = ("null", "None", "true", "True", "false", "False", "''", '""')


def is_secret_name(key: str) -> bool:
    """Return whether the name of a setting suggests a secret: `token`, `x.api_key`, `db_password`; but not
    `num_token`.
    """
    names = [name for name in re.split(r"[.\[\]]+", key) if not re.fullmatch(r"-?\d*", name)]
    return bool(names) and SECRET_NAME.fullmatch(names[-1].lower().replace("-", "_")) is not None


def is_secret_value(key: str, value: Any) -> bool:
    """Return whether a value is a secret: a text of a setting with a secret-like name, and no environment reference."""
    is_text = isinstance(value, str) and value != ""
    return is_text and is_secret_name(key) and not value.lstrip("'\"").startswith("${oc.env:")


def is_secret_typed_value(key: str, value: str) -> bool:
    """Return whether a value as typed is a secret. `6` is a number and no secret; `'6'` is a text."""
    try:
        float(value)
    except ValueError:
        return value not in PLAIN and is_secret_value(key, value)
    return False


def mask_argument(word: str) -> str:
    """Return an argument of a command line with secrets masked."""
    key, equals, value = word.partition("=")
    return f"{key}={HIDDEN}" if equals and is_secret_typed_value(key, value) else mask_pairs(word)


def mask_arguments(words: Iterable[str]) -> list[str]:
    return [mask_argument(word) for word in words]


def mask_secrets(text: str) -> str:
    """Mask the secrets in a text that has the form `key=value` or `{key: value}`."""
    if "=" in text:
        text = SETTING.sub(
            lambda found: f"{found[1]}={HIDDEN}" if is_secret_typed_value(found[1], found[2]) else found[0],
            text,
        )
    return mask_pairs(text)


def mask_pairs(text: str) -> str:
    if ":" not in text:
        return text
    return PAIR.sub(
        lambda found: f"{found[1]}{HIDDEN}" if is_secret_typed_value(found[3], found[4]) else found[0],
        text,
    )
