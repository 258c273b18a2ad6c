"""What `auto` leaves open at a start: by rules, and the data engine by a clock where `trainrun.autotune` is installed.

What changes the numbers (their type, threads) is chosen before the rest is built, written down in
RUN.json, and taken from there ever after; the data engine when all parts are there.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import torch
from torch import nn

from trainrun.config.schema import RunConfig
from trainrun.instantiate import satellite
from trainrun.interfaces import Parallel
from trainrun.precision.autocast import is_tiny
from trainrun.runtime.machine import can_keep, free_bytes, keep_freed_memory, return_freed_memory
from trainrun.training.components import Components

AMPLE: Final = 1 / 3  # of the free memory may come: holes that fit no other tensor can double it
NO_SWITCH: Final = "the C library of this machine has no such switch"
WITHOUT: Final = "how data is read is chosen by a rule alone"

Chosen = dict[str, str]  # what RUN.json holds, by name


def chosen_before(identity: dict[str, Any], training: bool = False) -> Chosen:
    """identity: what RUN.json holds. training: also what only a training needs."""
    names = ("precision", "num_threads") if training else ("precision",)
    return {name: str(identity[name]) for name in names if name in identity}


def choose_numbers(
    config: RunConfig, model: nn.Module, parallel: Parallel, chosen: Chosen, notes: list[str]
) -> RunConfig:
    """The config with `precision=auto` decided; this process with the number of threads that the run began with.

    chosen: what the run began with, if it did; what is chosen here is added.
    """
    number = int(chosen.get("num_threads", 0))
    if config.trainer.num_threads == "auto" and 0 < number < torch.get_num_threads():
        torch.set_num_threads(number)
        notes.append(f"trainer.num_threads: {number}, as the run began")
    if config.precision.mode != "auto":
        return config
    if "precision" not in chosen:
        from trainrun.precision.other_types import type_by_rule

        mode, why = type_by_rule(parallel.device, is_tiny(model, config.data.batch_size))
        chosen["precision"] = mode
        notes.append(f"precision: {mode}, {why}")
    precision = dataclasses.replace(config.precision, mode=chosen["precision"])
    return dataclasses.replace(config, precision=precision)


def choose_engine(run: Components) -> list[str]:
    """Decide how the data is read, and what becomes of freed memory. Returns lines to show. Every rank calls it."""
    lines = [freed_memory(run)]
    if tuner := satellite("autotune.engine_choice", WITHOUT, lines.append):
        lines.append(tuner.choose_engine(run))
    return [text for text in lines if text]


def freed_memory(run: Components) -> str:
    """Decide `trainer.cpu_allocator`, on every rank for itself: no number depends on it. Returns a line to show."""
    wanted, device = run.config.trainer.cpu_allocator, run.parallel.device
    if wanted == "keep":
        return "" if keep_freed_memory() else f"trainer.cpu_allocator: keep, but {NO_SWITCH}"
    if wanted == "return":
        done = return_freed_memory()
        return f"trainer.cpu_allocator: {'tensors of 1 MB or more go back' if done else NO_SWITCH}"
    if wanted == "auto" and device.type == "cpu" and can_keep():
        if rough_guess(run) > AMPLE * free_bytes(device) / run.parallel.local_world_size:
            return "trainer.cpu_allocator: libc, memory may become scarce (keep may be faster)"
        keep_freed_memory()
    return ""


def rough_guess(run: Components) -> float:
    """An upper bound for ordinary networks, in bytes, from sizes alone."""
    params = sum(param.numel() for param in run.model.parameters())
    numbers = run.config.data.batch_size * math.prod(run.data_facts.shape or (1024,))
    return 16.0 * params + 4.0 * numbers * max(1000, params / 64)
