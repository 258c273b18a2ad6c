"""The optimizer and the schedule of one rank, from their nodes."""

from __future__ import annotations

import copy

import torch
from torch import nn

from trainrun.cadence import Rhythm
from trainrun.config import RunConfig
from trainrun.instantiate import CHECK, locate
from trainrun.monitor.readable import counted
from trainrun.optimizer.build import build_optimizer
from trainrun.scheduler.build import Warmup, build_schedule, resolve_warmup
from trainrun.scheduler.scaling import scaled_lr
from trainrun.scheduler.schedule import Schedule

SCHEDULE_KEYS = (
    "warmup_steps",
    "warmup_ratio",
    "warmup_epochs",
    "lr_scaling",
    "base_batch_size",
    "metric",
    "interval",
)


def build_optimizer_of(
    config: RunConfig, model: nn.Module, world_size: int, notes: list[str]
) -> torch.optim.Optimizer:
    node = {name: copy.copy(value) for name, value in config.optimizer.items()}
    rule = (config.scheduler or {}).get("lr_scaling", "none")
    if "lr" in node and rule != "none":
        batch = config.data.batch_size * config.trainer.accumulate_grad_batches * world_size
        base = config.scheduler["base_batch_size"]
        node["lr"], note = scaled_lr(node["lr"], rule, batch, base)
        notes.append(note)
        if node.get("adamw_lr") is not None:  # the other half of Muon
            node["adamw_lr"], _ = scaled_lr(node["adamw_lr"], rule, batch, base)
    node.pop(CHECK, None)
    factory = locate(node.pop("_target_"), "optimizer")
    in_one_graph = config.trainer.cuda_graphs or config.trainer.compile.scope == "step"
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    optimizer, note = build_optimizer(factory, node, model, on_device=in_one_graph and on_gpu)
    notes.append(note)
    return optimizer


def warmup_steps(config: RunConfig, rhythm: Rhythm) -> int:
    """Raises ConfigError if it does not fit the length of the run, for which no model is needed."""
    steps, ratio, epochs = (
        (config.scheduler or {}).get(f"warmup_{unit}") for unit in ("steps", "ratio", "epochs")
    )
    return resolve_warmup(Warmup(steps or 0, ratio, epochs), rhythm.total_steps, rhythm.steps_per_epoch)


def build_schedule_of(config: RunConfig, optimizer: torch.optim.Optimizer, rhythm: Rhythm) -> Schedule:
    node = dict(config.scheduler or {"_target_": "trainrun.scheduler.curves.constant"})
    own = {name: node.pop(name, None) for name in SCHEDULE_KEYS}
    steps = warmup_steps(config, rhythm)
    node.pop(CHECK, None)
    target = locate(node.pop("_target_"), "scheduler")
    return build_schedule(
        optimizer,
        target,
        node,
        steps,
        rhythm.total_steps,
        own["metric"],
        rhythm.steps_per_epoch,
        own["interval"] == "epoch",
    )


def describe_update(config: RunConfig, schedule: Schedule) -> str:
    """Optimizer, learning rate and schedule in one line: `AdamW, lr 0.001, schedule cosine, 45 warmup steps`."""
    names = [(node or {}).get("_target_", "constant") for node in (config.optimizer, config.scheduler)]
    optimizer, curve = (str(name).rpartition(".")[2] for name in names)
    rates = " and ".join(f"{rate:g}" for rate in dict.fromkeys(schedule.peak_lrs))
    warmup = f", {counted(schedule.warmup_steps, 'warmup step')}" if schedule.warmup_steps else ""
    return f"{optimizer}, lr {rates}, schedule {curve}{warmup}"
