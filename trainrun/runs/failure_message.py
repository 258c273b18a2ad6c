"""One message for all ranks of torchrun or Slurm that failed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.output import say
from trainrun.parallel.handshake import (
    ANSWER_SECONDS,
    has_agent_store,
    release_rank_zero,
    wait_for_other_ranks,
)
from trainrun.parallel.rank_place import Failure, explain_failures

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
    (own,) = failures
    with contextlib.suppress(RuntimeError):  # rank 0 hosts the store, and has ended
        store.set(f"failure/{own.rank}", json.dumps(asdict(own)))
        try:
            store.wait([PRINTED], timedelta(seconds=FAILURE_SECONDS))
        except RuntimeError:  # rank 0 still trains
            store.set(PRINTED, "")
            return
        is_printed.set()
        release_rank_zero(store)
