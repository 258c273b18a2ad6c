"""Faults in the arguments of models, tasks, optimizers, schedules and readers, by the types of their signatures.

The signatures of ours are read from their source, so that nothing of them, nor torch, is imported before all mistakes
are listed. A part of the user's own says itself what is wrong with its arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainrun import limits
from trainrun.config.schema import RunConfig, validation_nodes, value_of
from trainrun.config.validate import TARGET, fault_of_value
from trainrun.instantiate import named_nodes
from trainrun.limits import (
    BelowOne,
    Count,
    Fraction,
    NotNegative,
    NotNegativeInt,
    Positive,
    Rates,
    Steps,
)
from trainrun.model import choices as names

PACKAGE = Path(__file__).resolve().parents[1]
KNOWN = {**vars(limits), **vars(names), "Sequence": Sequence}  # what a signature may name to be checked here
PYTHON = {kind.__name__: kind for kind in (int, float, bool, str, list, tuple)}
GROUPS = ("optimizer", "scheduler", "task", "model", "data.train", "data.val", "data.test")
SHARED: dict[str, dict[str, Any]] = {  # what the runner itself reads, whatever the target
    "optimizer": {
        "lr": NotNegative,
        "weight_decay": NotNegative,
        "fused": bool | None,
        "foreach": bool | None,
    },
    "scheduler": {
        **dict.fromkeys(("warmup_steps", "warmup_ratio", "warmup_epochs"), NotNegative | None),
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
    "final_div_factor": Positive, "mode": Literal["min", "max"], "factor": BelowOne, "patience": NotNegativeInt,
    "threshold": NotNegative, "min_lr": Rates,
}  # fmt: skip
SOURCES = {  # what an argument is by default
    "max_lr": "optimizer.lr", "in_shape": "data.shape", "shape": "data.shape", "num_classes": "data.num_classes",
    "vocab_size": "data.num_classes",
}  # fmt: skip


def argument_faults(config: RunConfig) -> dict[str, str]:
    """By key one line for each wrong argument of the optimizer, the schedule, the task, the network and the data."""
    faults: dict[str, str] = {}
    sets = (f"data.{split.replace('/', '.')}" for split in validation_nodes(config.data))
    for group in (*GROUPS, *sets):
        node = value_of(config, group)
        if not isinstance(node, dict):
            continue
        for place, inner in {
            group: node,
            **{f"{group}.{n}": one for n, one in named_nodes(node).items()},
        }.items():
            for name, kind in {**SHARED.get(group, {}), **kinds_of(str(inner.get(TARGET)))}.items():
                if name in inner and (fault := fault_of_value(inner[name], kind)):
                    key = _source_of(config, group, name) if place == group else f"{place}.{name}"
                    faults.setdefault(key, f"{key}={fault}")
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


def _source_of(config: RunConfig, group: str, name: str) -> str:
    """The key that an argument has its value from, if it still has that."""
    key = f"{group}.{name}"
    beside = [f"data.train.{name}"] if group.startswith(("data.val", "data.test")) else []
    for source in (*beside, *([SOURCES[name]] if name in SOURCES else [])):
        try:
            if repr(value_of(config, source)) == repr(value_of(config, key)):  # nan is not itself
                key = source
        except (KeyError, TypeError):
            continue
    return key
