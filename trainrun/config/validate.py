"""The checks of a config that need no device: each value by its setting, open nodes, and the arguments of targets.

The signatures of our models, tasks, optimizers, schedules and readers are read from their source, so that nothing of
them, nor torch, is imported before all mistakes are listed. A part of the user's own says itself what is wrong with its
arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from trainrun import limits
from trainrun.config.pair_rules import pair_faults
from trainrun.config.schema import RunConfig, settings, validation_nodes, value_of
from trainrun.instantiate import TARGET, is_node, named_nodes
from trainrun.limits import (
    ANY,
    NAMED,
    NODES,
    BelowOne,
    Count,
    Fraction,
    Lasting,
    Limits,
    NotNegative,
    NotNegativeInt,
    Positive,
    Rates,
    Setting,
    Steps,
    fits,
)
from trainrun.model import choices as names

EXAMPLE = "my_file.MyClass"
Warmup = Annotated[float, Limits(at_least=0, whole=True), "in whole steps (a part: scheduler.warmup_ratio)"]
PACKAGE = Path(__file__).resolve().parents[1]
KNOWN = {**vars(limits), **vars(names), "Sequence": Sequence}  # what a signature may name to be checked here
GROUPS = ("optimizer", "scheduler", "task", "model", "data.train", "data.val", "data.test")
SHARED: dict[str, dict[str, Any]] = {  # what the runner itself reads, whatever the target
    "optimizer": {
        "lr": NotNegative,
        "weight_decay": NotNegative,
        "fused": bool | None,
        "foreach": bool | None,
        "no_decay": Literal["none", "auto"] | None,
        "layer_decay": Annotated[float, Limits(above=0, at_most=1)] | None,
    },
    "scheduler": {
        **dict.fromkeys(("warmup_ratio", "warmup_epochs"), NotNegative | None),
        "warmup_steps": Warmup | Lasting | None,
        "interval": Literal["step", "epoch"],
        "lr_scaling": Literal["none", "linear", "sqrt"],
        "base_batch_size": Count,
    },
}
OPTIMIZERS, SCHEDULERS = "torch.optim.", "torch.optim.lr_scheduler."
OF_CONF = ("AdamW", "Adam", "SGD", "CosineAnnealingWarmRestarts", "ExponentialLR", "MultiStepLR", "OneCycleLR",
           "ReduceLROnPlateau", "StepLR")  # fmt: skip
TORCH: dict[str, Any] = {  # torch's signatures name no limits, so those of the classes in `conf/` stand here
    "betas": tuple[BelowOne, BelowOne], "eps": NotNegative, "amsgrad": bool, "nesterov": bool,
    "momentum": NotNegative, "dampening": limits.Number, "gamma": NotNegative, "step_size": Steps,
    "milestones": list[NotNegativeInt], "T_0": Count, "T_mult": Count, "eta_min": NotNegative,
    "total_steps": Count | None, "max_lr": Rates, "pct_start": Fraction, "div_factor": Positive,
    "final_div_factor": Positive, "mode": Literal["auto", "min", "max"], "factor": BelowOne, "patience": NotNegativeInt,
    "threshold": NotNegative, "min_lr": Rates,
}  # fmt: skip


def check(config: RunConfig) -> list[str]:
    """All faults of the values, one line each; empty when the config can be run."""
    faults, wrong = value_faults(config), node_faults(config)
    told = tuple(f"{fault.partition('=')[0]}=" for fault in faults)
    return [*faults, *(wrong or (line for line in pair_faults(config) if not line.startswith(told)))]


def value_faults(config: Any, schema: type = RunConfig) -> list[str]:
    """One line for each field whose value is not what its setting allows."""
    return [
        f"{key}={fault}"
        for key, setting in settings(schema).items()
        if setting.section is None and (fault := fault_of(setting, value_of(config, key)))
    ]


def fault_of(setting: Setting, value: Any) -> str:
    """The value of a setting with what is wrong with it; empty if nothing is."""
    if setting.parse is not None:
        try:
            setting.parse(value)
        except ValueError as error:
            return f"{value}: {error}"
    return fault_of_value(value, setting.kind)


def fault_of_value(value: Any, kind: Any) -> str:
    """The value with what is allowed; empty if it is of that kind."""
    if fits(value, kind):
        return ""
    from trainrun.config.mistakes.value_words import misfit

    return misfit(value, kind)


def node_faults(config: Any, schema: type = RunConfig) -> list[str]:
    """One line for each open node, or each of several by name, that names no class or function."""
    return [
        fault
        for key, setting in settings(schema).items()
        if setting.opens and (fault := _node_fault(setting, value_of(config, key)))
    ]


def _node_fault(setting: Setting, value: Any) -> str:
    key, empty = setting.typed or setting.key, value is None or value == {}
    target = value.get(TARGET) if isinstance(value, dict) else None
    if setting.opens == NAMED and (several := named_nodes(value)):
        from trainrun.config.mistakes.node_words import beside_fault

        return beside_fault(setting, several, value)
    if setting.required and (empty or (isinstance(value, dict) and target in (None, "???"))):
        return (
            f"{key}.{TARGET}: nothing to train with; name a class or function, e.g. {key}.{TARGET}={EXAMPLE}"
        )
    if setting.opens == ANY or empty or target or value in setting.also:
        return ""
    if setting.opens in (NODES, NAMED) and isinstance(value, dict):
        # Null takes one out.
        wrong = [
            name for name, one in value.items() if one is not None and not (is_node(one) and one[TARGET])
        ]
        if not wrong:
            return ""
        inner = value[wrong[0]]
        single = setting.opens == NAMED and not isinstance(inner, dict)
        key, value = (key, {wrong[0]: inner}) if single else (f"{key}.{wrong[0]}", inner)
    from trainrun.config.mistakes.node_words import no_node

    return no_node(setting, key, value)


def argument_faults(config: RunConfig) -> dict[str, str]:
    """By key one line for each wrong argument of the optimizer, schedule, task, network, data, hooks, transforms."""
    faults: dict[str, str] = {}
    sets = (f"data.{split.replace('/', '.')}" for split in validation_nodes(config.data))
    for group in (*GROUPS, "hook", "transform", "data.augment", *sets):
        node = value_of(config, group)
        if not isinstance(node, dict):
            continue
        named = {f"{group}.{name}": one for name, one in named_nodes(node).items()}
        for place, inner in {group: node, **named}.items():
            kinds = {**SHARED.get(group, {}), **kinds_of(str(inner.get(TARGET)))}
            for name, kind in kinds.items():
                if name in inner and (fault := fault_of_value(inner[name], kind)):
                    from trainrun.config.mistakes.node_words import source_of

                    key = source_of(config, group, name) if place == group else f"{place}.{name}"
                    faults.setdefault(key, f"{key}={fault}")
            if group == "optimizer" and inner.get("groups") is not None:
                from trainrun.config.mistakes.node_words import group_faults

                lines = group_faults(place, inner["groups"], kinds)
                faults |= {line.partition("=")[0]: line for line in lines}
    return faults


@cache
def kinds_of(target: str) -> dict[str, Any]:
    """The types of a target's arguments, as far as its signature names types of `trainrun/limits.py` or Python's.

    An argument without a default may be null: the run fills it in.
    """
    module, _, name = target.rpartition(".")
    if target.startswith(OPTIMIZERS):
        return TORCH if name in OF_CONF and f"{module}." in (OPTIMIZERS, SCHEDULERS) else {}
    path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not target.startswith("trainrun.") or not path.is_file():
        return {}
    for item in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef) and item.name == name:
            inner = [item] if isinstance(item, ast.FunctionDef) else item.body
            return _kinds(next((each for each in inner if isinstance(each, ast.FunctionDef)), None))
    return {}


def _kinds(function: ast.FunctionDef | None) -> dict[str, Any]:
    """The first function of a class is its `__init__`."""
    given = function.args.args if function is not None else []
    defaults = len(given) - len(function.args.defaults) if function is not None else 0
    found = {item.arg: (_kind(item.annotation), number < defaults) for number, item in enumerate(given)}
    return {
        name: kind | None if required else kind
        for name, (kind, required) in found.items()
        if kind is not None
    }


def _kind(annotation: ast.expr | None) -> Any:
    """The type that an annotation names; None if it names one that is not known here."""
    if annotation is None:
        return None
    try:
        return eval(
            ast.unparse(annotation),
            {"__builtins__": {"int": int, "float": float, "bool": bool, "str": str}},
            KNOWN,
        )
    except NameError:
        return None
