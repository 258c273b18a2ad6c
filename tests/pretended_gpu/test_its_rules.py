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


def test_numbers_gradients_and_random_numbers_are_those_of_the_cpu() -> None:
    numbers = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    here = numbers.clone().requires_grad_()
    there = here.detach().cuda().requires_grad_()
    for x in (here, there):
        torch.nn.functional.layer_norm(x @ x.T, [4]).sin().sum().backward()
    assert there.is_cuda
    torch.testing.assert_close(there.grad.cpu(), here.grad)  # type: ignore[union-attr]
    before = torch.get_rng_state()
    torch.manual_seed(3)
    drawn = torch.rand(5, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device="cuda"), drawn)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5), drawn.cpu())  # a generator of its own, of the same kind
    torch.set_rng_state(before)


def test_dropout_draws_on_the_device() -> None:
    here, there = torch.get_rng_state(), torch.cuda.get_rng_state()
    dropped = [torch.nn.functional.dropout(ones(requires_grad=True)) for _ in range(2)]
    assert not torch.equal(*dropped)
    assert torch.equal(torch.get_rng_state(), here)
    torch.cuda.set_rng_state(there)
    assert torch.equal(torch.nn.functional.dropout(ones(requires_grad=True)), dropped[0])
    assert not torch.equal(torch.rand(9, device="cuda"), torch.rand(9, device="cuda"))


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


def test_memory_is_counted_and_ends() -> None:
    before = torch.cuda.memory_allocated()
    x = ones()
    assert torch.cuda.memory_allocated() - before == 4 * SIZE
    del x
    assert torch.cuda.memory_allocated() == before
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((before + 5 * SIZE) / total)
    try:
        first = ones()
        with pytest.raises(torch.OutOfMemoryError):
            ones()
        assert len(first) == SIZE
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_tensor_grows_in_place() -> None:
    out = torch.empty(0, device="cuda")
    torch.add(ones(), 1, out=out)
    assert out.sum().item() == 2 * SIZE
    view = out.view(2, -1)[1]
    view += 1
    assert out.sum().item() == 2.5 * SIZE


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
