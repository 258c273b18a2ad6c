"""A job and its result, read from `status.json`, or from the exit code if the job wrote none."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from trainrun.folder.run_folder import RunDir, has_ever_saved, write_json
from trainrun.folder.status import read_status
from trainrun.output import mask_arguments
from trainrun.task.metrics.directions import guess_direction

LONG_NUMBER = re.compile(r"(?<![\w.])\d+\.\d{6,}(e[-+]?\d+)?(?![\w.])")
OUTPUT = "run.out"  # what a job prints
NOTE = "note: "  # begins a line that is not why a job failed
STOPS = (EXIT_AGAIN, EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class Result:
    """The result of a job.

    state: done, stopped, pruned, failed or "not run". value: the best value of `monitor`. mode: min or max.
    seconds: the time of all attempts, from the start of the process to its end. values: one for each name of
        sweep.objective. The first one is `value`.
    """

    state: str = "not run"
    value: float | None = None
    monitor: str = ""
    mode: str = ""
    seconds: float | None = None
    error: str = ""
    values: dict[str, float] = field(default_factory=dict)

    @property
    def scores(self) -> list[float]:
        """The values of all objectives, each better when smaller."""
        if self.values:
            return [objective_sign(name) * value for name, value in self.values.items()]
        return [] if self.value is None else [self.sign * self.value]

    @property
    def sign(self) -> int:
        """-1 where a larger value is better, so that the smallest product is the best."""
        return -1 if self.mode == "max" else 1


@dataclass(frozen=True)
class Job:
    """One run of a sweep. words: its overrides on the command line. folder: its name inside the folder of the
    sweep.

    revived: whether it was pruned and continues by sweep.revive. session: the session of the sweep that set the
        result.
    """

    num: int
    words: tuple[str, ...]
    folder: str
    result: Result = field(default_factory=Result)
    revived: bool = False
    session: int = 0

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the job by key, without marks of Hydra's grammar."""
        pairs = [word.lstrip("+").partition("=") for word in self.words if not word.startswith("-")]
        return {key: value.strip("\"'") for key, _, value in pairs}

    def label(self, keys: list[str]) -> str:
        """Return the settings whose values vary between jobs; all settings if none varies."""
        settings = self.settings
        shown = [f"{key}={format_short_numbers(settings[key])}" for key in keys if key in settings]
        return " ".join(shown or map(format_short_numbers, mask_arguments(self.words)))


def format_short_numbers(text: str) -> str:
    """Shorten the numbers in a text to six digits; points of a search have sixteen."""
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.6g}", text)


def has_checkpoint(folder: Path) -> bool:
    """Return whether the job saved a checkpoint. A damaged one counts: the job reports it and does not start again."""
    return has_ever_saved(RunDir(folder))


def read_result(folder: Path, exit_code: int = EXIT_DONE, earlier: dict[str, Any] | None = None) -> Result:
    """Return the result of a job. earlier: its status before this attempt; an unchanged status is ignored."""
    status = read_status(RunDir(folder))
    fresh = {} if status == earlier else status
    said = fresh.get("state")
    error = ""
    if exit_code == EXIT_DONE and said == "done":
        state = "done"
    elif exit_code in STOPS or said == "stopped":  # the second: 128 + a signal, where saving took too long
        state, error = "stopped", str(fresh.get("message") or "")
    else:
        state, error = "failed", describe_failure(folder, fresh, exit_code)
    monitor, mode = (str(status.get(name) or "") for name in ("monitor", "mode"))
    value, seconds = (replace_nonfinite(status.get(name)) for name in ("value", "seconds"))
    return Result(state, value, monitor, mode, seconds, " ".join(error.split()))


def mark_pruned_job(folder: Path) -> None:
    """Write the state `pruned` into the status of a stopped job."""
    run = RunDir(folder)
    status = read_status(run)
    if status.get("state") in ("stopped", "running"):
        write_json(run.status, status | {"state": "pruned"})


def apply_objective(result: Result, folder: Path, objective: Sequence[str]) -> Result:
    """Return a result with the values of sweep.objective. A finished job that lacks one of them has failed.

    Metrics of the validation are taken from the best checkpoint. Other names are fields of `status.json`.
    """
    if not objective or result.state != "done":
        return result
    status = read_status(RunDir(folder))
    rows = [
        row for row in EvaluationRows(folder).read_new_rows() if row.get("step") == status.get("best_step")
    ]
    reported = {**status, **(rows[-1] if rows else status.get("metrics") or {}), "seconds": result.seconds}
    values = {name: replace_nonfinite(reported.get(name.removeprefix("-"))) for name in objective}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        names = sorted(name for name in reported if "/" in name)
        error = (
            f"sweep.objective={missing[0]}: is not reported; the job reports {', '.join(names)} and seconds"
        )
        return replace(result, state="failed", value=None, error=error)
    first = objective[0]
    mode = "min" if objective_sign(first) > 0 else "max"
    numbers = {name: value for name, value in values.items() if value is not None}
    return replace(result, value=values[first], monitor=first.removeprefix("-"), mode=mode, values=numbers)


def objective_sign(name: str) -> int:
    """Return 1 if smaller values of an objective are better (`-seconds`, `val/loss`), else -1."""
    return 1 if name.startswith("-") or guess_direction(name) == "min" else -1


class EvaluationRows:
    """A reader of the validations of a running job."""

    def __init__(self, folder: Path) -> None:
        self._path = RunDir(folder).metrics
        self._offset = 0
        self.start: dict[str, Any] = {}  # the row with which its last session began

    def read_new_rows(self) -> list[dict[str, Any]]:
        """Return the new `eval` rows since the last call; all rows again if a resume has shortened the file."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
        self._offset += sum(map(len, lines))
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError):  # a damaged line
                row = json.loads(line) if b'"eval"' in line or b'"start"' in line else {}
                if row.get("kind") == "start":
                    self.start = row
                elif row.get("kind") == "eval":
                    rows.append(row)
        return rows


def describe_failure(folder: Path, status: dict[str, Any], exit_code: int) -> str:
    """Return one line with the reason of a failure: the job's message, the signal that killed it, or the last line
    that it printed and that is neither a note nor indented, as the first lines of a run are.
    """
    if status.get("state") == "failed" and status.get("message"):
        return str(status["message"])
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-exit_code).name}"
        return f"killed by signal {-exit_code}"
    lines: list[str] = []
    with contextlib.suppress(OSError):
        text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
        lines = [
            line.strip() for line in text.splitlines() if line.strip() and not line.startswith((NOTE, " "))
        ]
    faults = [line.removeprefix("trainrun: ") for line in lines if line.startswith("trainrun: ")]
    if faults:
        return "; ".join(faults)
    is_error = (
        exit_code == EXIT_FAILED
    )  # other codes are of sys.exit() in code of the user, which prints nothing
    return lines[-1] if lines and is_error else f"ended with exit code {exit_code} and no result"


def replace_nonfinite(value: Any) -> float | None:
    """Return a finite number as a float; None for any other value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def parse_number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return replace_nonfinite(float(text))
    return None
