"""Build the optimizer and the schedule from their nodes; for several named optimizers, also their updates."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError
from trainrun.instantiate import CHECK, build_inner_nodes, check_node_arguments, import_target, named_nodes
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.optimizer.groups import GroupRules, peak_rates
from trainrun.output import format_count, format_duration
from trainrun.patterns import match_names
from trainrun.precision.update import Update
from trainrun.scheduler.build_schedule import LENGTHS, build_schedule, resolve_warmup, scale_learning_rate
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


def check_update_nodes(config: RunConfig) -> list[str]:
    """Return a message for each argument that an optimizer or a schedule does not take."""
    faults: list[str] = []
    for name, node in (named_nodes(config.optimizer) or {"": config.optimizer or {}}).items():
        faults += check_optimizer_node(f"optimizer.{name}".rstrip("."), node)
    for name, node in (named_nodes(config.scheduler) or {"": config.scheduler or {}}).items():
        faults += check_schedule_node(f"scheduler.{name}".rstrip("."), node)
    return faults


def check_optimizer_node(key: str, node: dict[str, Any]) -> list[str]:
    """Bind a node, and each of its parameter groups, to the signature of the target. Return a message for each
    fault.
    """
    left_out = GROUP_KEYS if key == "optimizer" else (*GROUP_KEYS, "params")
    arguments = {name: value for name, value in node.items() if name not in left_out}
    faults = check_node_arguments(arguments, key, ["params"], GROUP_KEYS)
    for number, group in enumerate([] if faults else node.get("groups") or []):
        options = {name: value for name, value in group.items() if name != "params"}
        faults += check_node_arguments(arguments | options, f"{key}.groups[{number}]", ["params"])
    return faults


def check_schedule_node(key: str, node: dict[str, Any]) -> list[str]:
    """Bind a node to the signature of its target. Return a message for each fault. The run fills in its lengths."""
    arguments = {name: value for name, value in node.items() if name not in SCHEDULE_KEYS}
    if not arguments.get("_target_") or arguments == CONSTANT:
        return []
    filled_in = tuple(f"{key}.{name}: " for name in LENGTHS if name not in arguments)
    faults = check_node_arguments(arguments, key, ["optimizer"], SCHEDULE_KEYS)
    return [fault for fault in faults if not fault.startswith(filled_in)]


def build_config_optimizer(
    config: RunConfig, model: nn.Module, world_size: int, notes: list[str]
) -> Optimizer:
    return build_node_optimizer(
        config, config.optimizer, config.scheduler or {}, "optimizer", model, world_size, notes
    )


def build_node_optimizer(
    config: RunConfig, node: Any, scheduler: Any, key: str, model: nn.Module, world_size: int, notes: list[str],
    params: list[nn.Parameter] | None = None,
) -> Optimizer:  # fmt: skip
    """Build the optimizer of a node. params: the parameters of a named optimizer; None for all of the model."""
    left_out = ("params", CHECK, *GROUP_KEYS)
    rules = build_group_rules(node, key)
    node = {name: copy.copy(value) for name, value in node.items() if name not in left_out}
    if "lr" in node and scheduler.get("lr_scaling", "none") != "none":
        scaled = build_rate_scaling(config, scheduler, world_size)
        node["lr"], note = scaled(node["lr"])
        notes.append(note)
        if node.get("adamw_lr") is not None:  # the other half of Muon
            node["adamw_lr"], _ = scaled(node["adamw_lr"])
        for group in rules.groups if rules else ():
            if "lr" in group:
                group["lr"] = scaled(group["lr"])[0]
    factory = import_target(node.pop("_target_"), key)
    optimizer, note = build_optimizer(factory, node, model, params, bool(config.step), rules)
    note = note.replace("optimizer:", f"{key}:", 1)
    notes += note.split("\n") if rules else [note]
    return optimizer


def build_rate_scaling(
    config: RunConfig, scheduler: Any, world_size: int
) -> Callable[[float], tuple[float, str]]:
    """Return a function that scales a learning rate by `lr_scaling`. It returns the rate and a note."""
    batch = config.data.batch_size * config.trainer.accumulate_grad_batches * world_size
    rule, base = scheduler["lr_scaling"], scheduler.get("base_batch_size", 256)
    return lambda lr: scale_learning_rate(lr, rule, batch, base)


def build_group_rules(node: dict[str, Any], key: str) -> GroupRules | None:
    """Return the rules of an optimizer's node that put parameters into groups; None without rules."""
    groups, no_decay, layer_decay = (node.get(name) for name in GROUP_KEYS)
    if not groups and no_decay in (None, "none") and layer_decay is None:
        return None
    return GroupRules(key, copy.deepcopy(groups or []), no_decay or "none", layer_decay)


def count_warmup_steps(config: RunConfig, rhythm: Intervals, node: Any = None) -> int:
    """Return the length of the warm-up in steps. Raise ConfigError if it is longer than the run."""
    node = node or config.scheduler or {}
    if not any(node.get(name) for name in WARMUPS):
        return 0
    steps, ratio, epochs = (node.get(name) for name in WARMUPS)
    return resolve_warmup(steps, ratio, epochs, rhythm.total_steps, rhythm.steps_per_epoch)


def build_config_schedule(config: RunConfig, optimizer: Optimizer, rhythm: Intervals) -> Schedule:
    return build_node_schedule(config, optimizer, config.scheduler or CONSTANT, rhythm)


def build_node_schedule(config: RunConfig, optimizer: Optimizer, node: Any, rhythm: Intervals) -> Schedule:
    steps, start_factor = count_warmup_steps(config, rhythm, node), node.get("warmup_start_factor") or 0.0
    if start_factor and not steps:
        raise ConfigError(
            f"scheduler.warmup_start_factor={start_factor:g}: there is no warmup; set scheduler.warmup_steps, or leave "
            "it out"
        )
    if node["_target_"] == CONSTANT["_target_"] and node.get("interval") != "epoch":
        return Schedule(optimizer, None, steps, None, start_factor)
    left_out = (*SCHEDULE_KEYS, CHECK, "_target_")
    keywords = build_inner_nodes(
        {name: value for name, value in node.items() if name not in left_out}, "scheduler"
    )
    if node.get("lr_scaling", "none") != "none" and (peaks := keywords.keys() & {"max_lr", "base_lr"}):
        scaled = build_rate_scaling(config, node, rhythm.lengths.world_size)
        for name in peaks:
            value = keywords[name]
            keywords[name] = (
                [scaled(rate)[0] for rate in value] if isinstance(value, list) else scaled(value)[0]
            )
    if len(optimizer.param_groups) > 1 and str(node["_target_"]).startswith("torch."):
        keywords |= peak_rates(keywords, optimizer)
    tried = {**keywords, "_target_": node["_target_"], "mode": "min"}  # a class of one's own may fix its mode
    if tried["_target_"].endswith(".ReduceLROnPlateau") and not check_node_arguments(
        tried, "", ["optimizer"]
    ):
        metric, mode = node.get("metric") or "val/loss", keywords.get("mode", "auto")
        keywords["mode"] = resolve_direction("scheduler", metric, mode, node.get("metric") is not None)
        if keywords["mode"] is None:
            raise ConfigError(
                f"scheduler.mode=auto: the name {metric} does not say whether lower or higher is better; use min or max"
            )
    target = import_target(node["_target_"], "scheduler")
    return build_schedule(
        optimizer, target, keywords, steps, rhythm.total_steps, node.get("metric"),
        rhythm.steps_per_epoch, node.get("interval") == "epoch", rhythm.validates, start_factor,
    )  # fmt: skip


def build_named_optimizers(
    config: RunConfig, model: nn.Module, rhythm: Intervals, notes: list[str], guard: Callable[[nn.Module], Update]
) -> dict[str, NamedOptimizer]:  # fmt: skip
    """Build several named optimizers, each with its own parameters, update and schedule.

    guard: builds the update of some parameters. Raise ConfigError for a parameter in none or in two of the
        optimizers.
    """
    nodes = named_nodes(config.optimizer)
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has all its names
    faults, owners, built = [], dict[nn.Parameter, str](), {}
    for name, node in nodes.items():
        try:
            names = match_names(parameters, node["params"], f"optimizer.{name}.params")
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
            f"optimizer.{next(iter(nodes))}.params: {format_count(len(left), 'parameter')} of the model would never be "
            f"updated ({left[0]}); add them to one of the optimizers, or freeze them"
        )
    if faults:
        raise ConfigError(*faults)
    for name, node in nodes.items():
        params = [param for param in model.parameters() if owners.get(param) == name]
        scheduler = find_schedule_node(config, name)
        optimizer = build_node_optimizer(
            config, node, scheduler, f"optimizer.{name}", model, 1, notes, params
        )
        schedule = build_node_schedule(config, optimizer, scheduler, rhythm)
        built[name] = NamedOptimizer(optimizer, guard(nn.ParameterList(params)), schedule)
    return built


def find_schedule_node(config: RunConfig, name: str) -> dict[str, Any]:
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
    warmup = f", {format_count(schedule.warmup_steps, 'warmup step')}" if schedule.warmup_steps else ""
    return f"{optimizer}, lr {rates}, schedule {curve}{warmup}"


def describe_unfinished_schedule(config: RunConfig, max_seconds: float | None, rhythm: Intervals) -> str:
    """Return a line if the time limit may end the run before the end of its schedule; else "".

    The schedule does not follow the clock. Otherwise a resumed run would have other learning rates than an
    uninterrupted one.
    """
    if max_seconds is None or rhythm.total_steps is None:
        return ""
    nodes = named_nodes(config.scheduler) or {"": config.scheduler or CONSTANT}
    planned = [node for node in nodes.values() if depends_on_run_length(node)]
    if not planned:
        return ""
    names = ", ".join(str(node["_target_"]).rpartition(".")[2] for node in planned)
    return (
        f"scheduler: {names} is planned over {rhythm.total_steps:,} steps. If the run ends earlier, after "
        f"{format_duration(max_seconds)}, its rate does not reach the last value. trainer.max_steps=... sets the steps"
    )


def depends_on_run_length(node: Mapping[str, Any]) -> bool:
    """Return whether the schedule of a node depends on the length of the run."""
    names = inspect.signature(import_target(node["_target_"], "scheduler")).parameters
    return any(name in names and node.get(name) is None for name in LENGTHS)


def _format_optimizer_names(node: Any) -> str:
    """Return the class name, such as `AdamW`; `constant` without one. Several become `generator Adam, discriminator
    SGD`.
    """
    if several := named_nodes(node):
        return ", ".join(f"{name} {_format_optimizer_names(inner)}" for name, inner in several.items())
    return str((node or {}).get("_target_") or "constant").rpartition(".")[2]
