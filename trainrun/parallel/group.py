"""Process groups: one for tensors on the device, one for numbers on the host; and explanations of failed exchanges."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import psutil
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.errors import ConfigError, LaunchError, LostContact, TrainingError, TrainrunError
from trainrun.interfaces import StepAgreement
from trainrun.parallel.flight_recorder import read_last_exchanges
from trainrun.runtime.foreach_copy import copy_tensors

LAST = re.compile(r"Last error:\s*(\S.*)")
KIND = re.compile(r"\b(nccl[A-Z]\w+): ")
OF_OTHERS = ("ncclRemoteError", "ncclInProgress")  # another rank failed first
MORE = "NCCL_DEBUG=INFO shows more"
HINTS = {
    "Duplicate GPU": "start one rank for each GPU, with parallel.devices or the launcher's own setting",
    "/dev/shm": "NCCL needs more shared memory: start the container with --shm-size=8g or --ipc=host",
    "driver version is insufficient": "torch's build is newer than the GPU's driver (trainrun help gpus-and-drivers)",
}
FAR = (
    "192.0.2.1"  # kept for documentation (RFC 5737): nobody is there, and asking for the route sends nothing
)
Addresses = Mapping[str, list[str]]  # of each interface


@dataclass(frozen=True)
class Group:
    """The process group of a run.

    local_world_size: the number of ranks on this machine. host: a gloo group, so that exchanges of host numbers
        never wait for a device. shares_folder: whether all ranks see the run folder.
    """

    device: torch.device
    rank: int
    world_size: int
    host: dist.ProcessGroup
    local_world_size: int
    shares_folder: bool = True


def init_group(device: torch.device, timeout_seconds: float, store: Store, sees_folder: bool = True) -> Group:
    """Connect to the other ranks. store: in which the ranks exchange their addresses.

    timeout_seconds: how long an exchange may wait for the slowest rank before it fails. sees_folder: whether this
        rank sees the run folder.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_seconds)
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or choose_interface(os.environ, list_own_addresses())
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        with explain_lost_contact():
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
            )
            host = dist.new_group(backend="gloo", timeout=timeout)
            facts: list[Any] = [None] * world_size
            dist.all_gather_object(facts, (socket.gethostname(), sees_folder), group=host)
            if on_gpu:  # NCCL starts at its first exchange: what it lacks is told here, not in the first step
                dist.all_reduce(torch.zeros(1, device=device))
    except LostContact as error:
        name = interface or "the interface that this machine's name stands for"
        raise LostContact(
            f"{error.reason}; the ranks meet over {name}, GLOO_SOCKET_IFNAME=... names another"
        ) from error
    names, see_folder = zip(*facts, strict=True)
    return Group(device, rank, world_size, host, names.count(names[rank]), all(see_folder))


class Exchanges:
    """What the ranks of a group exchange on the host; methods as of `Parallel`."""

    def __init__(self, group: Group) -> None:
        self._host, self._world_size = group.host, group.world_size
        self._own = torch.zeros(3, dtype=torch.float64)
        self._all = torch.zeros(group.world_size, 3, dtype=torch.float64)
        self._rows = list(self._all.unbind())

    def agree(self, items: int, stop: int, save: int) -> StepAgreement:
        self._own.numpy()[:] = items, stop, save
        try:
            dist.all_gather(self._rows, self._own, group=self._host)
        except RuntimeError as error:
            raise explain_failed_exchange(error) from error
        all_items, stops, saves = zip(*self._all.tolist(), strict=True)
        return StepAgreement(sum(all_items) / self._world_size, int(max(stops)), int(max(saves)))

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        summands = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(summands) for _ in range(self._world_size)]
        with explain_lost_contact():
            dist.all_gather(rows, summands, group=self._host)
        # added in the order of ranks, whatever route the numbers took
        return [sum(column) for column in zip(*[row.tolist() for row in rows], strict=True)]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._world_size
        with explain_lost_contact():
            dist.all_gather_object(values, value, group=self._host)
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        with explain_lost_contact():
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self._host)

    def barrier(self) -> None:
        with explain_lost_contact():
            dist.barrier(group=self._host)


def spread_tensors(tensors: Iterable[Tensor], host: dist.ProcessGroup) -> None:
    """Copy rank 0's tensors to all ranks, in one message for each type of number."""
    for _, group in groupby(sorted(tensors, key=device_and_type), key=device_and_type):
        same = [tensor.detach() for tensor in group]
        joined = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(joined, src=0, group=host if joined.device.type == "cpu" else None)
        if dist.get_rank() != 0:
            pieces = torch.split(joined, [tensor.numel() for tensor in same])
            shaped = [piece.view_as(tensor) for tensor, piece in zip(same, pieces, strict=True)]
            copy_tensors(same, shaped)


def device_and_type(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.device), str(tensor.dtype)


def destroy_group() -> None:
    """Destroy the process group. The other ranks may be gone already."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def explain_lost_contact() -> Iterator[None]:
    """Turn a failed exchange in the block into an error that explains it."""
    try:
        yield
    except RuntimeError as error:
        raise explain_failed_exchange(error) from error


def is_lost_contact(error: RuntimeError) -> bool:
    """Return whether an error comes from an exchange between ranks."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def explain_failed_exchange(error: RuntimeError) -> TrainrunError:
    """Return the error for a failed exchange: LostContact, unless the last line of NCCL's message names a local
    cause.
    """
    text = str(error).strip()
    kind = KIND.search(text)
    if "NCCL error in" not in text or kind is None:
        return LostContact(error, read_last_exchanges())
    last = LAST.search(text)
    reason = f"{kind.group(1)}: {last.group(1).strip()}" if last else f"{kind.group(1)}; {MORE}"
    if kind.group(1) in OF_OTHERS or re.search(
        r"[Cc]onnection (closed|reset|refused)|[Tt]imed? ?out", reason
    ):
        return LostContact(reason, read_last_exchanges())
    if "out of memory" in reason:
        return TrainingError(
            f"out of memory in the exchange between the ranks ({reason}): a smaller data.batch_size leaves NCCL room"
        )
    for mark, hint in HINTS.items():
        if mark in reason:
            return (ConfigError if mark == "Duplicate GPU" else LaunchError)(f"parallel: {reason}; {hint}")
    return TrainingError(f"the exchange between the ranks failed ({reason}); {MORE}")


def list_own_addresses() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def find_address_towards(host: str) -> str:
    """Return this machine's address on the route to a host; "" without a route."""
    try:
        for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as connection:
                connection.connect(place)  # of UDP: looks the route up, sends nothing
                return str(connection.getsockname()[0])
    except OSError:
        pass
    return ""


def is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def choose_interface(
    env: Mapping[str, str], addresses: Addresses, towards: Callable[[str], str] = find_address_towards
) -> str:
    """Return the value for `GLOO_SOCKET_IFNAME`: NCCL's interface, else the one on the route to rank 0; "" if
    unknown.

    By default gloo takes the address of the machine's name, which Debian's /etc/hosts sets to 127.0.1.1 (pytorch
    68726). If all ranks are on one machine, it is the loopback interface.
    """
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        return next(
            (
                name
                for name, addresses_of_interface in addresses.items()
                if any(map(is_loopback, addresses_of_interface))
            ),
            "",
        )
    wish = env.get("NCCL_SOCKET_IFNAME", "")
    if wish and not wish.startswith("^"):
        starts = tuple(wish.removeprefix("=").split(","))  # NCCL's words are beginnings of names
        exact = wish.startswith("=")
        fitting = [name for name in addresses if (name in starts if exact else name.startswith(starts))]
        return fitting[0] if fitting else ""
    address = towards(env["MASTER_ADDR"])
    if not address or is_loopback(address):  # rank 0's own machine
        address = towards(FAR)
    return next(
        (
            name
            for name, addresses_of_interface in addresses.items()
            if address in addresses_of_interface and not is_loopback(address)
        ),
        "",
    )
