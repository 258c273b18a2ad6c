"""A run in miniature: a state that changes with every step, ranks that are threads, faults on order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.manager import CheckpointManager, KeepOptions
from trainrun.train_state import TrainState
from trainrun.training.triggers import Lengths, RepeatInterval


class OneRank:
    rank, world_size, forward_is_collective, shares_folder = 0, 1, False, True

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def load_state_dict(self, tree: Any, like: Any) -> Any:
        return tree


class ThreadRank:
    """One of several threads; `gather` meets the others at a barrier, and breaks instead of hanging."""

    forward_is_collective, shares_folder = False, True

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size = rank, len(slots)
        self._barrier, self._slots = barrier, slots

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(timeout=20)
        answer = list(self._slots)
        self._barrier.wait(timeout=20)
        return answer

    def load_state_dict(self, tree: Any, like: Any) -> Any:
        return tree


def run_ranks(count: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work(rank)` returned or raised in each thread."""
    barrier, slots = threading.Barrier(count), [None] * count
    results: list[Any] = [None] * count

    def body(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(rank, barrier, slots))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Killed(BaseException):
    """Stands for `kill -9`: nothing in the code may catch it."""


class Faults:
    """Counts the file operations, and raises `error` before the n-th (0: never)."""

    def __init__(self, at: int = 0, error: Callable[[], BaseException] = Killed) -> None:
        self.at, self.error = at, error
        self.seen: list[tuple[str, str]] = []

    def __call__(self, operation: str, path: Path) -> None:
        self.seen.append((operation, path.name))
        if len(self.seen) == self.at:
            raise self.error()


class FakeParts:
    """Gives a tree that is different at every step and on every rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.weight = torch.zeros(2, 3)
        self.asked = 0

    def checkpoint_tree(self, state: TrainState) -> tuple[Any, Any]:
        self.asked += 1
        self.weight.fill_(state.step)
        shared = {"model": {"w": self.weight}, "state": {"step": state.step, "saved_step": state.saved_step}}
        return shared, {"rank": self.rank, "rng": torch.tensor([self.rank, state.step])}


class Run:
    """One rank's checkpoints with a clock that stands still, and the loop's part in few words."""

    def __init__(
        self, folder: Path, parallel: Any = None, faults: Faults | None = None, **options: Any
    ) -> None:
        defaults: dict[str, Any] = {
            "enabled": True,
            "monitor": "val/acc",
            "mode": "max",
            "save_top_k": 1,
            "save_last": True,
            "keep_last": 2,
            "periodic": lambda state: False,
            "interval_seconds": None,
            "async_save": False,
        }
        if number := options.pop("every_n_train_steps", None):
            options["periodic"] = RepeatInterval(number, "step", Lengths(None)).is_interval_end
        self.parallel = parallel or OneRank()
        self.folder, self.notes, self.now = folder, [], 0.0
        self.free_bytes = 2**40
        self.state, self.parts = TrainState(), FakeParts(self.parallel.rank)
        self.keep = CheckpointManager(
            folder,
            "run-1",
            KeepOptions(**defaults | options),
            self.parallel,
            {"torch": torch.__version__},
            self.notes.append,
            lambda: self.free_bytes,
            files=FileLayer(faults) if faults else None,
            clock=lambda: self.now,
        )

    def go(
        self, step: int, acc: float | None = None, stop: str = "", request: int = 0, save_request: int = 0
    ) -> bool:
        """Comes to a step, validates where `acc` is given, and saves what is due; says whether it was."""
        state = self.state
        state.step, state.stop_reason, state.stop_request = step, stop, request
        state.save_request = save_request
        if acc is not None:
            state.validated_step, state.last_metrics = step, {"val/acc": acc, "val/loss": -acc}
        due = self.keep.is_due(state)
        if due:
            self.keep.save(self.parts, state)
        return due

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-*"))

    def hidden(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob(".*"))


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of fsync instead of waiting for the disk: no test here takes the power away."""
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    return calls


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    return lambda **options: Run(options.pop("folder", tmp_path / "checkpoints"), **options)


@pytest.fixture
def faults() -> type[Faults]:
    return Faults


@pytest.fixture
def killed() -> type[BaseException]:
    return Killed


@pytest.fixture
def ranks() -> Callable[[int, Callable[[Any], Any]], list[Any]]:
    return run_ranks
