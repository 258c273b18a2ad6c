"""A run whose ranks torchrun (or Slurm) started: rank 0 decides, the others are told.

Only rank 0 composes, so there is one run folder and one config; it hands both to the others through
the store that they meet in anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import time
from pathlib import Path

from trainrun.config.saved_config import load_config
from trainrun.config.schema import RunConfig, record_reads
from trainrun.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from trainrun.folder.run_folder import LaunchSpec, RunDir, read_json
from trainrun.folder.status import write_status
from trainrun.interfaces import Parallel
from trainrun.output import say
from trainrun.parallel.group import contact
from trainrun.parallel.handshake import Meeting, folder_before, follow, lead
from trainrun.parallel.rank_place import LostContact
from trainrun.parallel.worker import run_as_rank
from trainrun.runs.failures import deadline
from trainrun.runs.rank import train_rank
from trainrun.runtime.signals import StopFlag
from trainrun.timing.phases import PhaseTimer, process_start

FOLDER_SECONDS = 20.0  # for a network's folder to show what rank 0 wrote
POLL_SECONDS = 0.1
DISMISS_SECONDS = 60.0  # for the other ranks to come


def lead_run(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """Rank 0, after it has composed. Returns the exit code of this rank."""
    parallel, number = config.parallel, int(os.environ["WORLD_SIZE"])
    fault = ""
    if parallel.mode != "ddp":
        fault = f"parallel={parallel.mode}: this was started as several ranks; use parallel=ddp"
    elif parallel.devices != "auto" and str(parallel.devices) != str(number):
        fault = (
            f"parallel.devices={parallel.devices}: {number} rank(s) were started by torchrun or Slurm, which decide "
            "how many there are; start so many, or leave parallel.devices out"
        )
    if fault:
        dismiss(EXIT_USAGE)
        raise ConfigError(fault)
    job = {"resume": order.resume, "paths": order.paths, "typed": order.typed}
    meeting = lead({"folder": str(run.root), "config": _digest(run), **job})
    if faults := meeting.hear_all():
        raise ConfigError(faults[0])
    return _work(run, config, order, meeting)


def dismiss(code: int = EXIT_DONE) -> None:
    """Rank 0, if the run has come to its end before, or cannot begin; the others end as it does.

    They would wait for it for half an hour: Slurm, unlike torchrun, lets the others go on when a rank ends.
    """
    with contextlib.suppress(LostContact):
        lead({"folder": None, "code": code}, DISMISS_SECONDS).hear_all()


def follow_run() -> int:
    """Every other rank: no Hydra, no words of its own."""
    meeting = follow()
    payload = meeting.payload
    if payload["folder"] is None:
        with contact():
            meeting.say_heard()
        return int(payload["code"])
    sys.path += [path for path in payload["paths"] if path not in sys.path]
    run = RunDir(Path(payload["folder"]))
    fault = "" if _is_shared(run, payload["config"]) else (
        f"output_dir={run.root}: rank {os.environ['RANK']} on {socket.gethostname()} does not find the run folder of "
        "rank 0 there; ranks on several machines need a folder that all of them share"
    )  # fmt: skip
    with contact():
        meeting.say_heard(fault)
    if fault:
        raise ConfigError(fault)
    order = LaunchSpec(payload["resume"], payload["paths"], typed=tuple(payload["typed"]))
    return _work(run, load_config(run.config, []), order, meeting)


def _digest(run: RunDir) -> str:
    return hashlib.sha256(run.config.read_bytes()).hexdigest()


def _is_shared(run: RunDir, digest: str) -> bool:
    """Return whether this rank reads rank 0's config. A network folder may show it late; a local one an old run's."""
    until = time.monotonic() + FOLDER_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if _digest(run) == digest:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)


def earlier_folder() -> str | None:
    """The run folder of this same job before torchrun restarted its ranks; None at its first start."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    folder = folder_before()
    if folder is None:
        say(
            "note: torchrun restarted the ranks, and no folder of their run is known: a new run begins (with "
            "output_dir=... a restart goes on)", file=sys.stderr,
        )  # fmt: skip
    return folder


def _work(run: RunDir, config: RunConfig, order: LaunchSpec, meeting: Meeting) -> int:
    rank = int(os.environ["RANK"])
    record_reads()

    def work(parallel: Parallel, flag: StopFlag) -> int:
        meeting.end()  # all ranks are here: nobody asks rank 0 any more
        return train_rank(run, config, order, parallel, flag, PhaseTimer(process_start()))

    run.rank_error(rank).unlink(missing_ok=True)

    code = run_as_rank(run, config.parallel, work, store=meeting.store, deadline=deadline(run, config))
    if code != EXIT_DONE and run.rank_error(rank).exists():
        rank_error = read_json(run.rank_error(rank))
        text = rank_error["traceback"] if rank_error["kind"] == "bug" else rank_error["message"]
        say(f"trainrun: rank {rank}: {text}", file=sys.stderr)
        if rank == 0:
            write_status(run, config.run_name, state="failed", exit_code=code, message=rank_error["message"])
    return code
