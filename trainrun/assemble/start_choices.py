"""Resolve `auto` settings at the start of a run: by rules, and by measurement if `trainrun.autotune` is installed.

Choices that change results (number type, threads) are made before the rest is built, and stored in RUN.json. A
resume reads them from there.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from trainrun.config.schema import RunConfig, replace_values
from trainrun.instantiate import import_satellite
from trainrun.interfaces import Batches, Parallel
from trainrun.precision import autocast
from trainrun.runtime.machine import can_set_allocator, read_free_bytes, set_allocator
from trainrun.training.components import Components

AMPLE: Final = 1 / 3  # of the free memory may come: holes that fit no other tensor can double it
OUTPUTS: Final = 1 / 2  # of the free memory may be filled by what a model gives out, and its loss
UPDATE_BYTES: Final = 16  # of a parameter, to come: its gradient, two averages, and one of its values
WITHOUT: Final = "what is left open is chosen by rules alone, and no memory is forecast"

Chosen = dict[str, str]  # what RUN.json holds, by name


def read_earlier_choices(identity: dict[str, Any], training: bool = False) -> Chosen:
    """Return the automatic choices of earlier sessions. identity: the content of RUN.json.

    training: include the choices that only a training uses.
    """
    names = ("precision", "logits_bytes", *["num_threads"] * training)
    return {name: str(identity[name]) for name in names if name in identity}


def import_autotune(lines: list[str]) -> ModuleType | None:
    """Return the module that measures; None, with a line added to `lines`, if it is not installed."""
    return import_satellite("autotune.start", WITHOUT, lines.append)


def resolve_precision_and_threads(config: RunConfig, model: nn.Module, task: Any, train: Batches, parallel: Parallel,
                   chosen: Chosen, measures: bool, num_batches: float, notes: list[str]) -> RunConfig:  # fmt: skip
    """Return the config with `precision=auto` resolved, and set the number of threads of this process.

    chosen: the earlier choices of a resumed run; new choices are added to it. num_batches: micro-batches of the
        whole run. Every rank calls this function and makes the same choices.
    """
    open_type = config.precision.mode == "auto"
    wanted = []
    if open_type and "precision" not in chosen and not autocast.emulates_bfloat16(parallel.device):
        wanted.append("precision")
    if config.trainer.num_threads == "auto" and "num_threads" not in chosen:
        wanted.append("num_threads")
    if measures and wanted and (tuner := import_autotune([])):
        tuner.choose_numbers(config, model, task, train, parallel, num_batches, wanted, chosen, notes)
    if open_type and "precision" not in chosen:
        tiny = autocast.is_tiny_step(model, config.data.batch_size)
        mode, why = autocast.choose_mode_by_rule(parallel.device, tiny)
        chosen["precision"] = mode
        notes.append(f"precision: {mode}, not measured: {why}")
    number = int(chosen.get("num_threads", 0))
    if config.trainer.num_threads == "auto" and 0 < number < torch.get_num_threads():
        torch.set_num_threads(number)
        if "num_threads" not in wanted:
            notes.append(f"trainer.num_threads: {number}, as the run began")
    if not open_type:
        return config
    return replace_values(config, {"precision.mode": chosen["precision"]})


def set_output_memory_limit(task: Any, model: nn.Module, parallel: Parallel, chosen: Chosen) -> None:
    """Set how many bytes a task that computes its outputs in chunks may use for them at once.

    Chunks change the last bits of a loss. The number is therefore chosen once, at the start of the run, by the rank
    with the least free memory. Half of the memory that gradients and optimizer leave free is kept for the
    activations.
    """
    limit_memory = getattr(task, "limit_memory", None)
    if not callable(limit_memory):
        return
    if "logits_bytes" not in chosen:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        shared_by = 1 if parallel.device.type == "cuda" else parallel.local_world_size
        free = read_free_bytes(parallel.device) / shared_by - UPDATE_BYTES * trained
        chosen["logits_bytes"] = str(max(0, int(OUTPUTS * min(parallel.gather(free)))))
    limit_memory(int(chosen["logits_bytes"]))


def set_allocator_rule(run: Components) -> tuple[str, list[str]]:
    """Set what happens to freed host memory (`trainer.cpu_allocator`). Return the rule, and lines to show.

    Every rank decides for itself, because no result depends on it.
    """
    lines: list[str] = []
    coming, rule = estimate_max_step_bytes(run), run.config.trainer.cpu_allocator
    if (tuner := import_autotune(lines)) is not None:
        line, coming = tuner.memory_forecast(run, coming)
        lines.append(line)
    if rule == "auto":
        rule, line = choose_allocator_rule(run.parallel, coming)
        lines.append(line)
    if rule != "libc" and not set_allocator(rule):
        lines.append(f"trainer.cpu_allocator={rule}: the C library of this machine has no such switch")
        rule = "libc"
    return rule, [line for line in lines if line]


def choose_allocator_rule(parallel: Parallel, coming: float) -> tuple[str, str]:
    """Return the rule for `trainer.cpu_allocator=auto`, and a line to show. coming: the estimated bytes of a step."""
    if parallel.device.type != "cpu" or not can_set_allocator():
        return "libc", ""
    if coming <= AMPLE * read_free_bytes(parallel.device) / parallel.local_world_size:
        return "keep", ""
    return "libc", "trainer.cpu_allocator: libc, memory may become scarce (keep may be faster)"


def estimate_max_step_bytes(run: Components) -> float:
    """Return an upper bound of the bytes that a step of an ordinary network needs, estimated from sizes alone."""
    params = sum(param.numel() for param in run.model.parameters())
    numbers = run.config.data.batch_size * math.prod(run.data_facts.shape or (1024,))
    return 16.0 * params + 4.0 * numbers * max(1000, params / 64)
