"""`status.json`: how a run stands, and how it ended. The truth for sweeps, scripts and people."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import shlex
import signal
import time
import traceback
from collections.abc import Iterator
from types import NoneType
from typing import Any, NoReturn

from trainrun.config.schema import RunConfig
from trainrun.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    FULL,
    OF_NAMES,
    SaveError,
    TrainingError,
    TrainrunError,
    of_the_system,
)
from trainrun.output import masked, plain
from trainrun.runs.run_folder import RunDir, check_there, is_there, read_json, write_json, write_text
from trainrun.runtime.signals import StopFlag, stop_deadline

STATES = ("running", "done", "stopped", "failed")


@contextlib.contextmanager
def run_status(run: RunDir, config: RunConfig, resumes: bool, flag: StopFlag) -> Iterator[None]:
    """`status.json` says running; whatever ends the run by an exception is in it before that goes on.

    A resume that is refused changes nothing: the run is what it was before. What libraries raise because
    an interrupt came at a bad moment for them (in the middle of an import, say) is still an interrupt.
    """
    earlier = run.status.read_text(encoding="utf-8") if read_status(run) else None
    try:
        write_status(run, config, state="running", exit_code=None, message="")
        yield
    except BaseException as error:
        flag.quiet_until = math.inf  # from here on no interrupt stops what is written down
        if flag.raised or isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(_note_interrupt(run, config, earlier)) from error
        if not isinstance(error, Exception):
            raise
        refused = isinstance(error, TrainrunError) and error.exit_code == EXIT_USAGE
        if refused and resumes and earlier is not None:
            write_text(run.status, earlier)
            raise
        fault = _told(run, error)
        try:
            _note_failure(run, config, fault)
        except OSError:  # no room for a second status next to the first
            with contextlib.suppress(OSError):
                run.status.unlink()
                _note_failure(run, config, fault)
        if fault is error:
            raise
        raise fault from error


def _told(run: RunDir, error: Exception) -> Exception:
    """What to do about a disk that is full, or a place that cannot be used; other errors as they are."""
    if isinstance(error, OSError | SaveError):
        try:
            check_there(run)
        except SaveError as gone:
            return gone
    if isinstance(error, TrainrunError):
        return error
    if not isinstance(error, OSError) or error.errno not in FULL:
        text = of_the_system(error)
        kind = TrainrunError if isinstance(error, OSError) and error.errno in OF_NAMES else TrainingError
        return kind(f"{text}; where that is mended: trainrun resume {run.root}") if text else error
    place = error.filename or run.root
    again = f"trainrun resume {shlex.quote(str(run.root))}"
    return SaveError(f"{place}: {error.strerror}; {FULL[error.errno]}, then: {again}")


def _note_failure(run: RunDir, config: RunConfig, error: Exception) -> None:
    """A fault with its message; of anything else the traceback too, in the log."""
    if not is_there(run):
        return
    if isinstance(error, TrainrunError):
        state = "stopped" if error.exit_code > 128 else "failed"  # 128 + n: signal n was the reason
        write_status(run, config, state=state, exit_code=error.exit_code, message=str(error))
        return
    text = f"{type(error).__name__}: {error}"
    write_status(run, config, state="failed", exit_code=EXIT_FAILED, message=text)
    with run.log.open("a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)


def _note_interrupt(run: RunDir, config: RunConfig, earlier: str | None) -> str:
    """Says what is lost. The status of a run that had ended stays; so does one whose resume had not begun."""
    state = read_status(run).get("state")
    if state not in (None, "running"):
        return "interrupted; the run itself had ended"
    if earlier is not None and run.config_before.exists() and '"state": "running"' not in earlier:
        write_text(run.status, earlier)
        return "interrupted before it went on; the run is as it was"
    saved = any(run.checkpoints.glob("step-*"))
    message = "interrupted; " + (
        "what came after the last checkpoint is not saved" if saved else "nothing was saved yet"
    )
    write_status(run, config, state="stopped", exit_code=EXIT_INTERRUPTED, message=message)
    return message


def deadline(run: RunDir, config: RunConfig) -> contextlib.AbstractContextManager[None]:
    """Inside, a stop that takes too long, or is asked for twice, ends the process."""
    return stop_deadline(
        config.trainer.stop_grace_seconds, lambda number, twice: give_up(run, config, number, twice)
    )


def give_up(run: RunDir, config: RunConfig, number: int, twice: bool) -> None:
    """A stop that took too long, or was asked for twice: the process ends here, with what is committed."""
    seconds = config.trainer.stop_grace_seconds
    what = (
        "came twice" if twice else f"was not followed by a save within trainer.stop_grace_seconds={seconds:g}"
    )
    saved = any(run.checkpoints.glob("step-*"))
    left = "the last checkpoint stands" if saved else "nothing was saved yet"
    leave_now(run, config, "stopped", 128 + number, f"{signal.Signals(number).name} {what}; {left}")


def leave_now(run: RunDir, config: RunConfig, state: str, exit_code: int, message: str) -> NoReturn:
    """End this process from any thread, whatever the others do; how an ended run stands is not touched."""
    with contextlib.suppress(OSError):
        if is_there(run) and read_status(run).get("state") in (None, "running"):
            write_status(run, config, state=state, exit_code=exit_code, message=message)
        os.write(2, f"\ntrainrun: {plain(message)}\n".encode())
    end_process(exit_code)


def end_process(exit_code: int) -> NoReturn:
    """At once, with the loader workers."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)


def read_status(run: RunDir) -> dict[str, Any]:
    """The fields of `status.json`; empty if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        status = read_json(run.status)
        if isinstance(status, dict) and "state" in status and not wrong_fields(status):
            return status
    return {}


def wrong_fields(status: dict[str, Any]) -> list[str]:
    """The names of values that no run writes."""
    number: tuple[type, ...] = (int, float)
    kinds: dict[str, tuple[type, ...]] = dict.fromkeys(
        ("value", "best_step", "samples_per_second", "tokens_per_second", "pixels_per_second"),
        (*number, NoneType),
    )
    kinds |= dict.fromkeys(("step", "epoch", "seconds"), number)
    kinds |= dict.fromkeys(("reason", "message"), (str,)) | {"monitor": (str, NoneType), "overrides": (list,)}
    wrong = [name for name, kind in kinds.items() if name in status and not _is_a(status[name], kind)]
    wrong += [] if status.get("state") in STATES else ["state"]
    words = status.get("overrides")
    return wrong + (
        ["overrides"] if isinstance(words, list) and not all(isinstance(w, str) for w in words) else []
    )


def _is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def write_status(
    run: RunDir, config: RunConfig, state: str, exit_code: int | None, message: str, **facts: Any
) -> None:
    """Replace `status.json`; what an earlier status knew (best value, steps) is kept until it is given again."""
    earlier = read_status(run)
    overrides: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        overrides = run.overrides.read_text(encoding="utf-8").splitlines()
    status: dict[str, Any] = {
        "value": None, "monitor": None, "mode": None, "best_step": None, "step": 0, "epoch": 0.0,
        "seconds": 0.0, "samples_per_second": None, "tokens_per_second": None, "reason": "",
    }  # fmt: skip
    status |= {name: earlier[name] for name in status if name in earlier}
    status |= {
        "state": state, "exit_code": exit_code, "message": masked(message), "overrides": overrides,
        "run_name": config.run_name, "pid": os.getpid(), "time": time.time(),
    }  # fmt: skip
    write_json(run.status, status | facts)
