"""The network interface over which the hosts of a run's ranks talk to each other (gloo).

Why: gloo takes the interface that the machine's own name stands for. That is 127.0.1.1 by Debian's /etc/hosts, and
nothing at all on many clusters; ranks on several machines then cannot reach each other, though NCCL can
(pytorch issue 68726).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping

import psutil

FAR = (
    "192.0.2.1"  # kept for documentation (RFC 5737): nobody is there, and asking for the route sends nothing
)
Addresses = Mapping[str, list[str]]  # of each interface


def own_addresses() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [found.address.partition("%")[0] for found in entries if found.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def address_towards(host: str) -> str:
    """This machine's address on the route to a host; "" without one."""
    try:
        for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as asked:
                asked.connect(place)  # of UDP: looks the route up, sends nothing
                return str(asked.getsockname()[0])
    except OSError:
        pass
    return ""


def is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def interface_for(
    env: Mapping[str, str], addresses: Addresses, towards: Callable[[str], str] = address_towards
) -> str:
    """The interface for `GLOO_SOCKET_IFNAME`: NCCL's, else the one on the route to rank 0; "" if nothing tells it.

    Ranks that are all on one machine take the loopback interface.
    """
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        return next((name for name, own in addresses.items() if any(map(is_loopback, own))), "")
    wish = env.get("NCCL_SOCKET_IFNAME", "")
    if wish and not wish.startswith("^"):
        starts = tuple(wish.removeprefix("=").split(","))  # NCCL's words are beginnings of names
        exact = wish.startswith("=")
        fitting = [name for name in addresses if (name in starts if exact else name.startswith(starts))]
        return fitting[0] if fitting else ""
    address = towards(env["MASTER_ADDR"])
    if not address or is_loopback(address):  # rank 0's own machine
        address = towards(FAR)
    return next((name for name, own in addresses.items() if address in own and not is_loopback(address)), "")
