"""`status.json`: the state of a run, for sweeps, scripts and people; and the run that a folder stands for."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from types import NoneType
from typing import Any

from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, read_json, read_overrides, resolve_folder, write_json
from trainrun.output import SPEEDS, format_number, format_path_to_paste, mask_secrets, say

SWEEP_FILE = "sweep.json"
BEST = "best"  # in it: the folder of the best job, empty before a job has a value
STATES = ("running", "done", "stopped", "pruned", "failed")
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("value", "best_step", *SPEEDS), (int, float, NoneType)),
    **dict.fromkeys(("step", "epoch", "seconds"), (int, float)), **dict.fromkeys(("reason", "message"), (str,)),
    "monitor": (str, NoneType), "overrides": (list,),
}  # fmt: skip


def read_status(run: RunDir) -> dict[str, Any]:
    """Return the fields of `status.json`; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        status = read_json(run.status)
        if isinstance(status, dict) and is_valid_status(status):
            return status
    return {}


def is_valid_status(status: dict[str, Any]) -> bool:
    """Return whether every value of a status is one that a run writes."""
    held = [(status[name], kinds) for name, kinds in KINDS.items() if name in status]
    return (
        status.get("state") in STATES
        and all(isinstance(value, kinds) and not isinstance(value, bool) for value, kinds in held)
        and all(isinstance(word, str) for word in status.get("overrides", []))
    )


def write_status(
    run: RunDir, run_name: str | None, state: str, exit_code: int | None, message: str, **facts: Any
) -> None:
    """Replace `status.json`. Values of the earlier status (best value, steps) stay unless they are given again."""
    earlier = read_status(run)
    status: dict[str, Any] = {
        "value": None, "monitor": None, "mode": None, "best_step": None, "step": 0, "epoch": 0.0,
        "seconds": 0.0, "samples_per_second": None, "tokens_per_second": None, "reason": "",
    }  # fmt: skip
    status |= {name: earlier[name] for name in status if name in earlier}
    status |= {
        "state": state, "exit_code": exit_code, "message": mask_secrets(message), "overrides": read_overrides(run),
        "run_name": run_name, "pid": os.getpid(), "time": time.time(),
    }  # fmt: skip
    write_json(run.status, status | facts)


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def find_named_run(word: str | Path) -> RunDir:
    """Return the run folder at a path. For a sweep, return its best run and print which one it is.

    The folder need not contain a run. Raise ConfigError for a sweep without a best run.
    """
    folder = resolve_folder(str(word))
    if not is_sweep(folder):
        return RunDir(folder)
    run, line = find_best_run(folder)
    say(line, file=sys.stderr)
    return run


def find_best_run(sweep: Path) -> tuple[RunDir, str]:
    """Return the best run of a sweep's folder, and a line that names it. Raise ConfigError if there is none."""
    try:
        name = str(read_json(sweep / SWEEP_FILE)[BEST])
    except (OSError, ValueError, LookupError, TypeError):
        name = ""
    run = RunDir(sweep / name)
    if not name or Path(name).name != name or not run.config.is_file():
        raise ConfigError(
            f"{sweep}: no job of this sweep is known to be the best; name the folder of a job, or go on with it: "
            f"trainrun resume {format_path_to_paste(sweep)}"
        )
    status = read_status(run)
    value = status.get("value")
    result = "" if value is None else f" ({status.get('monitor')} {format_number(value)})"
    return run, f"best run of the sweep {sweep.name}: {name}{result}"
