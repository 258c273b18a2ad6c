"""`status.json`: how a run stands, and how it ended. The truth for sweeps, scripts and people."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from types import NoneType
from typing import Any, NoReturn

from trainrun.config.schema import RunConfig
from trainrun.output import masked, plain
from trainrun.runs.run_folder import RunDir, is_there, read_json, write_json
from trainrun.runtime.signals import stop_deadline

STATES = ("running", "done", "stopped", "failed")
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("value", "best_step", "samples_per_second", "tokens_per_second", "pixels_per_second"),
                    (int, float, NoneType)),
    **dict.fromkeys(("step", "epoch", "seconds"), (int, float)), **dict.fromkeys(("reason", "message"), (str,)),
    "monitor": (str, NoneType), "overrides": (list,),
}  # fmt: skip


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
        if isinstance(status, dict) and is_sound(status):
            return status
    return {}


def is_sound(status: dict[str, Any]) -> bool:
    """Whether it holds only what a run writes."""
    held = [(status[name], kinds) for name, kinds in KINDS.items() if name in status]
    return (
        status.get("state") in STATES
        and all(isinstance(value, kinds) and not isinstance(value, bool) for value, kinds in held)
        and all(isinstance(word, str) for word in status.get("overrides", []))
    )


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
