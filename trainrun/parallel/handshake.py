"""How ranks that torchrun or Slurm started get one config: rank 0 decides and hands it to the others.

1. Every other rank writes a fresh token and its command line. Rank 0 answers the token, so that no answer from before
   a restart is taken for a new one.
2. Every other rank confirms the answer, or says why it cannot take part.
3. Rank 0 gives its verdict: all train, or all end with the same exit code.

The answer names a fresh prefix for the keys of the process group: torchrun keeps one store over all restarts, and
without the prefix ranks read the addresses of dead processes (a plain restart came back in 1 of 5 tries, with it in 5
of 5; pytorch issue 135712).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not marked so

from trainrun.errors import ConfigError
from trainrun.parallel.group import contact
from trainrun.parallel.rank_place import LostContact, MeetingFailed, name_ranks

POLL_SECONDS = 0.02
ANSWER_SECONDS = 2.0  # for a port to answer
AGENT = "TORCHELASTIC_USE_AGENT_STORE"
FOLDER = "trainrun/folder"  # the key of the run folder in the store


@dataclass(frozen=True)
class Meeting:
    """payload: what rank 0 handed out; store: of the process group; exit_code: of all ranks if nothing is trained."""

    payload: dict[str, Any]
    store: Store
    exit_code: int | None = None


def lead(
    payload: dict[str, Any], words: Sequence[str], seconds: float, exit_code: int | None = None
) -> Meeting:
    """Hand `payload` (plain JSON) to every other rank. Called on rank 0.

    words: the command line, which must be the same on all ranks. exit_code: all ranks end with it.
    Raise ConfigError if a rank cannot take part; all ranks end with exit code 2 then.
    """
    until = time.monotonic() + seconds
    with limited_to(seconds, lambda: "the other ranks"):
        store = open_store(seconds)
        if "folder" in payload:
            store.set(FOLDER, payload["folder"])
    nonce = uuid.uuid4().hex
    group = PrefixStore(f"trainrun/group/{nonce}", store)
    faults: list[str] = []  # why ranks cannot take part
    answer = json.dumps({"payload": payload, "nonce": nonce})
    others = range(1, int(os.environ["WORLD_SIZE"]))
    with contact():
        for rank, reply in replies(store, group, others, answer, until, seconds):
            if exit_code is None and reply["words"] != list(words):
                faults.append(describe_difference(rank, reply["words"], words))
            faults += [reply["fault"]] if reply["fault"] else []
        verdict = ConfigError.exit_code if faults else exit_code
        group.set("verdict", json.dumps(verdict))
    if verdict is not None:  # the store ends with this process
        with suppress(LostContact), contact():
            group.wait([f"bye/{rank}" for rank in others], timedelta(seconds=seconds))
    if faults:
        raise ConfigError(faults[0])
    return Meeting(payload, group, exit_code)


def replies(
    store: Store, group: Store, others: Sequence[int], answer: str, until: float, seconds: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Answer each token once and yield the reply of every rank. A rank that asks after a restart has a new token."""
    answered: dict[int, str] = {}
    waiting = list(others)
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
            raise MeetingFailed(describe_wait(seconds, name_ranks(waiting)))
        time.sleep(POLL_SECONDS)


def follow(words: Sequence[str], seconds: float, fault_of: Callable[[dict[str, Any]], str]) -> Meeting:
    """Ask rank 0 and wait for its answer and its verdict. Called on every other rank.

    fault_of: payload -> why this rank cannot take part; empty if it can.
    """
    rank, token = os.environ["RANK"], uuid.uuid4().hex
    with limited_to(seconds, lambda: "rank 0"):
        store = open_store(seconds)
        store.set(f"trainrun/hello/{rank}", token)
        answer = json.loads(store.get(f"trainrun/answer/{token}"))
    payload, group = answer["payload"], PrefixStore(f"trainrun/group/{answer['nonce']}", store)
    with limited_to(seconds, lambda: "the other ranks"):
        group.set(f"reply/{rank}", json.dumps({"words": list(words), "fault": fault_of(payload)}))
        exit_code = json.loads(group.get("verdict"))
        if exit_code is not None:
            group.set(f"bye/{rank}", "")
    return Meeting(payload, group, exit_code)


def folder_before(seconds: float) -> str | None:
    """Return the run folder from before the ranks were restarted, on rank 0.

    It is in the store of torchrun's agent, which outlives the ranks and belongs to this job alone.
    """
    if os.environ.get(AGENT) != "True":
        return None
    with contact():
        store = open_store(seconds)
        return store.get(FOLDER).decode() if store.check([FOLDER]) else None


def open_store(seconds: float) -> Store:
    """Open a connection to the store of this job. Rank 0 hosts the store if torchrun has no agent for it."""
    has_agent = os.environ.get(AGENT) == "True"
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]),
            is_master=os.environ["RANK"] == "0" and not has_agent, timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )  # fmt: skip
    except RuntimeError as error:
        if os.strerror(errno.EADDRINUSE).lower() not in str(error).lower():
            raise
        port = os.environ["MASTER_PORT"]
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
def limited_to(seconds: float, whom: Callable[[], str]) -> Iterator[None]:
    """Explain a wait of torch's that failed after `seconds`."""
    began = time.monotonic()
    try:
        with contact():
            yield
    except LostContact as error:
        if time.monotonic() - began < 0.9 * seconds:  # it failed for another reason
            raise
        raise MeetingFailed(describe_wait(seconds, whom())) from error


@contextmanager
def ended_after(seconds: float, whom: Callable[[], str], end: Callable[[str], object]) -> Iterator[None]:
    """Call `end` in a thread with one line if the block takes longer: torch's own limit is that of all exchanges."""
    timer = threading.Timer(seconds, lambda: end(describe_wait(seconds, whom())))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe_wait(seconds: float, whom: str) -> str:
    """Return for whom this rank waited, and whether the address where the ranks meet can be used."""
    text = f"rank {os.environ['RANK']} waited {seconds:g} s for {whom} (parallel.meeting_seconds)"
    return f"{text}{describe_address()}" if "MASTER_ADDR" in os.environ else text


def describe_address() -> str:
    """Return where the ranks meet, whether the name resolves here, and whether the port answers."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return (
            f" at {host}:{port}: the name {host} does not resolve on this machine; MASTER_ADDR names another"
        )
    answer = "does not answer"
    with suppress(OSError), socket.create_connection((host, int(port)), ANSWER_SECONDS):
        answer = "answers"
    return f" at {host}:{port}: the name resolves to {address}, the port {answer}"
