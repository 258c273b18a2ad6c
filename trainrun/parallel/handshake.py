"""How ranks that torchrun started get one config: rank 0 decides and hands it to the others.

Every other rank asks with a fresh token and rank 0 answers that token, so no answer from a life
before a restart can be taken for a new one. The answer also names a fresh prefix for the process
group's keys: torchrun keeps one store over all restarts, and without the prefix ranks read the
addresses of dead processes (a plain restart came back in 1 of 5 tries, with it in 5 of 5; pytorch
issue 135712).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not marked so
from torch.distributed.rendezvous import rendezvous

from trainrun.output import say
from trainrun.parallel.group import contact

WAIT_SECONDS = 1800.0
NOTE_SECONDS = 10.0
POLL_SECONDS = 0.02
FOLDER = "trainrun/folder"  # the key of the run folder in the store


@dataclass(frozen=True)
class Meeting:
    """payload: what rank 0 handed out; store: where this life of the ranks meets."""

    payload: dict[str, Any]
    store: Store
    complete: threading.Event
    server: threading.Thread | None = None

    def end(self) -> None:
        """Stop answering. A thread that is still inside the store when the interpreter ends aborts it (SIGABRT)."""
        self.complete.set()
        if self.server is not None:
            self.server.join()

    def say_heard(self, fault: str = "") -> None:
        """Confirm to rank 0 that this rank has read the payload. Rank 0 waits for it in `hear_all`."""
        self.store.set(f"heard/{os.environ['RANK']}", fault)

    def hear_all(self) -> list[str]:
        """Return why other ranks cannot take part; empty if all can. Called on rank 0."""
        try:
            with contact(), told_if_long("the other ranks"):
                answers = [
                    self.store.get(f"heard/{rank}") for rank in range(1, int(os.environ["WORLD_SIZE"]))
                ]
        finally:
            self.end()
        return [answer.decode() for answer in answers if answer]


def lead(payload: dict[str, Any], wait_seconds: float = WAIT_SECONDS) -> Meeting:
    """Answer every other rank with `payload` (plain JSON) until all have asked. Called on rank 0."""
    with contact(), told_if_long("the other ranks"):
        store, world_size = open_store(wait_seconds)
        side, _ = open_store(wait_seconds)  # a waiting `get` keeps its connection busy
    if payload.get("folder") is not None:
        store.set(FOLDER, payload["folder"])
    nonce = uuid.uuid4().hex
    answer = json.dumps({"payload": payload, "nonce": nonce})
    complete = threading.Event()
    server = threading.Thread(
        target=serve, args=(side, world_size, answer, complete), name="trainrun handshake", daemon=True
    )
    server.start()
    return Meeting(payload, PrefixStore(f"trainrun/group/{nonce}", store), complete, server)


def folder_before() -> str | None:
    """Return the run folder from before the ranks were restarted, on rank 0.

    It is in the store of torchrun's agent, which outlives the ranks and belongs to this job alone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    with contact():
        store, _ = open_store(WAIT_SECONDS)
        return store.get(FOLDER).decode() if store.check([FOLDER]) else None


def serve(store: Store, world_size: int, answer: str, complete: threading.Event) -> None:
    """Answer each question once. A rank that asks again after a restart has a new token."""
    answered: dict[int, str] = {}
    while not complete.wait(POLL_SECONDS):
        for rank in range(1, world_size):
            key = f"trainrun/hello/{rank}"
            if store.check([key]) and (token := store.get(key).decode()) != answered.get(rank):
                store.set(f"trainrun/answer/{token}", answer)
                answered[rank] = token


def follow(wait_seconds: float = WAIT_SECONDS) -> Meeting:
    """Ask rank 0 and wait for its answer. Called on every other rank."""
    token = uuid.uuid4().hex
    with contact(), told_if_long("rank 0"):
        store, _ = open_store(wait_seconds)
        store.set(f"trainrun/hello/{os.environ['RANK']}", token)
        answer = json.loads(store.get(f"trainrun/answer/{token}"))
    return Meeting(
        answer["payload"], PrefixStore(f"trainrun/group/{answer['nonce']}", store), threading.Event()
    )


@contextmanager
def told_if_long(whom: str) -> Iterator[None]:
    """Print after a while for whom this rank waits, and where; torch would print nothing for half an hour."""

    def tell() -> None:
        host, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
        try:
            socket.getaddrinfo(host, None)
            question = "can every machine reach it?"
        except OSError:
            question = "this machine knows no such name."
        say(
            f"trainrun: rank {os.environ['RANK']} waits for {whom} at {host}:{port}; {question} "
            "MASTER_ADDR and MASTER_PORT name another place",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    timer = threading.Timer(NOTE_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_store(wait_seconds: float) -> tuple[Store, int]:
    """Open a connection to torchrun's store. Rank 0 hosts it if there is no agent."""
    store, _, world_size = next(rendezvous("env://", timeout=timedelta(seconds=wait_seconds)))
    return store, world_size
