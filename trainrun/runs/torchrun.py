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

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.config.saved_config import load_config
from trainrun.config.schema import ParallelConfig, RunConfig
from trainrun.data.cache.room import cache_home
from trainrun.errors import EXIT_DONE, EXIT_USAGE, ConfigError, LostContact, TrainrunError
from trainrun.folder.run_folder import LaunchSpec, RunDir, read_identity, read_json, write_json, write_text
from trainrun.folder.status import write_status
from trainrun.output import print_note, say
from trainrun.parallel.devices import describe_local_ranks_fault
from trainrun.parallel.group import explain_lost_contact
from trainrun.parallel.handshake import (
    ANSWER_SECONDS,
    FOLDER,
    confirm_config,
    has_agent_store,
    leave_store,
    open_store,
    request_config,
    send_config,
)
from trainrun.parallel.rank_place import Failure, explain_failures, read_failure
from trainrun.runs.joined_rank import run_joined_rank
from trainrun.runtime.signals import exit_at_stops

POLL_SECONDS = 0.1
FOLDER_SECONDS = 5.0  # for a network's folder to show what rank 0 wrote
MEETING = "parallel.meeting_seconds="
FAILURE_SECONDS = 5.0  # for the ranks to send their failures, and for rank 0 to print one


def print_failure_once(own: Failure, store: Store) -> str:
    """Print one message for all ranks that failed, and return it. Called on each rank that failed.

    Rank 0 prints the failure that came first. Another rank prints it if rank 0 does not in time, because it still
    trains or has ended. A thread calls the store, because a call waits forever if the network is cut.
    """
    answers: list[tuple[list[Failure], bool]] = []
    group = PrefixStore("failure", store)
    thread = threading.Thread(target=lambda: answers.append(exchange_failures(own, group)), daemon=True)
    thread.start()
    thread.join(FAILURE_SECONDS + ANSWER_SECONDS)
    failures, is_printed = answers[0] if answers else ([own], False)
    first, line = explain_failures(failures, int(os.environ["WORLD_SIZE"]))
    text = f"rank {first.rank}: {first.traceback}" if first.kind == "bug" else line
    if not is_printed:
        say(f"trainrun: {text}", file=sys.stderr)
    if answers:
        leave_store(group, FAILURE_SECONDS)
    return line


def exchange_failures(own: Failure, store: Store) -> tuple[list[Failure], bool]:
    """Send the failure of this rank. Return those of all ranks, and whether another rank has printed one.

    Rank 0 waits for a failure with a cause, not only of lost contact. The others wait until rank 0 has printed.
    """
    try:
        store.set(str(own.rank), json.dumps(asdict(own)))
        if own.kind != "echo":
            store.set("cause", "")
        with contextlib.suppress(RuntimeError):  # none came in time
            store.wait(["printed" if own.rank else "cause"], timedelta(seconds=FAILURE_SECONDS))
        keys = [str(rank) for rank in range(int(os.environ["WORLD_SIZE"])) if store.check([str(rank)])]
        failures = [Failure(**json.loads(store.get(key))) for key in keys]
        return failures, store.add("printed", 1) > 1
    except RuntimeError:  # the store has ended, with rank 0 or with torchrun's agent
        return [own], False


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
        "words": sys.argv[1:],
    }  # fmt: skip
    write_json(run.job, {"token": payload["token"]})
    try:
        with exit_at_stops():
            store = send_config(payload, parallel.meeting_seconds)
        return _train_this_rank(run, config, order, store)
    finally:
        run.job.unlink(missing_ok=True)


def dismiss_ranks(code: int = EXIT_DONE) -> None:
    """End the other ranks if the run is complete or cannot begin. Called on rank 0.

    Otherwise they would wait for rank 0: Slurm, unlike torchrun, does not end them when one rank exits.
    """
    with contextlib.suppress(LostContact), exit_at_stops():
        send_config({"exit_code": code}, read_meeting_seconds())


def train_as_other_rank() -> int:
    """Receive folder and config from rank 0, and train. Called on every other rank. Return the exit code."""
    seconds = read_meeting_seconds()
    with exit_at_stops():
        payload, store = request_config(seconds)
        if "exit_code" in payload:  # nothing is trained
            confirm_config(store, "", seconds)
            return int(payload["exit_code"])
        fault = ""
        try:
            run, config, order = _prepare_rank(payload)
        except TrainrunError as error:
            fault = f"{error} (rank {os.environ['RANK']} on {socket.gethostname()})"
        if not confirm_config(store, fault, seconds):
            return EXIT_USAGE
    try:
        return _train_this_rank(run, config, order, store)
    finally:
        if not order.sees_folder:
            with contextlib.suppress(OSError):  # it holds files, or another rank removed it
                run.root.rmdir()


def _prepare_rank(payload: dict[str, Any]) -> tuple[RunDir, RunConfig, LaunchSpec]:
    """Return the folder for the files of this rank, the config, and the facts that rank 0 sent.

    Raise TrainrunError if this rank cannot take part.
    """
    check_same_words(sys.argv[1:], payload["words"])
    run, paths = RunDir(Path(payload["folder"])), payload["paths"]
    sees_folder = _sees_token(run, payload["token"])
    if not sees_folder:  # code below rank 0's working directory is below that of this rank
        root = payload["working_dir"]
        paths = [
            str(Path.cwd() / Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path
            for path in paths
        ]
    sys.path += [path for path in paths if path not in sys.path]
    order = LaunchSpec(payload["resume"], paths, sees_folder=sees_folder)
    config = load_config(run.config, []) if sees_folder else _read_sent_config(payload["files"])
    config = replace(config, typed=tuple(payload["typed"]))
    if fault := describe_local_ranks_fault(config.parallel.devices, config.parallel.accelerator):
        raise ConfigError(fault)
    if sees_folder:
        return run, config, order
    if config.parallel.mode == "fsdp":
        raise ConfigError(
            f"parallel=fsdp: this rank does not see the run folder of rank 0, {run.root}, and every rank saves its "
            "shards there; name a folder that all machines share with output_dir=..., or use parallel=ddp"
        )
    own = RunDir(cache_home() / "ranks" / payload["run_id"])
    try:
        own.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"XDG_CACHE_HOME: this rank cannot write to {error.filename} ({error.strerror}); set it to another folder "
            "of its machine"
        ) from error
    if os.environ["LOCAL_RANK"] == "0":
        print_note(
            f"{socket.gethostname()} does not see the run folder of rank 0, {run.root}; files about a failure of rank "
            f"{os.environ['RANK']} would be in {own.root}"
        )
    return own, config, order


def check_same_words(words: list[str], words_of_rank_0: list[str]) -> None:
    """Raise ConfigError if this rank was started with other settings than rank 0."""
    if words == words_of_rank_0:
        return
    here = [word for word in words if word not in words_of_rank_0]
    there = [word for word in words_of_rank_0 if word not in words]
    raise ConfigError(
        f"{(here or there or ['the order of the settings'])[0]}: this rank was started with other settings (only here: "
        f"{' '.join(here) or 'none'}; only on rank 0: {' '.join(there) or 'none'}); start all ranks with the same"
    )


def _read_sent_config(files: dict[str, str]) -> RunConfig:
    """Return the config from the files that rank 0 sent. Relative paths in it lead from the working directory."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            write_text(Path(folder) / name, text)
        return load_config(RunDir(Path(folder)).config, [])


def read_meeting_seconds() -> float:
    """Return `parallel.meeting_seconds` from the command line (no config is composed yet), else the default."""
    values = [word.removeprefix(MEETING) for word in sys.argv if word.startswith(MEETING)]
    with contextlib.suppress(ValueError):  # rank 0 refuses it
        return float(values[-1]) if values else ParallelConfig().meeting_seconds
    return ParallelConfig().meeting_seconds


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
    if has_agent_store():
        with exit_at_stops(), explain_lost_contact():
            store = open_store(read_meeting_seconds())
            if store.check([FOLDER]):
                return store.get(FOLDER).decode()
    print_note(
        "torchrun restarted the ranks, and no folder of their run is known: a new run begins (with output_dir=... a "
        "restart goes on)"
    )
    return None


def _train_this_rank(run: RunDir, config: RunConfig, order: LaunchSpec, store: Store) -> int:
    code = run_joined_rank(run, config, order, store)
    failure = None if code == EXIT_DONE else read_failure(run, int(os.environ["RANK"]))
    if failure is not None:
        message = print_failure_once(failure, store)
        if failure.rank == 0:
            write_status(run, config.run_name, state="failed", exit_code=code, message=message)
    return code
