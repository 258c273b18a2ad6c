"""Texts for people, compared with the approved ones in `tests/messages.txt`.

A test asserts on the class of an error and on the key of the setting. How the text reads is approved in one file:

    with refused(ConfigError, "trainer.max_steps"):
        compose_run(["trainer.max_steps=-1"])

`python scripts/messages.py` writes the texts of the present code into the file; its diff is what to review.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("messages.txt")
ROOT = Path(__file__).parents[1]
REWRITE = "TRAINRUN_REWRITE_MESSAGES"  # the file that scripts/messages.py writes
HEAD = """\
# Every text for people that a test has seen: messages, help, lines of the screen. Written by
# `python scripts/messages.py [tests/...]`; read its diff, and commit it with the change of the words.
"""
_counts: Counter[str] = Counter()  # texts that a test has approved so far
_texts: dict[str, str] = {}
temporary: list[str] = []  # the folder below which tests have theirs


def read_texts(path: Path = FILE) -> dict[str, str]:
    """Return the approved text of each test. Its name is the id of the test, and a number from the second text on."""
    if not path.exists():
        return {}
    sections = re.split(r"^== (.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        name: "".join(f"{line[2:]}\n" for line in body.splitlines() if line[:2] in ("| ", "|"))
        for name, body in zip(sections[::2], sections[1::2], strict=True)
    }


def write_texts(texts: dict[str, str], path: Path = FILE) -> None:
    sections = [
        f"\n== {name}\n" + "".join(f"| {line}".rstrip() + "\n" for line in text.splitlines())
        for name, text in sorted(texts.items())
    ]
    path.write_text(HEAD + "".join(sections), encoding="utf-8")


# What differs from run to run and from machine to machine.
VARYING = {
    r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[\w-]+-[0-9a-f]{8}": "RUN",
    r"[\d,]+ are free": "# are free",
    r"process \d+ on \S+": "process # on HOST",
    r"process \d+(?=: SIG)": "process #",
    r"[\d.]+ of [\d.]+ GB of memory are free now, this process holds [\d.]+ GB": "# GB of memory are free",
    r"[\d.]+[GT]B of memory are free; use data.cache=pool:\d+MB": "# of memory are free; use data.cache=pool:#",
    r"(?<=samples in progress: )\d[\d, ]*": "#",
    r"rank \d+ failed": "rank # failed",
    r"\b(?=\d*[a-f])[0-9a-f]{12,64}\b": "HASH",
    r"torch \d+\.\d+\.\d+[\w+.]*": "torch VERSION",
    r"\d+\.\d+(?= per item| for their two halves)": "#",  # computed from random numbers
    r"KL [\d.e-]+ nats": "KL # nats",
    r"[\d.]+ %(?= of the reconstruction)": "# %",
    r"[^\s()]*/(?:site-packages|python3\.\d+)/(\S+) line \d+": r"\1",
    r"(\.py) line \d+": r"\1 line #",
}


def masked(text: str) -> str:
    """Return the text without the folders of this test, of this checkout and of Python, and what else varies."""
    folders = {str(Path.cwd()): ".", str(ROOT): "TRAINRUN", sys.prefix: "PYTHON"}
    for folder, name in folders.items():
        text = text.replace(folder, name) if len(folder) > 1 else text
    for folder in temporary:
        text = re.sub(rf"{re.escape(folder)}(?:/[\w.-]+)?", "TEMPORARY", text)
    for pattern, name in VARYING.items():
        text = re.sub(pattern, name, text)
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def approve(text: str, *keys: str) -> None:
    """Compare a text, which names each key, with the approved one. A test may approve several texts, in its order."""
    __tracebackhide__ = True
    assert [key for key in keys if key not in text] == [], text
    test = re.sub(r" \((?:call|setup|teardown)\)$", "", os.environ["PYTEST_CURRENT_TEST"])
    _counts[test] += 1
    name = test if _counts[test] == 1 else f"{test} {_counts[test]}"
    text = masked(text)
    if new_file := os.environ.get(REWRITE):
        add_text(name, text, Path(new_file))
        return
    if not _texts:
        _texts.update(read_texts())
    if text != _texts.get(name):
        pytest.fail(
            f"not the approved text of {name}:\n{text}"
            f"approved in tests/messages.txt:\n{_texts.get(name, 'nothing')}\n"
            f"If the new words are meant: python scripts/messages.py {test.partition('::')[0]}"
        )


def approve_error(text: str, *keys: str) -> None:
    """Approve the message that a command ended with; of what it printed before, nothing counts."""
    __tracebackhide__ = True
    start = text.rfind("\ntrainrun: ") + 1
    approve(text[start:], *keys)


def add_text(name: str, text: str, path: Path) -> None:
    """Put one text into the file; other processes may do the same."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_texts(read_texts(path) | {name: text}, path)


@contextmanager
def refused(
    kind: type[BaseException] | tuple[type[BaseException], ...], *keys: str
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises `kind`; its message names each key, and is the approved one."""
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    approve(f"{type(caught.value).__name__}: {caught.value}", *keys)
