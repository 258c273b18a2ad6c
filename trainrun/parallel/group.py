"""The process group of a rank: one for the device's tensors, one for numbers on the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.parallel.exchange_errors import exchange_failure
from trainrun.parallel.interface import interface_for, own_addresses
from trainrun.parallel.rank_place import LostContact


@dataclass(frozen=True)
class Group:
    """local_world_size: ranks on this machine. host: a gloo group, so that the host's own numbers never wait for a
    device."""

    device: torch.device
    rank: int
    world_size: int
    host: dist.ProcessGroup
    local_world_size: int


def init_group(device: torch.device, timeout_seconds: float, store: Store | None = None) -> Group:
    """Meets the other ranks. store: of `handshake.Meeting`; the launcher's file if None.

    timeout_seconds: how long any exchange may wait for the slowest rank before it fails.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_seconds)
    external = store is not None
    if store is None:
        store = FileStore(os.environ["TRAINRUN_STORE"], world_size)
    elif not os.environ.get("GLOO_SOCKET_IFNAME") and (name := interface_for(os.environ, own_addresses())):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        with contact():
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
            )
            host = dist.new_group(backend="gloo", timeout=timeout)
            names: list[str] = [""] * world_size
            dist.all_gather_object(names, socket.gethostname(), group=host)
            if on_gpu:  # NCCL starts at its first exchange: what it lacks is told here, not in the first step
                dist.all_reduce(torch.zeros(1, device=device))
    except LostContact as error:
        if not external:
            raise
        name = os.environ.get("GLOO_SOCKET_IFNAME", "")
        way = f"over {name}" if name else "over the interface that this machine's name stands for"
        raise LostContact(
            f"{error.reason}; the ranks meet {way}, GLOO_SOCKET_IFNAME=... names another"
        ) from error
    return Group(device, rank, world_size, host, names.count(names[rank]))


def destroy() -> None:
    """Leave the group; the other ranks need not be there any more."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def contact() -> Iterator[None]:
    """Surrounds an exchange, and says what its failure means."""
    try:
        yield
    except RuntimeError as error:
        raise exchange_failure(error) from error


def is_lost_contact(error: RuntimeError) -> bool:
    """Tells a broken exchange from other errors in code that also computes."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
