"""What a checkpoint costs a training: stall of the loop, steps while it is written, seconds until it is durable.

    python scripts/bench_checkpoint.py [--rounds 3] [--layers 8] [--width 1024] [--device cuda] [--folder DIR]

A model of about 100 M parameters with AdamW (weights and two averages: 1.2 GB) trains on all cores. Each
way has a process of its own and takes its turn in every round: some steps alone, one save, and steps until the save
is durable. What dcp leaves to be written is waited for at the end of its turn. Freed memory is kept for the next
step, as trainrun keeps it. All five need about 15 GB of memory. The ways:

    trainrun            checkpoint.async_save=true, with SHA-256, manifest, fsync and rename
    trainrun sync       checkpoint.async_save=false, the same files
    torch.save          + fsync; no checksum but a CRC32
    safetensors         save_file, + fsync
    dcp async           torch.distributed.checkpoint.async_save, by a thread

Printed are medians over rounds; the first save, whose memory is fresh, is a row of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import as_the_command  # noqa: F401  # ahead of torch
import torch
from bench_kit import add_device, now
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.manager import CheckpointManager, KeepOptions
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.runtime.machine import read_host_memory, set_allocator
from trainrun.train_state import SAVE_NONE, SAVE_NOW, TrainState

ALONE = 6  # steps before a save
WAYS = ["trainrun", "trainrun sync", "torch.save", "safetensors", "dcp async"]


class Turn(NamedTuple):
    stall: float
    durable: float
    median: float
    worst: float
    lost: float


class Training:
    """A model and its steps; as much work as a small batch makes of it."""

    def __init__(self, layers: int, width: int, batch: int, device: str = "cpu") -> None:
        pairs = [(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
        self.model = nn.Sequential(*[module for pair in pairs for module in pair]).to(device)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(batch, width, device=device)

    def step(self) -> float:
        began = now()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return now() - began

    def tree(self) -> dict[str, Any]:
        state = {str(i): value for i, value in enumerate(self.optimizer.state.values())}
        return {"model": self.model.state_dict(), "optimizer": state}

    def flat(self) -> dict[str, Tensor]:
        tree = self.tree()
        flat = {f"optimizer.{i}.{k}": v for i, state in tree["optimizer"].items() for k, v in state.items()}
        return {f"model.{name}": tensor for name, tensor in tree["model"].items()} | flat

    def checkpoint_tree(self, state: TrainState) -> tuple[Any, Any]:
        return self.tree() | {"step": state.step}, {}


class Trainrun:
    """The runner's own checkpoints; `begin` saves, `done` is asked after every step, as the loop does."""

    def __init__(self, training: Training, folder: Path, async_save: bool) -> None:
        options = KeepOptions(True, None, "min", 0, True, 1, lambda state: False, None, async_save)
        self.training, self.state = training, TrainState(step=1)
        root = folder / f"trainrun-{async_save}"
        self.durable_at, self._root, self._committed = 0.0, root, False
        self.keep = CheckpointManager(
            root, "bench", options, Single(choose_device(training.device)), {}, print,
            lambda: read_host_memory().free, FileLayer(self._heard),
        )  # fmt: skip
        self.keep.start(training, TrainState())
        self.keep.is_due(self.state)  # after the first step the memory for copies is made ready

    def _heard(self, operation: str, path: Path) -> None:
        """Durable is what the operation before this one made so: the sync of the folder after the rename."""
        if self._committed and not self.durable_at:
            self.durable_at = time.perf_counter()
        self._committed = operation == "fsync_dir" and path == self._root

    def begin(self) -> None:
        self.durable_at, self._committed = 0.0, False
        self.state.step += 1
        self.state.save_request = SAVE_NOW
        assert self.keep.is_due(self.state)
        self.keep.save(self.training, self.state)

    def done(self) -> bool:
        self.state.step += 1
        self.state.save_request = self.keep.save_status()
        if self.state.save_request == SAVE_NONE and self.keep.is_due(self.state):
            self.keep.save(self.training, self.state)
        ended = self.state.save_request == SAVE_NONE
        if ended and not self.durable_at:  # nothing was deleted after the commit
            self.durable_at = time.perf_counter()
        return ended


class Blocking:
    """A function that writes one file, and the disk is waited for."""

    def __init__(self, write: Callable[[Path], None], folder: Path) -> None:
        self.write, self.path, self.durable_at = write, folder / "file", 0.0

    def begin(self) -> None:
        self.path.unlink(missing_ok=True)
        self.write(self.path)
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        self.durable_at = time.perf_counter()

    def done(self) -> bool:
        return True


class Dcp:
    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder, self.durable_at = training, folder / "dcp", 0.0
        self.future: Any = None

    def begin(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.future = dcp.async_save(self.training.tree(), checkpoint_id=self.folder, no_dist=True)
        self.future.add_done_callback(self._ended)

    def _ended(self, future: Any) -> None:
        self.durable_at = time.perf_counter()

    def done(self) -> bool:
        return bool(self.future.done())


def one_turn(training: Training, way: Any) -> Turn:
    alone = [training.step() for _ in range(ALONE)]
    median = statistics.median(alone)
    began = time.perf_counter()
    way.begin()
    stall = time.perf_counter() - began
    later: list[float] = []
    while not way.done():
        later.append(training.step())
    lost = stall + sum(later) - median * len(later)
    if isinstance(way, Dcp):  # the others have synced their files themselves
        os.sync()
    return Turn(stall, way.durable_at - began, median, max(later, default=median), lost)


def way_of(name: str, training: Training, folder: Path) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "trainrun": lambda: Trainrun(training, folder, async_save=True),
        "trainrun sync": lambda: Trainrun(training, folder, async_save=False),
        "torch.save": lambda: Blocking(lambda path: torch.save(training.tree(), path), folder),
        "safetensors": lambda: Blocking(lambda path: save_file(training.flat(), path), folder),
        "dcp async": lambda: Dcp(training, folder),
    }
    return made[name]()


def serve(connection: Connection, name: str, folder: Path, given: argparse.Namespace) -> None:
    """The process of one way: a turn whenever it is told to, until it is told that there are no more."""
    torch.set_num_threads(given.threads)
    set_allocator("keep")
    training = Training(given.layers, given.width, given.batch, given.device)
    training.step()
    folder.mkdir()
    way = way_of(name, training, folder)
    connection.send(sum(tensor.nbytes for tensor in training.flat().values()))
    while connection.recv():
        connection.send(one_turn(training, way))


def show(name: str, turns: list[Turn]) -> None:
    def middle(values: list[float]) -> float:
        return statistics.median(values)

    stall, durable, lost = (middle([getattr(t, key) for t in turns]) for key in ("stall", "durable", "lost"))
    worst, step = middle([t.worst / t.median for t in turns]), 1e3 * middle([t.median for t in turns])
    print(f"{name:20} stall {1e3 * stall:7.0f} ms   worst later step {worst:5.2f} x {step:4.0f} ms   "
          f"durable after {durable:6.2f} s   lost {lost:6.2f} s   ({len(turns)})", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    add_device(parser)
    parser.add_argument("--only", nargs="+", default=WAYS, choices=WAYS, metavar="WAY")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        for name in given.only:
            here, there = context.Pipe()
            context.Process(
                target=serve, args=(there, name, Path(temporary, name), given), daemon=True
            ).start()
            there.close()  # so that the end of a child is noticed
            connections[name], size = here, here.recv()
        print(f"{size / 1e9:.2f} GB, {given.threads} threads, torch {torch.__version__}", flush=True)
        results: dict[str, list[Turn]] = {name: [] for name in given.only}
        for number in range(given.rounds + 1):
            for name, connection in connections.items():
                connection.send(True)
                turn = connection.recv()
                results[name] += [turn] if number else []
                show(f"{number if number else 'first'}: {name}"[:20], [turn])
        for connection in connections.values():
            connection.send(False)
        for child in multiprocessing.active_children():
            child.join()
        print(f"\nmedians of {given.rounds} rounds, load {os.getloadavg()[0]:.1f}")
        for name, turns in results.items():
            show(name, turns)


if __name__ == "__main__":
    main()
