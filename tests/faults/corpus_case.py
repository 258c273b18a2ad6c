"""What the corpora have in common: a case is a name, a way to make it, and what must be said of it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainrun.cli.main import main

QUIET = (
    "monitor.progress_bar=false", "monitor.hardware=false", "monitor.plots=false",
    "trainer.num_threads=1", "checkpoint.async_save=false",
)  # fmt: skip
SMALL = (*QUIET, "model.hidden=[8]", "checkpoint.every_n_train_steps=2", "checkpoint.keep_last=3")
BASE = "base"


class Case(NamedTuple):
    """build: makes the case in an empty folder; expect: what `check` of its corpus compares with."""

    name: str
    build: Callable[[Path], Any]
    expect: Any


class Said(NamedTuple):
    """The end of a command: exit code, all that was printed, seconds of this process's processor."""

    code: int
    text: str
    seconds: float


def call(words: list[str]) -> Said:
    """The command in this process. What escapes it, a traceback for a user, escapes here."""
    began, out = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words)
    return Said(code, out.getvalue(), time.process_time() - began)


@contextlib.contextmanager
def room(place: Path, name: str) -> Iterator[Path]:
    """An empty folder for one case, gone afterwards."""
    folder = place / ("case-" + name.replace("/", "_"))
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def train_base(place: Path) -> None:
    """A run of six steps with checkpoints at 2, 4 and 6, in `place`/base."""
    before = os.getcwd()
    os.chdir(place)
    try:
        said = call([*SMALL, "trainer.max_steps=6", f"output_dir={place / BASE}"])
    finally:
        os.chdir(before)
    assert said.code == 0, said.text
