"""The optimizer and the schedule of one rank, from their nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError
from trainrun.formatting import counted
from trainrun.instantiate import CHECK, locate, named_nodes
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.patterns import matching
from trainrun.precision.update import Update
from trainrun.scheduler.build_schedule import Warmup, build_schedule, resolve_warmup
from trainrun.scheduler.scaling import scaled_lr
from trainrun.scheduler.schedule import Schedule
from trainrun.training.triggers import Intervals

if TYPE_CHECKING:
    from trainrun.training.named_optimizers import JoinedSchedules, NamedOptimizer

CONSTANT = {"_target_": "trainrun.scheduler.curves.constant"}
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
    return _built(config, config.optimizer, config.scheduler or {}, "optimizer", model, world_size, notes)


def _built(
    config: RunConfig, node: Any, scheduler: Any, key: str, model: nn.Module, world_size: int, notes: list[str],
    params: list[nn.Parameter] | None = None,
) -> torch.optim.Optimizer:  # fmt: skip
    node = {name: copy.copy(value) for name, value in node.items() if name != "params"}
    rule = scheduler.get("lr_scaling", "none")
    if "lr" in node and rule != "none":
        batch = config.data.batch_size * config.trainer.accumulate_grad_batches * world_size
        base = scheduler["base_batch_size"]
        node["lr"], note = scaled_lr(node["lr"], rule, batch, base)
        notes.append(note)
        if node.get("adamw_lr") is not None:  # the other half of Muon
            node["adamw_lr"], _ = scaled_lr(node["adamw_lr"], rule, batch, base)
    node.pop(CHECK, None)
    factory = locate(node.pop("_target_"), key)
    optimizer, note = build_optimizer(factory, node, model, params, closures=bool(config.step))
    notes.append(note.replace("optimizer:", f"{key}:", 1))
    return optimizer


def build_named(
    config: RunConfig,
    model: nn.Module,
    rhythm: Intervals,
    notes: list[str],
    guard: Callable[[nn.Module], Update],
) -> dict[str, NamedOptimizer]:
    """Several optimizers by name; empty if there is one without. guard: the guarded update of some parameters.

    Raises ConfigError for parameters that none of them has, or two.
    """
    nodes = named_nodes(config.optimizer)
    known = dict(model.named_parameters())
    faults, owners, built = [], dict[str, str](), {}
    for name, node in nodes.items():
        try:
            names = matching(known, node["params"], f"optimizer.{name}.params")
        except ValueError as error:
            faults.append(str(error))
            continue
        if twice := [one for one in names if one in owners]:
            faults.append(f"optimizer.{name}.params: {twice[0]} is in optimizer.{owners[twice[0]]} already")
        owners |= dict.fromkeys(names, name)
    left = [name for name, param in known.items() if param.requires_grad and name not in owners]
    if nodes and left and not faults:
        faults.append(
            f"optimizer.{next(iter(nodes))}.params: {counted(len(left), 'parameter')} of the model would never be "
            f"updated ({left[0]}); name them in one of the optimizers, or freeze them"
        )
    if faults:
        raise ConfigError(*faults)
    if nodes:
        from trainrun.training.named_optimizers import NamedOptimizer
    for name, node in nodes.items():
        params = [param for one, param in known.items() if owners[one] == name]
        scheduler = schedule_node(config, name)
        optimizer = _built(config, node, scheduler, f"optimizer.{name}", model, 1, notes, params)
        schedule = _schedule(config, optimizer, scheduler, rhythm)
        built[name] = NamedOptimizer(optimizer, guard(nn.ParameterList(params)), schedule)
    return built


def schedule_node(config: RunConfig, name: str) -> dict[str, Any]:
    """The schedule of a named optimizer: its own, else the one for all, else a constant rate."""
    node = dict(config.scheduler or {})
    own = named_nodes(node)
    return dict(own.get(name, CONSTANT)) if own else node or CONSTANT


def warmup_steps(config: RunConfig, rhythm: Intervals, node: Any = None) -> int:
    """Raises ConfigError if it does not fit the length of the run, for which no model is needed."""
    node = node or config.scheduler or {}
    steps, ratio, epochs = (node.get(f"warmup_{unit}") for unit in ("steps", "ratio", "epochs"))
    return resolve_warmup(Warmup(steps or 0, ratio, epochs), rhythm.total_steps, rhythm.steps_per_epoch)


def build_schedule_of(config: RunConfig, optimizer: torch.optim.Optimizer, rhythm: Intervals) -> Schedule:
    return _schedule(config, optimizer, dict(config.scheduler or CONSTANT), rhythm)


def _schedule(config: RunConfig, optimizer: torch.optim.Optimizer, node: Any, rhythm: Intervals) -> Schedule:
    steps = warmup_steps(config, rhythm, node)
    node = dict(node)
    own = {name: node.pop(name, None) for name in SCHEDULE_KEYS}
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
