"""Worlds in which the speed of every setting is known: for trying a search without a single real second."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.utils.data import Dataset

from trainrun.benchmark.worker_messages import FirstSteps, Load, Message, RunInfo, TraceSteps, Train, Turn
from trainrun.benchmark.worker_process import WorkerFailed
from trainrun.config.schema import RunConfig

Speed = Callable[[RunConfig], float]  # items a second; 0 or less: the run cannot start


class World:
    """Its `start` replaces `WorkerPool.start`, on a clock of its own. noise: of one turn; twist: of one process; drift:
    of the machine over a minute, which all meet. wrong: configs whose training is another one. load_seconds: of a
    batch that is not in a cache."""

    def __init__(self, folder: Path, speed: Speed, noise: float = 0.0, twist: float = 0.0, drift: float = 0.0,
                 wrong: Callable[[RunConfig], bool] = lambda config: False, seed: int = 0,
                 start_seconds: float = 0.5, total_steps: int | None = 100_000,
                 device: str = "cpu", load_seconds: float = 0.001) -> None:  # fmt: skip
        self.speed, self.noise, self.twist, self.drift, self.wrong = speed, noise, twist, drift, wrong
        self.start_seconds, self.total_steps, self.device = start_seconds, total_steps, device
        self.load_seconds = load_seconds
        self.draw = random.Random(seed)
        self.now, self.phase = 0.0, self.draw.uniform(0, 2 * math.pi)
        self.alive = self.most_alive = 0
        self.started: list[RunConfig] = []
        self.updates = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, sign in (("right", 1.0), ("wrong", -1.0)):
            save_file({"weight": np.full(4, sign, np.float32)}, folder / name)

    def clock(self) -> float:
        return self.now

    def start(self, config: RunConfig, limit: float) -> Runner:
        self.now += self.start_seconds
        self.started.append(config)
        if self.speed(config) <= 0:
            raise WorkerFailed("it fell over")
        return Runner(self, config)

    def machine(self) -> float:
        return math.exp(self.drift * math.sin(2 * math.pi * self.now / 60 + self.phase))


class Runner:
    """Replaces `WorkerProcess`."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self.world, self.config = world, config
        self.own = math.exp(world.draw.gauss(0, world.twist))
        self.start_seconds = world.start_seconds
        devices = config.parallel.devices
        self.info = RunInfo(
            unit="samples", engine="", number=0, num_threads=2, device=world.device,
            world_size=devices if isinstance(devices, int) else 1, total_steps=world.total_steps, val_every=45.0,
            layers=("Conv2d", "Linear"), memory_bytes=10**10, thread_safe=True,
        )  # fmt: skip
        world.alive += 1
        world.most_alive = max(world.most_alive, world.alive)

    def ask(self, message: Message, limit: float = 0.0) -> Any:
        if isinstance(message, TraceSteps):
            self.world.now += 0.2
            name = "wrong" if self.world.wrong(self.config) else "right"
            loss = 1.005 if self.config.precision.mode == "bf16-mixed" else 1.0
            return FirstSteps(
                (loss,) * message.steps, (32.0,) * message.steps, str(self.world.updates / name)
            )
        if isinstance(message, Load):
            self.world.now += 0.05
            seconds = self.world.load_seconds * message.batches if self.config.data.cache == "none" else 0.0
            return Turn(seconds, message.batches, 32.0 * message.batches)
        assert isinstance(message, Train)
        assert message.restart  # turns that are compared start from the same numbers
        luck = math.exp(self.world.draw.gauss(0, self.world.noise))
        speed = self.world.speed(self.config) * self.own * luck * self.world.machine()
        seconds = 10 * message.steps / speed
        self.world.now += 1.1 * seconds
        return Turn(seconds, message.steps, 10.0 * message.steps, peak_bytes=10**8)

    def close(self) -> None:
        self.world.alive -= 1


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Samples that are read one by one."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((16,), index / 400), index % 3


class Sleepers(Numbers):
    """Samples that are waited for, by several threads if they like."""

    thread_safe = True

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return super().__getitem__(index)


class Written(Sleepers):
    """Samples whose indices are written to a file, one a line."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)
