"""Build the optimizer, its guarded update, and the schedule from their nodes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError
from trainrun.instantiate import CHECK, bind_faults, locate, named_nodes, rebuilt
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.optimizer.groups import GroupRules, peaks_of_groups
from trainrun.output import counted, duration
from trainrun.patterns import matching
from trainrun.precision.update import Update
from trainrun.scheduler.build_schedule import LENGTHS, build_schedule, resolve_warmup, scaled_lr
from trainrun.scheduler.schedule import Schedule
from trainrun.task.metrics.directions import resolve_direction
from trainrun.training.named_optimizers import NamedOptimizer
from trainrun.training.triggers import Intervals

if TYPE_CHECKING:
    from trainrun.training.named_optimizers import JoinedSchedules, NamedOptimizer

CONSTANT = {"_target_": "trainrun.scheduler.curves.constant"}
WARMUPS = ("warmup_steps", "warmup_ratio", "warmup_epochs")
SCHEDULE_KEYS = (*WARMUPS, "warmup_start_factor", "lr_scaling", "base_batch_size", "metric", "interval")
MOST_RATES = 3  # that are told one by one
GROUP_KEYS = ("groups", "no_decay", "layer_decay")


def optimizer_faults(key: str, node: dict[str, Any]) -> list[str]:
    """Bind a node, and each of its groups, to the signature of the target. Return a message for each fault."""
    left_out = GROUP_KEYS if key == "optimizer" else (*GROUP_KEYS, "params")
    arguments = {name: value for name, value in node.items() if name not in left_out}
    faults = bind_faults(arguments, key, ["params"], GROUP_KEYS)
    for number, group in enumerate([] if faults else node.get("groups") or []):
        options = {name: value for name, value in group.items() if name != "params"}
        faults += bind_faults(arguments | options, f"{key}.groups[{number}]", ["params"])
    return faults


def build_optimizer_of(config: RunConfig, model: nn.Module, world_size: int, notes: list[str]) -> Optimizer:
    return optimizer_of_node(
        config, config.optimizer, config.scheduler or {}, "optimizer", model, world_size, notes
    )


def optimizer_of_node(
    config: RunConfig, node: Any, scheduler: Any, key: str, model: nn.Module, world_size: int, notes: list[str],
    params: list[nn.Parameter] | None = None,
) -> Optimizer:  # fmt: skip
    """Build the optimizer of a node. params: those of a named optimizer; None for all of the model."""
    left_out = ("params", CHECK, *GROUP_KEYS)
    rules = group_rules(node, key)
    node = {name: copy.copy(value) for name, value in node.items() if name not in left_out}
    if "lr" in node and scheduler.get("lr_scaling", "none") != "none":
        scaled = scaling(config, scheduler, world_size)
        node["lr"], note = scaled(node["lr"])
        notes.append(note)
        if node.get("adamw_lr") is not None:  # the other half of Muon
            node["adamw_lr"], _ = scaled(node["adamw_lr"])
        for group in rules.groups if rules else ():
            if "lr" in group:
                group["lr"] = scaled(group["lr"])[0]
    factory = locate(node.pop("_target_"), key)
    optimizer, note = build_optimizer(factory, node, model, params, bool(config.step), rules)
    note = note.replace("optimizer:", f"{key}:", 1)
    notes += note.split("\n") if rules else [note]
    return optimizer


def scaling(config: RunConfig, scheduler: Any, world_size: int) -> Callable[[float], tuple[float, str]]:
    """Return a function that scales a learning rate by `lr_scaling`, and returns it with a note."""
    batch = config.data.batch_size * config.trainer.accumulate_grad_batches * world_size
    rule, base = scheduler["lr_scaling"], scheduler.get("base_batch_size", 256)
    return lambda lr: scaled_lr(lr, rule, batch, base)


def group_rules(node: dict[str, Any], key: str) -> GroupRules | None:
    """Return the rules for parameter groups in an optimizer's node; None without rules."""
    groups, no_decay, layer_decay = (node.get(name) for name in GROUP_KEYS)
    if not groups and no_decay in (None, "none") and layer_decay is None:
        return None
    return GroupRules(key, copy.deepcopy(groups or []), no_decay or "none", layer_decay)


def warmup_steps(config: RunConfig, rhythm: Intervals, node: Any = None) -> int:
    """Return the warm-up in steps. Raise ConfigError if it is longer than the run."""
    node = node or config.scheduler or {}
    if not any(node.get(name) for name in WARMUPS):
        return 0
    steps, ratio, epochs = (node.get(name) for name in WARMUPS)
    return resolve_warmup(steps, ratio, epochs, rhythm.total_steps, rhythm.steps_per_epoch)


def build_schedule_of(config: RunConfig, optimizer: Optimizer, rhythm: Intervals) -> Schedule:
    return schedule_of_node(config, optimizer, config.scheduler or CONSTANT, rhythm)


def schedule_of_node(config: RunConfig, optimizer: Optimizer, node: Any, rhythm: Intervals) -> Schedule:
    steps, start_factor = warmup_steps(config, rhythm, node), node.get("warmup_start_factor") or 0.0
    if start_factor and not steps:
        raise ConfigError(
            f"scheduler.warmup_start_factor={start_factor:g}: there is no warmup; set scheduler.warmup_steps, or leave "
            "it out"
        )
    if node["_target_"] == CONSTANT["_target_"] and node.get("interval") != "epoch":
        return Schedule(optimizer, None, steps, None, start_factor)
    left_out = (*SCHEDULE_KEYS, CHECK, "_target_")
    keywords = rebuilt({name: value for name, value in node.items() if name not in left_out}, "scheduler")
    if node.get("lr_scaling", "none") != "none" and (peaks := keywords.keys() & {"max_lr", "base_lr"}):
        scaled = scaling(config, node, rhythm.lengths.world_size)
        for name in peaks:
            value = keywords[name]
            keywords[name] = (
                [scaled(rate)[0] for rate in value] if isinstance(value, list) else scaled(value)[0]
            )
    if len(optimizer.param_groups) > 1 and str(node["_target_"]).startswith("torch."):
        keywords |= peaks_of_groups(keywords, optimizer)
    tried = {**keywords, "_target_": node["_target_"], "mode": "min"}  # a class of one's own may fix its mode
    if tried["_target_"].endswith(".ReduceLROnPlateau") and not bind_faults(tried, "", ["optimizer"]):
        metric, mode = node.get("metric") or "val/loss", keywords.get("mode", "auto")
        keywords["mode"] = resolve_direction("scheduler", metric, mode, node.get("metric") is not None)
        if keywords["mode"] is None:
            raise ConfigError(
                f"scheduler.mode=auto: the name {metric} does not say which way is better; set it to min or max"
            )
    return build_schedule(
        optimizer, locate(node["_target_"], "scheduler"), keywords, steps, rhythm.total_steps, node.get("metric"),
        rhythm.steps_per_epoch, node.get("interval") == "epoch", rhythm.validates, start_factor,
    )  # fmt: skip


def build_named(
    config: RunConfig, model: nn.Module, rhythm: Intervals, notes: list[str], guard: Callable[[nn.Module], Update]
) -> dict[str, NamedOptimizer]:  # fmt: skip
    """Build several named optimizers, each with its own parameters, guarded update and schedule.

    guard: builds the guarded update of some parameters. Raise ConfigError for a parameter in none or in two of them.
    """
    nodes = named_nodes(config.optimizer)
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has all its names
    faults, owners, built = [], dict[nn.Parameter, str](), {}
    for name, node in nodes.items():
        try:
            names = matching(parameters, node["params"], f"optimizer.{name}.params")
        except ValueError as error:
            faults.append(str(error))
            continue
        if twice := [param_name for param_name in names if parameters[param_name] in owners]:
            faults.append(
                f"optimizer.{name}.params: {twice[0]} is in optimizer.{owners[parameters[twice[0]]]} already"
            )
        owners |= dict.fromkeys((parameters[param_name] for param_name in names), name)
    left = [name for name, param in parameters.items() if param.requires_grad and param not in owners]
    if left and not faults:
        faults.append(
            f"optimizer.{next(iter(nodes))}.params: {counted(len(left), 'parameter')} of the model would never be "
            f"updated ({left[0]}); name them in one of the optimizers, or freeze them"
        )
    if faults:
        raise ConfigError(*faults)
    for name, node in nodes.items():
        params = [param for param in model.parameters() if owners.get(param) == name]
        scheduler = schedule_node(config, name)
        optimizer = optimizer_of_node(config, node, scheduler, f"optimizer.{name}", model, 1, notes, params)
        schedule = schedule_of_node(config, optimizer, scheduler, rhythm)
        built[name] = NamedOptimizer(optimizer, guard(nn.ParameterList(params)), schedule)
    return built


def schedule_node(config: RunConfig, name: str) -> dict[str, Any]:
    """Return the schedule of a named optimizer: its own, else the common one, else a constant rate."""
    node = config.scheduler or {}
    named_schedules = named_nodes(node)
    return dict(named_schedules.get(name, CONSTANT)) if named_schedules else node or CONSTANT


def describe_update(config: RunConfig, schedule: Schedule | JoinedSchedules) -> str:
    """Return optimizer, learning rate and schedule in one line: `AdamW, lr 0.001, schedule cosine, 45 warmup steps`."""
    optimizer, curve = (_format_optimizer_names(node) for node in (config.optimizer, config.scheduler))
    several = list(dict.fromkeys(schedule.peak_lrs))
    rates = " and ".join(f"{rate:g}" for rate in several)
    if len(several) > MOST_RATES:
        rates = f"{min(several):.3g} to {max(several):.3g}"
    warmup = f", {counted(schedule.warmup_steps, 'warmup step')}" if schedule.warmup_steps else ""
    return f"{optimizer}, lr {rates}, schedule {curve}{warmup}"


def planned_beyond(config: RunConfig, max_seconds: float | None, rhythm: Intervals) -> str:
    """Return a line if the time limit may end the run before its schedule; else "".

    The schedule does not follow the clock: a resumed run would have other learning rates than an uninterrupted one.
    """
    if max_seconds is None or rhythm.total_steps is None:
        return ""
    nodes = named_nodes(config.scheduler) or {"": config.scheduler or CONSTANT}
    planned = [node for node in nodes.values() if is_planned(node)]
    if not planned:
        return ""
    names = ", ".join(str(node["_target_"]).rpartition(".")[2] for node in planned)
    return (
        f"scheduler: {names} is planned over {rhythm.total_steps:,} steps. If the run ends earlier, after "
        f"{duration(max_seconds)}, its rate does not reach the last value. trainer.max_steps=... sets the steps"
    )


def is_planned(node: Mapping[str, Any]) -> bool:
    """Return whether a schedule depends on the length of the run."""
    names = inspect.signature(locate(node["_target_"], "scheduler")).parameters
    return any(name in names and node.get(name) is None for name in LENGTHS)


def _format_optimizer_names(node: Any) -> str:
    """Return the class name (`AdamW`); for several `generator Adam, discriminator SGD`; without one `constant`."""
    if several := named_nodes(node):
        return ", ".join(f"{name} {_format_optimizer_names(inner)}" for name, inner in several.items())
    return str((node or {}).get("_target_") or "constant").rpartition(".")[2]
