"""Which run a word names: a run by its folder, or a sweep, which stands for its best run."""

from __future__ import annotations

import sys
from pathlib import Path

from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, named_folder, read_json
from trainrun.folder.status import read_status
from trainrun.output import figure, path_to_paste, say

SWEEP_FILE = "sweep.json"
BEST = "best"  # in it: the folder of the best job, empty before a job has a value


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def named_run(word: str | Path) -> RunDir:
    """Return the run of a folder, which may hold none; of a sweep's folder its best run, with a line that says which.

    Raise ConfigError for a sweep without a best run.
    """
    folder = named_folder(str(word))
    if not is_sweep(folder):
        return RunDir(folder)
    run, line = best_run(folder)
    say(line, file=sys.stderr)
    return run


def best_run(sweep: Path) -> tuple[RunDir, str]:
    """Return the best run of a sweep's folder, and a line that says which. Raise ConfigError if there is none."""
    try:
        name = str(read_json(sweep / SWEEP_FILE)[BEST])
    except (OSError, ValueError, LookupError, TypeError):
        name = ""
    run = RunDir(sweep / name)
    if not name or Path(name).name != name or not run.config.is_file():
        raise ConfigError(
            f"{sweep}: no job of this sweep is known to be the best; name the folder of a job, or go on with it: "
            f"trainrun resume {path_to_paste(sweep)}"
        )
    status = read_status(run)
    value = status.get("value")
    result = "" if value is None else f" ({status.get('monitor')} {figure(value)})"
    return run, f"best run of the sweep {sweep.name}: {name}{result}"
