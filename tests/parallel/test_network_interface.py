"""Which network interface the hosts of the ranks take, machine by machine."""

from __future__ import annotations

import pytest

from trainrun.parallel.group import FAR, choose_interface

ADDRESSES = {
    "lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7"], "docker0": ["172.17.0.1"], "ib0": ["10.1.0.7", "fe80::1"],
}  # fmt: skip
RANKS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(
    ("changed", "routes", "name"),
    [
        ({}, {"node1": "10.0.0.7"}, "eth0"),
        ({}, {"node1": "10.1.0.7"}, "ib0"),
        ({}, {"node1": "127.0.0.1", FAR: "10.0.0.7"}, "eth0"),  # rank 0 itself, and Debian's /etc/hosts
        ({}, {"node1": "127.0.0.1"}, ""),
        ({"LOCAL_WORLD_SIZE": "4"}, {"node1": "10.0.0.7"}, "lo"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, {"node1": "10.0.0.7"}, "ib0"),
        ({"NCCL_SOCKET_IFNAME": "bond,eth"}, {}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "=docker0"}, {}, "docker0"),
        ({"NCCL_SOCKET_IFNAME": "^ib"}, {"node1": "10.0.0.7"}, "eth0"),
    ],
)
def test_the_interface_on_the_way_to_rank_0(
    changed: dict[str, str], routes: dict[str, str], name: str
) -> None:
    assert choose_interface(RANKS | changed, ADDRESSES, lambda host: routes.get(host, "")) == name
