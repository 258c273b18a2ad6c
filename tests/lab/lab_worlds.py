"""Worlds in which the speed of every setting is known: for trying a search without a single real second."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path as FilePath

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.utils.data import Dataset

from trainrun.config import RunConfig
from trainrun.lab.bench import SubjectFailed
from trainrun.lab.orders import Path, Ready, Turn

Speed = Callable[[RunConfig], float]  # items a second; 0 or less: the run cannot start


class World:
    """Fills `Stand`. noise: of one turn; twist: of one process, for all of its life; drift: of the machine over
    a minute, which all meet. wrong: configs whose training is another one."""

    def __init__(self, folder: FilePath, speed: Speed, noise: float = 0.0, twist: float = 0.0, drift: float = 0.0,
                 wrong: Callable[[RunConfig], bool] = lambda config: False, seed: int = 0,
                 start_seconds: float = 0.5, total_steps: int | None = 100_000) -> None:  # fmt: skip
        self.speed, self.noise, self.twist, self.drift, self.wrong = speed, noise, twist, drift, wrong
        self.start_seconds, self.total_steps = start_seconds, total_steps
        self.draw = random.Random(seed)
        self.now, self.validation_seconds = 0.0, 0.1
        self.weather = self.draw.uniform(0, 2 * math.pi)
        self.alive = 0
        self.most_alive = 0
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
            raise SubjectFailed("it fell over")
        return Runner(self, config)

    def machine(self) -> float:
        return math.exp(self.drift * math.sin(2 * math.pi * self.now / 60 + self.weather))


class Runner:
    """Fills `Contender`."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self.world, self.config = world, config
        self.own = math.exp(world.draw.gauss(0, world.twist))
        self.seconds = 0.1
        self.start_seconds = world.start_seconds
        devices = config.parallel.devices
        self.facts = Ready(
            unit="samples", engine="", number=0, num_threads=2, num_parameters=4, device="cpu",
            world_size=devices if isinstance(devices, int) else 1, steps_per_epoch=None,
            total_steps=world.total_steps, val_every=45.0, layers=("Conv2d", "Linear"),
            memory_bytes=10**10, thread_safe=True,
        )  # fmt: skip
        world.alive += 1
        world.most_alive = max(world.most_alive, world.alive)

    def trace(self, steps: int) -> Path:
        self.world.now += 0.2
        name = "wrong" if self.world.wrong(self.config) else "right"
        loss = 1.005 if self.config.precision.mode == "bf16-mixed" else 1.0
        return Path((loss,) * steps, (32.0,) * steps, str(self.world.updates / name))

    def pace(self, seconds: float) -> None:
        self.world.now += 2 * seconds
        self.seconds = seconds

    def turn(self) -> Turn:
        self.world.now += 1.1 * self.seconds
        luck = math.exp(self.world.draw.gauss(0, self.world.noise))
        speed = self.world.speed(self.config) * self.own * luck * self.world.machine()
        return Turn(self.seconds, 10, speed * self.seconds, peak_bytes=10**8)

    def load(self, batches: int) -> Turn:
        self.world.now += 0.05
        return Turn(0.001 * batches, batches, 32.0 * batches)

    def validate(self) -> Turn:
        self.world.now += self.world.validation_seconds
        return Turn(self.world.validation_seconds, 0, 0.0)

    def close(self) -> None:
        self.world.alive -= 1


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Samples that are read one by one."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((16,), index / 400), index % 3


class Sleepers(Numbers):
    """Samples that are waited for, and may be by several threads."""

    thread_safe = True

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return super().__getitem__(index)


class Written(Sleepers):
    """And what was read is in a file, an index a line."""

    def __init__(self, file: str) -> None:
        self._file = file

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)
