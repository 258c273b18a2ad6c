"""Work in a child process comes back as values, and nothing else of it reaches the process that asked."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from trainrun.errors import ConfigError, PluginError
from trainrun.runtime.child_process import ChildError, can_fork_safely, run_in_child

pytestmark = pytest.mark.process


def test_a_value_comes_back_and_nothing_else_changes() -> None:
    model, notes = nn.Linear(3, 2), {"seen": [1]}
    before = [p.detach().clone() for p in model.parameters()]

    def work() -> list[Any]:
        notes["seen"].append(2)
        model(torch.ones(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        torch.manual_seed(7)
        return [notes["seen"], model.weight.grad.tolist()]

    state = torch.get_rng_state()
    assert run_in_child(work) == [[1, 2], [[4.0] * 3] * 2]
    assert notes == {"seen": [1]}
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))


def test_several_threads_compute_in_the_child_of_a_process_that_has_used_them() -> None:
    """OpenMP's threads are gone after a fork; a computation in the forked thread waits for them for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layer, x = nn.Conv2d(3, 16, 3), torch.rand(8, 3, 64, 64)
        expected = layer(x).sum().item()
        torch.rand(10**6).exp()

        def work() -> list[float]:
            loss = layer(x).sum()
            loss.backward()
            return [loss.item(), torch.get_num_threads()]

        assert run_in_child(work, 60.0) == [expected, 2]
        assert layer(x).sum().item() == expected
    finally:
        torch.set_num_threads(before)


def test_random_numbers_are_those_of_this_process() -> None:
    def draw() -> list[float]:
        return [random.random(), float(numpy.random.random()), float(torch.rand(()))]

    numpy.random.seed(3)  # NumPy loads its generator at the first use
    drawn = run_in_child(draw)
    assert drawn == draw()


@pytest.mark.parametrize("buffering", [0, -1])
def test_open_files_keep_their_position(tmp_path: Path, buffering: int) -> None:
    (tmp_path / "rows").write_bytes(bytes(range(256)) * 400)
    with open(tmp_path / "rows", "rb", buffering=buffering) as rows:
        rows.seek(70_000)
        first = run_in_child(lambda: rows.read(30_000))
        assert rows.read(30_000) == first
        assert os.lseek(rows.fileno(), 0, os.SEEK_CUR) == 100_000 or buffering


def test_the_child_writes_no_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as log:

        def work() -> None:
            os.write(1, b"noise")
            log.write("noise\n" * 10_000)
            log.flush()

        run_in_child(work)
    assert (tmp_path / "log").read_text() == ""
    assert capfd.readouterr().out == ""


class OwnError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize("error", [ValueError("rows"), ConfigError("a=1: no"), PluginError("task: no")])
def test_an_error_of_the_work_is_raised_here(error: Exception) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        run_in_child(work)


def test_an_error_that_cannot_be_pickled_is_named() -> None:
    def work() -> None:
        raise OwnError(1, 2)

    with pytest.raises(ChildError, match="OwnError: 1 and 2") as caught:
        run_in_child(work)
    assert "raise OwnError(1, 2)" in caught.value.text


def test_a_child_that_dies_or_takes_too_long_is_an_error() -> None:
    with pytest.raises(ChildError, match="signal 9"):
        run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ChildError, match=r"longer than 0\.01 s"):
        run_in_child(threading.Event().wait, 0.01)
    with pytest.raises(ChildError):
        run_in_child(lambda: os._exit(3))


def test_beside_a_thread_of_the_users_nothing_is_forked() -> None:
    """A data set may have started it, and would wait for its answers for ever in a fork, which lacks it."""
    assert can_fork_safely()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    assert not can_fork_safely()
    ended.set()
    thread.join()
    assert can_fork_safely()
