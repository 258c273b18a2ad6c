"""The optimizer, what guards or moves its update, and the schedule, from their nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainrun.config.schema import RunConfig
from trainrun.formatting import counted
from trainrun.instantiate import CHECK, locate, named_nodes
from trainrun.interfaces import Precision
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.scheduler.build_schedule import build_schedule, resolve_warmup, scaled_lr
from trainrun.scheduler.schedule import Schedule
from trainrun.training.triggers import Intervals

if TYPE_CHECKING:
    from trainrun.training.named_optimizers import JoinedSchedules

CONSTANT = {"_target_": "trainrun.scheduler.curves.constant"}
WARMUPS = ("warmup_steps", "warmup_ratio", "warmup_epochs")
SCHEDULE_KEYS = (*WARMUPS, "lr_scaling", "base_batch_size", "metric", "interval")


def build_optimizer_of(config: RunConfig, model: nn.Module, world_size: int, notes: list[str]) -> Optimizer:
    return optimizer_of_node(
        config, config.optimizer, config.scheduler or {}, "optimizer", model, world_size, notes
    )


def optimizer_of_node(
    config: RunConfig, node: Any, scheduler: Any, key: str, model: nn.Module, world_size: int, notes: list[str],
    params: list[nn.Parameter] | None = None,
) -> Optimizer:  # fmt: skip
    """params: of one of several; None are those of the model."""
    node = {name: copy.copy(value) for name, value in node.items() if name not in ("params", CHECK)}
    rule = scheduler.get("lr_scaling", "none")
    if "lr" in node and rule != "none":
        batch = config.data.batch_size * config.trainer.accumulate_grad_batches * world_size
        base = scheduler["base_batch_size"]
        node["lr"], note = scaled_lr(node["lr"], rule, batch, base)
        notes.append(note)
        if node.get("adamw_lr") is not None:  # the other half of Muon
            node["adamw_lr"], _ = scaled_lr(node["adamw_lr"], rule, batch, base)
    factory = locate(node.pop("_target_"), key)
    optimizer, note = build_optimizer(factory, node, model, params, closures=bool(config.step))
    notes.append(note.replace("optimizer:", f"{key}:", 1))
    return optimizer


def build_update(
    config: RunConfig, model: nn.Module, precision: Precision, build: Callable[[], Optimizer]
) -> tuple[Optimizer, Precision]:
    """The optimizer, and the precision that calls it: on copies of the weights, in the backward, or as usual."""
    master = torch.float32 if config.precision.master_weights else None
    host = torch.device("cpu") if config.trainer.cpu_offload == "optimizer" else None
    if master is not None or host is not None:
        from trainrun.precision.master_weights import Shadow

        shadow = Shadow(precision, model, master, host)
        return shadow.built(build), shadow
    optimizer = build()
    if config.trainer.optimizer_in_backward:
        from trainrun.precision.in_backward import InBackward

        return optimizer, InBackward(precision, optimizer, model)
    return optimizer, precision


def warmup_steps(config: RunConfig, rhythm: Intervals, node: Any = None) -> int:
    """Raises ConfigError if it does not fit the length of the run, for which no model is needed."""
    node = node or config.scheduler or {}
    steps, ratio, epochs = (node.get(name) for name in WARMUPS)
    return resolve_warmup(steps, ratio, epochs, rhythm.total_steps, rhythm.steps_per_epoch)


def build_schedule_of(config: RunConfig, optimizer: Optimizer, rhythm: Intervals) -> Schedule:
    return schedule_of_node(config, optimizer, config.scheduler or CONSTANT, rhythm)


def schedule_of_node(config: RunConfig, optimizer: Optimizer, node: Any, rhythm: Intervals) -> Schedule:
    steps = warmup_steps(config, rhythm, node)
    left_out = (*SCHEDULE_KEYS, CHECK, "_target_")
    keywords = {name: value for name, value in node.items() if name not in left_out}
    return build_schedule(
        optimizer, locate(node["_target_"], "scheduler"), keywords, steps, rhythm.total_steps, node.get("metric"),
        rhythm.steps_per_epoch, node.get("interval") == "epoch",
    )  # fmt: skip


def describe_update(config: RunConfig, schedule: Schedule | JoinedSchedules) -> str:
    """Optimizer, learning rate and schedule in one line: `AdamW, lr 0.001, schedule cosine, 45 warmup steps`."""
    optimizer, curve = (_named_targets(node) for node in (config.optimizer, config.scheduler))
    rates = " and ".join(f"{rate:g}" for rate in dict.fromkeys(schedule.peak_lrs))
    warmup = f", {counted(schedule.warmup_steps, 'warmup step')}" if schedule.warmup_steps else ""
    return f"{optimizer}, lr {rates}, schedule {curve}{warmup}"


def _named_targets(node: Any) -> str:
    """`AdamW`; of several by name `generator Adam, discriminator SGD`; `constant` if there is none."""
    if several := named_nodes(node):
        return ", ".join(f"{name} {_named_targets(inner)}" for name, inner in several.items())
    return str((node or {}).get("_target_") or "constant").rpartition(".")[2]
