"""A run whose ranks were started by torchrun or Slurm. Rank 0 decides and informs the others.

Only rank 0 composes the config, so there is one run folder and one config. It sends both to the other ranks through
the store in which they meet. A rank that does not see the run folder writes its files to a folder of its own machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.config.saved_config import load_config
from trainrun.config.schema import ParallelConfig, RunConfig
from trainrun.data.cache.room import cache_home
from trainrun.errors import EXIT_DONE, EXIT_USAGE, ConfigError, LostContact
from trainrun.folder.run_folder import LaunchSpec, RunDir, read_identity, read_json, write_json, write_text
from trainrun.folder.status import write_status
from trainrun.output import print_note, say
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
FOLDER_SECONDS = 5.0  # for a network's folder to show what rank 0 wrote
MEETING = "parallel.meeting_seconds="
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
    """Add the failures of the other ranks to the failure of rank 0. If rank 0 only lost contact, wait for a failure
    that names the cause.
    """
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


def train_as_rank_zero(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """Send folder and config to the other ranks, and train as rank 0. Return the exit code of this rank."""
    parallel = config.parallel
    fault = describe_local_ranks_fault(parallel.devices, parallel.accelerator)
    if parallel.mode == "single":
        fault = f"parallel={parallel.mode}: this command was started as several ranks; use parallel=ddp"
    if fault:
        dismiss_ranks(EXIT_USAGE)
        raise ConfigError(fault)
    payload = {
        "folder": str(run.root), "run_id": read_identity(run)["run_id"], "token": secrets.token_hex(8),
        "files": {path.name: path.read_text() for path in (run.config, run.secrets) if path.is_file()},
        "resume": order.resume, "working_dir": os.getcwd(), "paths": order.paths, "typed": config.typed,
        "mode": parallel.mode, "devices": parallel.devices, "accelerator": parallel.accelerator,
    }  # fmt: skip
    write_json(run.job, {"token": payload["token"]})
    try:
        with exit_at_stops():
            meeting = send_config(payload, sys.argv[1:], parallel.meeting_seconds)
        return _train_this_rank(run, config, order, meeting)
    finally:
        run.job.unlink(missing_ok=True)


def dismiss_ranks(code: int = EXIT_DONE) -> None:
    """End the other ranks if the run is complete or cannot begin. Called on rank 0.

    Otherwise they would wait for rank 0: Slurm, unlike torchrun, does not end them when one rank exits.
    """
    with contextlib.suppress(LostContact), exit_at_stops():
        send_config({}, [], _read_meeting_seconds(), exit_code=code)


def train_as_other_rank() -> int:
    """Receive folder and config from rank 0, and train. Called on every other rank. Return the exit code."""
    sees_folder = True

    def check_this_rank(payload: dict[str, Any]) -> str:
        nonlocal sees_folder
        if "folder" not in payload:  # nothing is trained
            return ""
        sees_folder = _sees_token(RunDir(Path(payload["folder"])), payload["token"])
        return _describe_fault(payload, sees_folder)

    with exit_at_stops():
        meeting = receive_config(sys.argv[1:], _read_meeting_seconds(), fault_of=check_this_rank)
    if meeting.exit_code is not None:
        return meeting.exit_code
    payload = meeting.payload
    paths = payload["paths"] if sees_folder else _find_local_paths(payload["paths"], payload["working_dir"])
    sys.path += [path for path in paths if path not in sys.path]
    order = LaunchSpec(payload["resume"], paths, sees_folder=sees_folder)
    if sees_folder:
        run = RunDir(Path(payload["folder"]))
        config = replace(load_config(run.config, []), typed=tuple(payload["typed"]))
        return _train_this_rank(run, config, order, meeting)
    run = RunDir(_read_rank_folder(payload))
    if os.environ["LOCAL_RANK"] == "0":
        print_note(
            f"{socket.gethostname()} does not see the run folder of rank 0, {payload['folder']}; files about a failure "
            f"of rank {os.environ['RANK']} would be in {run.root}"
        )
    try:
        config = replace(_read_sent_config(payload["files"]), typed=tuple(payload["typed"]))
        return _train_this_rank(run, config, order, meeting)
    finally:
        with contextlib.suppress(OSError):  # it holds files, or another rank removed it
            run.root.rmdir()


def _read_rank_folder(payload: dict[str, Any]) -> Path:
    """Return the folder of this machine for the files of its ranks."""
    return cache_home() / "ranks" / str(payload["run_id"])


def _find_local_paths(paths: list[str], working_dir: str) -> list[str]:
    """Return the folders of user code on this machine: those below rank 0's working directory are below that of this
    rank.
    """
    return [
        str(Path.cwd() / Path(path).relative_to(working_dir))
        if Path(path).is_relative_to(working_dir)
        else path
        for path in paths
    ]


def _read_sent_config(files: dict[str, str]) -> RunConfig:
    """Return the config from the files that rank 0 sent. Relative paths in it lead from the working directory."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            write_text(Path(folder) / name, text)
        return load_config(RunDir(Path(folder)).config, [])


def _read_meeting_seconds() -> float:
    """Return `parallel.meeting_seconds` from the command line (no config is composed yet), else the default."""
    values = [word.removeprefix(MEETING) for word in sys.argv if word.startswith(MEETING)]
    with contextlib.suppress(ValueError):  # rank 0 refuses it
        return float(values[-1]) if values else ParallelConfig().meeting_seconds
    return ParallelConfig().meeting_seconds


def _describe_fault(payload: dict[str, Any], sees_folder: bool) -> str:
    """Return why this rank cannot take part; "" if it can. Make the folder for its files if it needs one."""
    place = f"rank {os.environ['RANK']} on {socket.gethostname()}"
    fault = describe_local_ranks_fault(payload["devices"], payload["accelerator"])
    if fault:
        return f"{fault} ({place})"
    if sees_folder:
        return ""
    if payload["mode"] == "fsdp":
        return (
            f"parallel=fsdp: {place} does not see the run folder of rank 0, {payload['folder']}, and every rank saves "
            "its shards there; name a folder that all machines share with output_dir=..., or use parallel=ddp"
        )
    try:
        _read_rank_folder(payload).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return (
            f"XDG_CACHE_HOME: {place} cannot write to {error.filename} ({error.strerror}); set it to another folder "
            "of that machine"
        )
    return ""


def _sees_token(run: RunDir, token: str) -> bool:
    """Return whether this rank sees what rank 0 wrote into the run folder.

    A network folder may show it late. A folder of that name on the disk of this machine has no token, or an old one.
    """
    until = time.monotonic() + FOLDER_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError, LookupError):
            os.scandir(run.root).close()  # NFS asks the server again
            if read_json(run.job)["token"] == token:
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
