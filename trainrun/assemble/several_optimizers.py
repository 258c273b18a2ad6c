"""Several optimizers by name, each with its own parameters, guarded update and schedule, from their nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from trainrun.assemble.optimizer_and_schedule import CONSTANT, optimizer_of_node, schedule_of_node
from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError
from trainrun.instantiate import named_nodes
from trainrun.output import counted
from trainrun.patterns import matching
from trainrun.precision.update import Update
from trainrun.training.named_optimizers import NamedOptimizer
from trainrun.training.triggers import Intervals


def build_named(
    config: RunConfig, model: nn.Module, rhythm: Intervals, notes: list[str], guard: Callable[[nn.Module], Update]
) -> dict[str, NamedOptimizer]:  # fmt: skip
    """guard: the guarded update of some parameters. Raises ConfigError for parameters that none of them has, or two."""
    nodes = named_nodes(config.optimizer)
    known = dict(model.named_parameters(remove_duplicate=False))  # a tied one has all its names
    faults, owners, built = [], dict[nn.Parameter, str](), {}
    for name, node in nodes.items():
        try:
            names = matching(known, node["params"], f"optimizer.{name}.params")
        except ValueError as error:
            faults.append(str(error))
            continue
        if twice := [one for one in names if known[one] in owners]:
            faults.append(
                f"optimizer.{name}.params: {twice[0]} is in optimizer.{owners[known[twice[0]]]} already"
            )
        owners |= dict.fromkeys((known[one] for one in names), name)
    left = [name for name, param in known.items() if param.requires_grad and param not in owners]
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
    """The schedule of a named optimizer: its own, else the one for all, else a constant rate."""
    node = config.scheduler or {}
    own = named_nodes(node)
    return dict(own.get(name, CONSTANT)) if own else node or CONSTANT
