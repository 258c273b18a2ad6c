"""What the pretended GPU holds against code that a real one would only now and then show wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.cuda is not None, reason="no pretended GPU"
    ),
]
SIZE = 1000


def ones(**more: Any) -> torch.Tensor:
    return torch.ones(SIZE, device="cuda", **more)


def test_tensors_of_two_devices_do_not_meet() -> None:
    for wrong in (lambda: ones() + torch.ones(SIZE), lambda: torch.cat([ones(), torch.ones(1)])):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    assert (ones() + torch.tensor(1.0)).sum().item() == 2 * SIZE  # a number may
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="cuda", generator=torch.Generator())


def test_fresh_memory_holds_nothing_of_use() -> None:
    assert torch.empty(SIZE, device="cuda").isnan().all().item()


def test_another_stream_has_to_be_waited_for() -> None:
    side = torch.cuda.Stream()
    x = ones()
    with (
        torch.cuda.stream(side),
        pytest.raises(RuntimeError, match="does not wait for what another stream wrote"),
    ):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    with pytest.raises(RuntimeError, match="does not wait for what another stream reads"):
        x.zero_()
    event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    x.zero_()
    assert y.sum().item() == 2 * SIZE


def test_a_copy_to_the_host_has_come_once_it_was_waited_for() -> None:
    host = torch.zeros(SIZE).pin_memory()
    host.copy_(ones(), non_blocking=True)
    assert host.isnan().all()
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert torch.equal(host, torch.ones(SIZE))


def test_a_copy_from_the_host_must_be_over_before_its_memory_is_used_again() -> None:
    host = torch.ones(SIZE).pin_memory()
    there = host.to("cuda", non_blocking=True)
    host.zero_()
    with pytest.raises(RuntimeError, match="pinned memory was written to while"):
        torch.cuda.synchronize()
    torch.cuda.synchronize()
    host.fill_(2)
    assert there.sum().item() == SIZE


def test_waits_can_be_forbidden() -> None:
    x = ones()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for wait in (
            lambda: x.sum().item(),
            lambda: x.cpu(),
            lambda: x[x > 0],
            lambda: torch.ones(3).to("cuda"),
        ):
            with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                wait()
        x.to("cpu", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_does_again_what_was_recorded_and_nothing_else() -> None:
    x, number = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(number):
        y = x * 2
    x.fill_(5)
    number.replay()
    assert y.sum().item() == 10 * SIZE
    refused = pytest.raises(RuntimeError, match="not permitted when stream is capturing")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()


def test_a_forked_process_cannot_use_it() -> None:
    x = ones()
    child = os.fork()
    if child == 0:
        try:
            x + 1
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
