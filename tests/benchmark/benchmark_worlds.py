"""Worlds in which the cost of everything is known: for a diagnosis or a search without a single real second."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import pstdev
from typing import Any

import torch
from torch.utils.data import Dataset

from trainrun.benchmark.diagnose.ablations import CACHED, NO_LOGGING, NO_UPDATE
from trainrun.benchmark.worker_messages import SAVING, VALIDATING, Load, RunInfo, Save, Turn, Validate
from trainrun.benchmark.worker_process import WorkerFailed
from trainrun.config.schema import RunConfig

SETTINGS = ["seed=1", "model=cnn", "data.batch_size=64", "precision=bf16-mixed", "trainer.num_threads=1"]
LONGEST = 16  # positions of a sample that is not cut
OFTEN = ("checkpoint.every_n_train_steps=2", "checkpoint.async_save=false")


@dataclass(frozen=True)
class Costs:
    """Seconds: fixed and for an item of a step's computing, and what is planted. stall: of one item in 64, at random.
    islands, threads, bucket, fp32: what part of the computing is left without them. fill: of a cache, at the start."""

    fixed: float = 0.002
    item: float = 2e-4
    update: float = 0.0005
    read: float = 2e-6
    stall: float = 0.0
    log: float = 1e-5
    save: float = 0.0
    validate: float = 0.01
    islands: float = 1.0
    threads: float = 1.05
    bucket: float = 1.0
    fp32: float = 1.0
    compiled: float = 0.0
    fill: float = 0.0
    reads_ahead: bool = False


class World:
    """Replaces `WorkerPool`, on a clock of its own.

    noise: of one turn; twist: of one process; drift: of the machine over a minute, which all meet. fails: a setting
    whose runs end at once.
    """

    def __init__(self, costs: Costs, noise: float = 0.0, seed: int = 0, twist: float = 0.0, drift: float = 0.0,
                 total_steps: int | None = 9000, fails: str = "") -> None:  # fmt: skip
        self.costs, self.noise, self.twist, self.drift = costs, noise, twist, drift
        self.total_steps, self.fails = total_steps, fails
        self.now, self.draw = 0.0, random.Random(seed)
        self.phase = self.draw.uniform(0, 2 * math.pi)
        self.started: list[RunConfig] = []
        self.alive = 0

    def clock(self) -> float:
        return self.now

    def start(self, config: RunConfig, limit: float = math.inf) -> Run:
        seconds = 0.7 + (self.costs.fill if config.data.cache == "memory" else 0.0)
        self.now += min(seconds, limit)
        if seconds > limit:
            raise WorkerFailed(f"it did not come to its first step in {limit:.0f} s")
        self.started.append(config)
        if self.fails and self.fails in str(config):
            raise WorkerFailed("it fell over")
        return Run(self, config, seconds)

    def machine(self) -> float:
        return math.exp(self.drift * math.sin(2 * math.pi * self.now / 60 + self.phase))


class Run:
    """Replaces `WorkerProcess`."""

    limit = math.inf

    def __init__(self, world: World, config: RunConfig, start_seconds: float) -> None:
        self.world, self.config, self.start_seconds = world, config, start_seconds
        self.batch, self.bucket = config.data.batch_size, config.data.padding == "bucket"
        self.length = config.data.max_sequence_length or LONGEST
        self.own = math.exp(world.draw.gauss(0, world.twist))
        ahead = world.costs.reads_ahead
        threads = config.trainer.num_threads
        self.info = RunInfo(
            unit="samples", engine="workers", number=0, num_threads=threads if isinstance(threads, int) else 1,
            device="cpu", world_size=1, total_steps=world.total_steps, val_every=450.0, memory_bytes=2**34,
            precision=config.precision.mode, reads_ahead=ahead, layers=("Linear",),
        )  # fmt: skip
        world.alive += 1

    def seconds_of_step(self, parts: list[str]) -> Mapping[str, float]:
        """Seconds of each phase of a step, without noise; `parts` are ablations."""
        costs, config = self.world.costs, self.config
        computing = costs.fixed + costs.item * self.batch
        computing *= costs.islands if "one_type" in parts else 1.0
        computing *= costs.threads if "threads=2" in parts or config.trainer.num_threads == 2 else 1.0
        computing *= costs.bucket if self.bucket else 1.0
        computing *= self.length / LONGEST
        computing /= costs.fp32 if config.precision.mode == "32-true" else 1.0
        updates = NO_UPDATE not in parts
        slow_update = (config.optimizer or {}).get("fused") is False
        update = costs.update if slow_update else min(costs.update, 0.0005)
        reads = CACHED not in parts and config.data.cache == "none"
        logs_often = NO_LOGGING not in parts and config.monitor.log_every_n_steps != 500
        every = config.checkpoint.every_n_train_steps
        saves = SAVING in parts and isinstance(every, int)
        save = costs.save * 2 / every if saves and not config.checkpoint.async_save else 0.0
        validates = VALIDATING in parts
        return {
            "forward": computing, "optimizer": updates * update, "data": reads * costs.read * self.batch,
            "logging": logs_often * costs.log, "checkpoint": save, "validation": validates * costs.validate / 450,
        }  # fmt: skip

    def train(self, steps: int, warm: int = 2, variant: str = "", most_seconds: float = math.inf) -> Turn:
        costs, parts, draw = self.world.costs, variant.split("+"), self.world.draw
        luck = math.exp(draw.gauss(0, self.world.noise)) * self.own * self.world.machine()
        phases = {name: steps * seconds * luck for name, seconds in self.seconds_of_step(parts).items()}
        stalls = [0.0] * steps
        if costs.stall and phases["data"]:
            stall = costs.stall / (4 if self.config.data.num_workers == 4 else 1)
            stalls = [stall * sum(draw.random() < 1 / 64 for _ in range(self.batch)) for _ in stalls]
            phases["data"] += sum(stalls)
        step = sum(phases.values()) / steps
        deviation = pstdev(stalls) / step
        seconds = sum(phases.values())
        self.world.now += seconds * (1 + warm / steps)
        items = steps * self.batch
        padded = costs.bucket < 1 and not self.bucket
        reads = CACHED not in parts
        return Turn(
            seconds, steps, items, 0.5 * seconds, 10**8, phases, costs.compiled,
            positions=reads * (1 + padded) * items * self.length, real_positions=reads * items * self.length,
            step_deviation=deviation,
        )  # fmt: skip

    def request(self, message: Any, limit: float | None = None) -> Turn:
        costs = self.world.costs
        if isinstance(message, Load):
            seconds = message.steps * max(self.seconds_of_step([])["data"], 1e-9)
            return Turn(seconds, message.steps, 0.0, seconds)
        assert isinstance(message, Save | Validate)
        seconds = costs.validate if isinstance(message, Validate) else costs.save
        self.world.now += seconds
        return Turn(seconds, 0, 0.0)

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


class Named(Numbers):
    """Samples with a name for each value."""

    thread_safe = True

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        rows, labels = super().__getitem__(index)
        return {"rows": rows, "labels": labels}


class OwnLoss(torch.nn.Module):
    """A model that computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 3)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(rows)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
