"""What `tune`, `ladder` and `diagnose` have in common around their measurements: words, a folder, a clean end."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from trainrun.errors import ConfigError
from trainrun.monitor.readable import duration
from trainrun.output import redraw, say
from trainrun.rundir import named_folder
from trainrun.words.compose import compose_run


def begun(command: str, words: list[str]) -> tuple[list[str], Path]:
    """The plain words of a run, and the folder for what is found about it. Raises ConfigError of the words, and where
    a run is in that folder."""
    composition = compose_run(words)
    for note in composition.notes:
        say(f"note: {note}", file=sys.stderr)
    folder = new_folder(command, composition.config.run_name or "run", composition.own.get("hydra.run.dir"))
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"output_dir={folder}: holds a run already; name another folder")
    from trainrun.lab.choices import plain_words  # brings torch: a mistake in the words is answered before

    return [word for word in plain_words(words) if not word.startswith("hydra.run.dir=")], folder


def new_folder(command: str, run_name: str, own: str | None) -> Path:
    """Next to the folders of runs; own: of `output_dir=`, which names another. It is made when something is written."""
    if own is not None:
        return named_folder(own)
    now = datetime.now()
    name = f"{now:%H-%M-%S}-{command}-{run_name}-{secrets.token_hex(2)}"
    return Path("outputs").absolute() / f"{now:%Y-%m-%d}" / name


def forget(file: Path) -> None:
    """Take away what an interrupted command began, with the three folders above it as far as they are empty then."""
    file.unlink(missing_ok=True)
    for above in list(file.parents)[:3]:
        try:
            above.rmdir()
        except OSError:  # not empty, or not there
            return


def progress() -> Callable[[str, float], None]:
    """A line on a terminal, rewritten; nothing elsewhere."""
    terminal = sys.stdout.isatty()

    def tell(about: str, left: float) -> None:
        if terminal:
            redraw(f"  {about} ... {duration(left)} left")

    return tell


def end_progress() -> None:
    """Take the line away again."""
    if sys.stdout.isatty():
        redraw()


def shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
