"""What `autotune` and `diagnose` have in common: arguments, the folder of the results, and a line of progress."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError
from trainrun.formatting import duration
from trainrun.output import redraw, say
from trainrun.runs.run_folder import named_folder


def begin(command: str, argv: list[str]) -> tuple[list[str], Path]:
    """Return the overrides of a run, and the folder for the results, which is made when something is written.

    Raises ConfigError, also if a run is in that folder.
    """
    composition = compose_run(argv)
    for note in composition.notes:
        say(f"note: {note}", file=sys.stderr)
    from trainrun.benchmark.run_overrides import (
        plain_overrides,  # imports torch: mistakes are answered before
    )

    if (own := composition.own.get("hydra.run.dir")) is not None:
        folder = named_folder(own)
    else:
        name = f"{datetime.now():%H-%M-%S}-{command}-{composition.config.run_name or 'run'}-{secrets.token_hex(2)}"
        folder = Path("outputs").absolute() / f"{datetime.now():%Y-%m-%d}" / name
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"output_dir={folder}: holds a run already; name another folder")
    return plain_overrides(argv), folder


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str, float], None]]:
    """Rewrite one line of a terminal with what is measured now and the seconds left; nothing elsewhere."""
    terminal = sys.stdout.isatty()
    try:
        yield (
            lambda about, left: redraw(f"  {about} ... {duration(max(left, 0.0))} left") if terminal else None
        )
    finally:
        if terminal:
            redraw()


def shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
