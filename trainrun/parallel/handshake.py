"""The start of ranks under torchrun or Slurm: rank 0 resolves the config and sends it to the other ranks.

1. Every other rank writes a fresh token and its command line. Rank 0 answers each token, so that an answer from before
   a restart is never used.
2. Every other rank confirms the answer, or reports why it cannot take part.
3. Rank 0 sends the verdict: all ranks train, or all exit with the same code.

The answer contains a fresh prefix for the keys of the process group. torchrun keeps one store over all restarts:
without the prefix, ranks read the addresses of dead processes (pytorch issue 135712).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not marked so

from trainrun.errors import ConfigError, LostContact, MeetingFailed
from trainrun.parallel.group import explain_lost_contact
from trainrun.parallel.rank_place import format_ranks

POLL_SECONDS = 0.02
ANSWER_SECONDS = 2.0  # for a port to answer
FOLDER = "trainrun/folder"  # the key of the run folder in the store


@dataclass(frozen=True)
class Meeting:
    """The result of the handshake.

    payload: the data from rank 0. store: for the process group. exit_code: of all ranks if nothing is trained.
    """

    payload: dict[str, Any]
    store: Store
    exit_code: int | None = None


def send_config(
    payload: dict[str, Any], words: Sequence[str], seconds: float, exit_code: int | None = None
) -> Meeting:
    """Send `payload` (plain JSON) to every other rank. Called on rank 0.

    words: the command line, which must be the same on all ranks. exit_code: if set, all ranks exit with it. Raise
        ConfigError if a rank cannot take part; then all ranks exit with code 2.
    """
    with explain_timeout(seconds, "the other ranks"):
        store = open_store(seconds)
        if "folder" in payload:
            store.set(FOLDER, payload["folder"])
    nonce = uuid.uuid4().hex
    group = PrefixStore(f"trainrun/group/{nonce}", store)
    answer = json.dumps({"payload": payload, "nonce": nonce})
    faults: list[str] = []  # why ranks cannot take part
    with explain_lost_contact():
        for rank, reply in iterate_replies(store, group, answer, seconds):
            if exit_code is None and reply["words"] != list(words):
                faults.append(describe_difference(rank, reply["words"], words))
            elif reply["fault"]:
                faults.append(reply["fault"])
        verdict = ConfigError.exit_code if faults else exit_code
        group.set("verdict", json.dumps(verdict))
    if verdict is not None:
        wait_for_other_ranks(group, seconds)
    if faults:
        raise ConfigError(faults[0])
    return Meeting(payload, group, exit_code)


def iterate_replies(
    store: Store, group: Store, answer: str, seconds: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Answer each token once and yield rank and reply of every other rank. A restarted rank has a new token."""
    until = time.monotonic() + seconds
    answered: dict[int, str] = {}
    waiting = list(range(1, int(os.environ["WORLD_SIZE"])))
    while waiting:
        for rank in list(waiting):
            hello, reply = f"trainrun/hello/{rank}", f"reply/{rank}"
            if store.check([hello]) and (token := store.get(hello).decode()) != answered.get(rank):
                store.set(f"trainrun/answer/{token}", answer)
                answered[rank] = token
            if group.check([reply]):
                waiting.remove(rank)
                yield rank, json.loads(group.get(reply))
        if waiting and time.monotonic() > until:
            raise MeetingFailed(describe_wait(seconds, format_ranks(waiting)))
        time.sleep(POLL_SECONDS)


def receive_config(
    words: Sequence[str], seconds: float, fault_of: Callable[[dict[str, Any]], str]
) -> Meeting:
    """Request the payload from rank 0 and wait for the verdict. Called on every other rank.

    fault_of: returns why this rank cannot take part in a payload's run; "" if it can.
    """
    rank, token = os.environ["RANK"], uuid.uuid4().hex
    with explain_timeout(seconds, "rank 0"):
        store = open_store(seconds)
        store.set(f"trainrun/hello/{rank}", token)
        answer = json.loads(store.get(f"trainrun/answer/{token}"))
    payload, group = answer["payload"], PrefixStore(f"trainrun/group/{answer['nonce']}", store)
    with explain_timeout(seconds, "the other ranks"):
        group.set(f"reply/{rank}", json.dumps({"words": list(words), "fault": fault_of(payload)}))
        exit_code = json.loads(group.get("verdict"))
        if exit_code is not None:
            release_rank_zero(group)
    return Meeting(payload, group, exit_code)


def wait_for_other_ranks(store: Store, seconds: float) -> None:
    """Wait until the other ranks have called `release_rank_zero`, because the store may end with this process."""
    keys = [f"bye/{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))]
    with suppress(LostContact), explain_lost_contact():
        store.wait(keys, timedelta(seconds=seconds))


def release_rank_zero(store: Store) -> None:
    store.set(f"bye/{os.environ['RANK']}", "")


def read_previous_folder(seconds: float) -> str | None:
    """Return the run folder of the attempt before the restart, on rank 0, from the store of torchrun's agent."""
    if not has_agent_store():
        return None
    with explain_lost_contact():
        store = open_store(seconds)
        return store.get(FOLDER).decode() if store.check([FOLDER]) else None


def has_agent_store() -> bool:
    """Return whether torchrun's agent hosts the store; otherwise rank 0 does."""
    is_of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return is_of_torchrun and "TRAINRUN_STORE" not in os.environ


def open_store(seconds: float) -> Store:
    """Connect to the store of this job, or host it. Under trainrun's launcher rank 0 has inherited the open port."""
    is_host = os.environ["RANK"] == "0" and not has_agent_store()
    inherited = os.environ.get("TRAINRUN_STORE")
    port = os.environ["MASTER_PORT"]
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"], int(port), int(os.environ["WORLD_SIZE"]), is_master=is_host,
            timeout=timedelta(seconds=seconds), wait_for_workers=False,
            master_listen_fd=int(inherited) if is_host and inherited else None,
        )  # fmt: skip
    except RuntimeError as error:
        if os.strerror(errno.EADDRINUSE).lower() not in str(error).lower():
            raise
        raise ConfigError(
            f"MASTER_PORT={port}: another process of this machine uses the port, so the ranks cannot meet there; "
            "choose another one, the same for all ranks"
        ) from error
    # two jobs that were given the same address by mistake do not take each other's answers
    return PrefixStore(os.environ.get("SLURM_JOB_ID", ""), store)


def describe_difference(rank: int, words: Sequence[str], words_of_rank_0: Sequence[str]) -> str:
    here = [word for word in words if word not in words_of_rank_0]
    there = [word for word in words_of_rank_0 if word not in words]
    return (
        f"{(here or there or ['the order of the settings'])[0]}: rank {rank} was started with other settings "
        f"(only there: {' '.join(here) or 'none'}; only on rank 0: {' '.join(there) or 'none'}); start all ranks with "
        "the same"
    )


@contextmanager
def explain_timeout(seconds: float, whom: str) -> Iterator[None]:
    """Turn torch's error of a wait that failed after `seconds` into MeetingFailed. whom: the ranks that are missing."""
    began = time.monotonic()
    try:
        with explain_lost_contact():
            yield
    except LostContact as error:
        if time.monotonic() - began < 0.9 * seconds:  # it failed for another reason
            raise
        raise MeetingFailed(describe_wait(seconds, whom)) from error


def describe_wait(seconds: float, whom: str) -> str:
    """Return for whom this rank waited, at which address, whether its name resolves and whether the port answers."""
    rank, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    text = f"rank {rank} waited {seconds:g} s for {whom} (parallel.meeting_seconds) at {host}:{port}"
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return f"{text}: the name {host} does not resolve on this machine; MASTER_ADDR names another"
    answer = "does not answer"
    with suppress(OSError), socket.create_connection((host, int(port)), ANSWER_SECONDS):
        answer = "answers"
    return f"{text}: the name resolves to {address}, the port {answer}"
