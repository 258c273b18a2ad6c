"""A run whose ranks were started by torchrun or Slurm. Rank 0 decides and informs the others.

Only rank 0 composes the config, so there is one run folder and one config. It sends both to the other ranks through
the store in which they meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.config.saved_config import load_config
from trainrun.config.schema import ParallelConfig, RunConfig
from trainrun.errors import EXIT_DONE, EXIT_USAGE, ConfigError, LostContact
from trainrun.folder.run_folder import LaunchSpec, RunDir
from trainrun.folder.status import write_status
from trainrun.output import say
from trainrun.parallel.devices import describe_local_ranks_fault
from trainrun.parallel.handshake import (
    ANSWER_SECONDS,
    Meeting,
    has_agent_store,
    read_previous_folder,
    receive_config,
    release_rank_zero,
    send_config,
    wait_for_other_ranks,
)
from trainrun.parallel.rank_place import Failure, explain_failures, read_failure
from trainrun.runs.joined_rank import run_joined_rank
from trainrun.runtime.signals import exit_at_stops

POLL_SECONDS = 0.1
FAILURE_SECONDS = 5.0  # for the ranks to send their failures, and for rank 0 to print one
PRINTED = "printed"  # the key in the store that says that a rank has printed


def print_failure_once(own: Failure, store: Store) -> str:
    """Print one message for all ranks that failed, and return it. Called on each rank that failed.

    Rank 0 prints the failure that came first. Another rank prints its own failure if rank 0 prints none in time:
    rank 0 still trains, has ended, or the network is cut. A thread calls the store, because a call waits forever if
    the network is cut.
    """
    failures, is_printed = [own], threading.Event()
    exchange = collect_failures if own.rank == 0 else send_failure
    thread = threading.Thread(
        target=exchange, args=(failures, store, is_printed), name="trainrun failure", daemon=True
    )
    thread.start()
    thread.join(FAILURE_SECONDS + ANSWER_SECONDS)
    first, line = explain_failures(failures, int(os.environ["WORLD_SIZE"]))
    if not is_printed.is_set():
        text = f"rank {first.rank}: {first.traceback}" if first.kind == "bug" else line
        say(f"trainrun: {text}", file=sys.stderr)
    if own.rank == 0 and not has_agent_store():
        wait_for_other_ranks(store, FAILURE_SECONDS)
    return line


def collect_failures(failures: list[Failure], store: Store, is_printed: threading.Event) -> None:
    """Add the failures of the other ranks to that of rank 0. If it only lost contact, wait for one with the cause."""
    until = time.monotonic() + FAILURE_SECONDS
    keys = [f"failure/{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))]
    with contextlib.suppress(RuntimeError):  # the agent of torchrun has ended
        while True:
            others = [json.loads(store.get(key)) for key in keys if store.check([key])]
            failures[1:] = [Failure(**values) for values in others]
            if any(failure.kind != "echo" for failure in failures) or time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
        if store.check([PRINTED]):
            is_printed.set()
        store.set(PRINTED, "")


def send_failure(failures: list[Failure], store: Store, is_printed: threading.Event) -> None:
    """Send the failure of this rank to rank 0, and wait until rank 0 has printed one."""
    (failure,) = failures
    with contextlib.suppress(RuntimeError):  # rank 0 hosts the store, and has ended
        store.set(f"failure/{failure.rank}", json.dumps(asdict(failure)))
        try:
            store.wait([PRINTED], timedelta(seconds=FAILURE_SECONDS))
        except RuntimeError:  # rank 0 still trains
            store.set(PRINTED, "")
            return
        is_printed.set()
        release_rank_zero(store)


FOLDER_SECONDS = 20.0  # for a network's folder to show what rank 0 wrote
POLL_SECONDS = 0.1
MEETING = "parallel.meeting_seconds="


def train_as_rank_zero(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """Send folder and config to the other ranks, and train as rank 0. Return the exit code of this rank."""
    parallel = config.parallel
    fault = describe_local_ranks_fault(parallel.devices, parallel.accelerator)
    if parallel.mode == "single":
        fault = f"parallel={parallel.mode}: this was started as several ranks; use parallel=ddp"
    if fault:
        dismiss_ranks(EXIT_USAGE)
        raise ConfigError(fault)
    payload = {
        "folder": str(run.root), "config": _digest_config(run),
        "resume": order.resume, "paths": order.paths, "typed": order.typed,
        "devices": parallel.devices, "accelerator": parallel.accelerator,
    }  # fmt: skip
    with exit_at_stops():
        meeting = send_config(payload, sys.argv[1:], parallel.meeting_seconds)
    return _train_this_rank(run, config, order, meeting)


def dismiss_ranks(code: int = EXIT_DONE) -> None:
    """End the other ranks if the run is complete or cannot begin. Called on rank 0.

    Otherwise they would wait for rank 0: Slurm, unlike torchrun, does not end them when one rank exits.
    """
    with contextlib.suppress(LostContact), exit_at_stops():
        send_config({}, [], _read_meeting_seconds(), exit_code=code)


def train_as_other_rank() -> int:
    """Receive folder and config from rank 0, and train. Called on every other rank. Return the exit code."""
    with exit_at_stops():
        meeting = receive_config(sys.argv[1:], _read_meeting_seconds(), fault_of=_check_this_rank)
    if meeting.exit_code is not None:
        return meeting.exit_code
    payload = meeting.payload
    sys.path += [path for path in payload["paths"] if path not in sys.path]
    run = RunDir(Path(payload["folder"]))
    order = LaunchSpec(payload["resume"], payload["paths"], typed=tuple(payload["typed"]))
    return _train_this_rank(run, load_config(run.config, []), order, meeting)


def _read_meeting_seconds() -> float:
    """Return `parallel.meeting_seconds` from the command line (no config is composed yet), else the default."""
    values = [word.removeprefix(MEETING) for word in sys.argv if word.startswith(MEETING)]
    with contextlib.suppress(ValueError):  # rank 0 refuses it
        return float(values[-1]) if values else ParallelConfig().meeting_seconds
    return ParallelConfig().meeting_seconds


def _check_this_rank(payload: dict[str, Any]) -> str:
    """Return why this rank cannot take part; "" if it can. It needs the right number of ranks and the shared run
    folder.
    """
    if "folder" not in payload:  # nothing is trained
        return ""
    fault = describe_local_ranks_fault(payload["devices"], payload["accelerator"])
    if fault:
        return f"{fault} (rank {os.environ['RANK']} on {socket.gethostname()})"
    if _sees_shared_config(run := RunDir(Path(payload["folder"])), payload["config"]):
        return ""
    return (
        f"output_dir={run.root}: rank {os.environ['RANK']} on {socket.gethostname()} does not find the run folder of "
        "rank 0 there; ranks on several machines need a folder that all of them share"
    )


def _digest_config(run: RunDir) -> str:
    return hashlib.sha256(run.config.read_bytes()).hexdigest()


def _sees_shared_config(run: RunDir, digest: str) -> bool:
    """Return whether this rank sees rank 0's config. A network folder may show it late; a local folder may hold an
    old run.
    """
    until = time.monotonic() + FOLDER_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if _digest_config(run) == digest:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)


def find_earlier_folder() -> str | None:
    """Return the run folder of this job from before torchrun restarted its ranks; None at its first start."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    with exit_at_stops():
        folder = read_previous_folder(_read_meeting_seconds())
    if folder is None:
        say(
            "note: torchrun restarted the ranks, and no folder of their run is known: a new run begins (with "
            "output_dir=... a restart goes on)", file=sys.stderr,
        )  # fmt: skip
    return folder


def _train_this_rank(run: RunDir, config: RunConfig, order: LaunchSpec, meeting: Meeting) -> int:
    code = run_joined_rank(run, config, order, meeting.store)
    failure = None if code == EXIT_DONE else read_failure(run, int(os.environ["RANK"]))
    if failure is not None:
        message = print_failure_once(failure, meeting.store)
        if failure.rank == 0:
            write_status(run, config.run_name, state="failed", exit_code=code, message=message)
    return code
