"""The process group of a rank: one for the device's tensors, one for numbers on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.parallel.rank import LostContact


@dataclass(frozen=True)
class Group:
    """host: a gloo group, so that the host's own numbers never wait for a device."""

    device: torch.device
    rank: int
    world_size: int
    host: dist.ProcessGroup


def init_group(device: torch.device, timeout_seconds: float, store: Store | None = None) -> Group:
    """Meets the other ranks. store: of `handshake.Meeting`; the launcher's file if None.

    timeout_seconds: how long any exchange may wait for the slowest rank before it fails.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_seconds)
    if store is None:
        store = FileStore(os.environ["TRAINRUN_STORE"], world_size)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    with contact():
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        host = dist.new_group(backend="gloo", timeout=timeout)
        dist.barrier(group=host)
    return Group(device, rank, world_size, host)


def destroy() -> None:
    """Leaves the group; the other ranks need not be there any more."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def contact() -> Iterator[None]:
    """Surrounds an exchange: it fails for no other reason than that a rank is gone or too late."""
    try:
        yield
    except RuntimeError as error:
        raise LostContact(error) from error


def is_lost_contact(error: RuntimeError) -> bool:
    """Tells a broken exchange from other errors in code that also computes."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
