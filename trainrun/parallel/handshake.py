"""The start of ranks under torchrun or Slurm: rank 0 resolves the config and sends it to the other ranks.

1. Every other rank writes a fresh token. Rank 0 answers each token, so that an answer from before a restart is never
   used.
2. Every other rank confirms the answer, or reports why it cannot take part.
3. Rank 0 sends the first of these faults. If there is one, all ranks exit.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not marked so

from trainrun.errors import ConfigError, LostContact, MeetingFailed
from trainrun.parallel.group import explain_lost_contact
from trainrun.parallel.rank_place import format_ranks

POLL_SECONDS = 0.02
ANSWER_SECONDS = 2.0  # for a port to answer
FOLDER = "trainrun/folder"  # the key of the run folder in the store


def send_config(payload: dict[str, Any], seconds: float) -> Store:
    """Send `payload` (plain JSON) to every other rank. Return the store for the process group. Called on rank 0.

    Raise ConfigError if a rank cannot take part.
    """
    with explain_timeout(seconds, "the other ranks"):
        store = open_store(seconds)
        if "folder" in payload:
            store.set(FOLDER, payload["folder"])
    nonce = uuid.uuid4().hex
    group = PrefixStore(nonce, store)
    answer = json.dumps({"payload": payload, "nonce": nonce})
    with explain_lost_contact():
        fault = answer_ranks(store, group, answer, seconds)
        group.set("fault", fault)
        leave_store(group, seconds)
    if fault:
        raise ConfigError(fault)
    return group


def answer_ranks(store: Store, group: Store, answer: str, seconds: float) -> str:
    """Answer the tokens until all other ranks have replied. Return the first fault. Restarted ranks have new tokens."""
    fault, until = "", time.monotonic() + seconds
    answered: set[bytes] = set()
    waiting = list(range(1, int(os.environ["WORLD_SIZE"])))
    while waiting:
        for rank in list(waiting):
            hello, reply = f"trainrun/hello/{rank}", f"reply/{rank}"
            if store.check([hello]) and (token := store.get(hello)) not in answered:
                store.set(f"trainrun/answer/{token.decode()}", answer)
                answered.add(token)
            if group.check([reply]):
                waiting.remove(rank)
                fault = fault or group.get(reply).decode()
        if waiting and time.monotonic() > until:
            raise MeetingFailed(describe_wait(seconds, format_ranks(waiting)))
        time.sleep(POLL_SECONDS)
    return fault


def request_config(seconds: float) -> tuple[dict[str, Any], Store]:
    """Return the payload of rank 0, and the store for the process group. Called on every other rank."""
    token = uuid.uuid4().hex
    with explain_timeout(seconds, "rank 0"):
        store = open_store(seconds)
        store.set(f"trainrun/hello/{os.environ['RANK']}", token)
        answer = json.loads(store.get(f"trainrun/answer/{token}"))
    return answer["payload"], PrefixStore(answer["nonce"], store)


def confirm_config(store: Store, fault: str, seconds: float) -> bool:
    """Answer a payload. Return whether all ranks can take part. fault: why this rank cannot; "" if it can."""
    with explain_timeout(seconds, "the other ranks"):
        store.set(f"reply/{os.environ['RANK']}", fault)
        fault_of_any_rank = store.get("fault")
        leave_store(store, seconds)
    return not fault_of_any_rank


def leave_store(store: Store, seconds: float) -> None:
    """Report that this rank has read all. Rank 0, with whose process the store may end, waits for the other ranks."""
    keys = [f"bye/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    with suppress(RuntimeError):  # a rank, or the store, has ended
        store.set(f"bye/{os.environ['RANK']}", "")
        if os.environ["RANK"] == "0":
            store.wait(keys, timedelta(seconds=seconds))


def has_agent_store() -> bool:
    """Return whether torchrun's agent hosts the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "TRAINRUN_STORE" not in os.environ


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
