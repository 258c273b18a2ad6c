"""Check a config before a device is used: each value by its setting, open nodes, and the arguments of targets.

The signatures of built-in models, tasks, optimizers, schedules and readers are parsed from their source. All
mistakes are so reported before torch is imported. The arguments of the user's classes are checked when they are
built.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trainrun import limits
from trainrun.config.rules import iterate_combination_faults
from trainrun.config.schema import RunConfig, read_value, settings, validation_nodes
from trainrun.instantiate import TARGET, is_node, named_nodes
from trainrun.limits import (
    ANY,
    NAMED,
    NODES,
    BelowOne,
    Count,
    DurationLimits,
    Fraction,
    Lasting,
    Limits,
    NotNegative,
    NotNegativeInt,
    Positive,
    Rates,
    Setting,
    Steps,
    fits_kind,
    list_choices,
)
from trainrun.model import choices as names

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
        "warmup_start_factor": Fraction,
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


def check_config(config: RunConfig) -> list[str]:
    """Return all faults of a config's values, one line each; [] if the config can run."""
    wrong_values, wrong_nodes = check_all_values(config), check_nodes(config)
    lines = list(wrong_values.values())
    if wrong_nodes:
        return lines + wrong_nodes
    return lines + [
        str(fault) for fault in iterate_combination_faults(config) if fault.key not in wrong_values
    ]


def check_all_values(config: Any, schema: type = RunConfig) -> dict[str, str]:
    """Return a message by key for each setting whose value is not allowed."""
    return {
        key: f"{key}={fault}"
        for key, setting in settings(schema).items()
        if setting.section is None and (fault := check_setting_value(setting, read_value(config, key)))
    }


def check_setting_value(setting: Setting, value: Any) -> str:
    """Return a message for a wrong value of a setting, with the values that are allowed; "" if it is right."""
    if setting.parse is not None:
        try:
            setting.parse(value)
        except ValueError as error:
            return f"{value}: {error}"
    return check_value(value, setting.kind)


def check_value(value: Any, kind: Any) -> str:
    """Return a message for a value of a wrong type, with the values that are allowed; "" if it fits."""
    if fits_kind(value, kind):
        return ""
    return explain_misfit(value, kind)


def check_nodes(config: Any, schema: type = RunConfig) -> list[str]:
    """Return a message for each open node, or each named entry of one, that has no `_target_` but needs one."""
    return [
        fault
        for key, setting in settings(schema).items()
        if setting.opens and (fault := _check_node(setting, read_value(config, key)))
    ]


def _check_node(setting: Setting, value: Any) -> str:
    key, empty = setting.typed or setting.key, value is None or value == {}
    target = value.get(TARGET) if isinstance(value, dict) else None
    if setting.opens == NAMED and (several := named_nodes(value)):
        return check_values_beside_nodes(setting, several, value)
    if setting.required and (empty or (isinstance(value, dict) and target in (None, "???"))):
        return f"{key}.{TARGET}: is not set; name a class or function, as {key}.{TARGET}={EXAMPLE}"
    if setting.opens == ANY or empty or target or value in setting.also:
        return ""
    if setting.opens in (NODES, NAMED) and isinstance(value, dict):
        # Null takes one out.
        wrong = [
            name
            for name, inner_node in value.items()
            if inner_node is not None and not (is_node(inner_node) and inner_node[TARGET])
        ]
        if not wrong:
            return ""
        inner = value[wrong[0]]
        single = setting.opens == NAMED and not isinstance(inner, dict)
        key, value = (key, {wrong[0]: inner}) if single else (f"{key}.{wrong[0]}", inner)
    return describe_missing_target(setting, key, value)


def check_target_arguments(config: RunConfig) -> dict[str, str]:
    """Return a message by key for each wrong argument in the nodes of a config."""
    faults: dict[str, str] = {}
    sets = (f"data.{split.replace('/', '.')}" for split in validation_nodes(config.data))
    for group in (*GROUPS, "hook", "transform", "data.augment", *sets):
        node = read_value(config, group)
        if not isinstance(node, dict):
            continue
        named = {f"{group}.{name}": inner_node for name, inner_node in named_nodes(node).items()}
        for place, inner in {group: node, **named}.items():
            kinds = {**SHARED.get(group, {}), **parse_argument_types(str(inner.get(TARGET)))}
            for name, kind in kinds.items():
                if name in inner and (fault := check_value(inner[name], kind)):
                    key = find_source_setting(config, group, name) if place == group else f"{place}.{name}"
                    faults.setdefault(key, f"{key}={fault}")
            if group == "optimizer" and inner.get("groups") is not None:
                lines = iterate_group_faults(place, inner["groups"], kinds)
                faults |= {line.partition("=")[0]: line for line in lines}
    return faults


@cache
def parse_argument_types(target: str) -> dict[str, Any]:
    """Return the argument types in a target's signature by name. Arguments of unknown types are left out.

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
            return _parse_signature_types(
                next((each for each in inner if isinstance(each, ast.FunctionDef)), None)
            )
    return {}


def _parse_signature_types(function: ast.FunctionDef | None) -> dict[str, Any]:
    """Return the argument types of a parsed function by name. Arguments of unknown types are left out.

    An argument without a default may be null.
    """
    arguments = function.args.args if function is not None else []
    defaults = len(arguments) - len(function.args.defaults) if function is not None else 0
    kinds = {
        item.arg: (_parse_annotation(item.annotation), number < defaults)
        for number, item in enumerate(arguments)
    }
    return {
        name: kind | None if required else kind
        for name, (kind, required) in kinds.items()
        if kind is not None
    }


def _parse_annotation(annotation: ast.expr | None) -> Any:
    """Return the type that an annotation names; None if it is not in `KNOWN`."""
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


# ---- what a value, a node and its arguments must be, in words

RANGES = {"at_least": "{} or more", "above": "more than {}", "at_most": "at most {}", "below": "below {}"}
_LOOKS_OTHER = re.compile(r"[+-]?\.?\d|(?i:true|false|null|none)\Z")


def find_closest_name(word: str, known: Iterable[object]) -> str:
    """Return the known name that is most similar to the word or begins with it; "" if none is similar."""
    names = {str(name).lower(): str(name) for name in known}
    matches = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.55)
    begun = [name for name in names if len(word) > 1 and name.startswith(word.lower())]
    return names[[*matches, *begun][0]] if matches or begun else ""


def suggest_closest_name(word: str, known: Iterable[object]) -> str:
    """Return ` Did you mean x?` with the most similar known name; "" if none is similar."""
    name = find_closest_name(word, known)
    return f" Did you mean {name}?" if name else ""


def explain_misfit(value: Any, kind: Any) -> str:
    """Return a message for a wrong value, with the values that are allowed."""
    choices = list_choices(kind)
    near = suggest_closest_name(str(value), choices)
    typed = value if choices and isinstance(value, str) else format_value(value)
    return f"{typed}: must be {describe_kind(kind)}{'.' if near else ''}{near}"


def format_value(value: Any) -> str:
    """Return a value as a user types it. A text that would be read as another type is marked as a text."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and _LOOKS_OTHER.match(value):
        return f"'{value}' (a text)"
    return str(value)


def describe_kind(kind: Any) -> str:
    """Return a type in words: `a whole number, 1 or more, or auto`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        last = {NoneType: "null"}
        parts = [last.get(part) or describe_kind(part).removeprefix("one of ") for part in inner]
        if set(inner) == {bool, NoneType}:
            return "true, false or null"
        return ", or ".join(sorted(parts, key=lambda part: part == "null"))
    if origin is Annotated:
        return ", ".join([describe_kind(inner[0]), *filter(None, map(_describe_limit, inner[1:]))])
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (list, Sequence):
        return f"a list of {_describe_plural(inner[0])}"
    if origin is tuple:
        return f"{len(inner)} {_describe_plural(inner[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
        kind, "a value"
    )


def _describe_plural(kind: Any) -> str:
    return describe_kind(kind).removeprefix("a ").replace("number", "numbers", 1)


def _describe_limit(limit: Any) -> str:
    """Return a limit in words: `1 or more and below 2`."""
    if isinstance(limit, DurationLimits):
        return f"as {', '.join(f'2{unit}' for unit in limit.units)}"
    if not isinstance(limit, Limits):
        return str(limit)
    limits_in_words = ((text, getattr(limit, name)) for name, text in RANGES.items())
    return " and ".join(text.format(value) for text, value in limits_in_words if value is not None)


EXAMPLE = "my_file.MyClass"
# of scheduler=custom
USUAL_BESIDE = {
    "interval": "step",
    "warmup_steps": 0,
    "warmup_start_factor": 0.0,
    "lr_scaling": "none",
    "base_batch_size": 256,
}
# in no group
OF_ALL = ("fused", "foreach", "differentiable", "capturable", "no_decay", "layer_decay", "groups")
SOURCES = {  # what an argument is by default
    "max_lr": "optimizer.lr", "in_shape": "data.shape", "shape": "data.shape", "num_classes": "data.num_classes",
    "vocab_size": "data.num_classes",
}  # fmt: skip


def describe_missing_target(setting: Setting, key: str, value: Any) -> str:
    """Return the message for a value at an open node that names no class or function."""
    if isinstance(value, dict):
        name, inner = next(iter(value.items()))
        choice = {"transform.lora": "transform=lora", "scheduler": "scheduler=constant"}
        example = choice.get(key, f"{key}.{TARGET}={EXAMPLE}")
        return f"{key}.{name}={inner}: needs a class or function; name it, as {example}"
    also = "".join(
        f", or be {name}"
        for name in (*setting.also, *(["null"] if key == setting.key and not setting.required else []))
    )
    return f"{key}={value}: must name a class or function, as {key}.{TARGET}={EXAMPLE}{also}"


def check_values_beside_nodes(setting: Setting, several: dict[str, Any], value: dict[str, Any]) -> str:
    """Return a message for a value beside named nodes that belongs to none of them; "" without one."""
    for name, inner in value.items():
        if name in several or inner is None or inner == USUAL_BESIDE.get(name):
            continue
        key = f"{setting.key}.{name}"
        if isinstance(inner, dict) or setting.key == "data.val":
            return f"{key}={inner}: must name a class or function, as {key}.{TARGET}={EXAMPLE}"
        ways = " or ".join(f"{setting.key}.{name_of_node}.{name}={inner}" for name_of_node in several)
        return f"{key}={inner}: applies to none of {', '.join(several)}; use {ways}"
    return ""


def iterate_group_faults(place: str, groups: Any, kinds: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each fault in an optimizer's `groups`, a list of parameter patterns (`params`) with
    options.
    """
    key, example = f"{place}.groups", "{params: 'head.*', lr: 1e-2}"
    if not isinstance(groups, list):
        yield f"{key}={groups}: must be a list of groups, as [{example}]"
        return
    for number, group in enumerate(groups):
        entry = f"{key}[{number}]"
        named = group.get("params") if isinstance(group, dict) else None
        patterns = [named] if isinstance(named, str) else named
        if not patterns or not fits_kind(patterns, list[str]):
            yield f"{entry}={group}: must name parameters and their options, as {example}"
            continue
        if len(group) == 1:
            yield f"{entry}={group}: has no option for its parameters; add one, as {example}"
        for name, value in group.items():
            if name in OF_ALL:
                typed = f"{name}={format_value(value)}"
                yield f"{entry}.{typed}: applies to all parameters; use {place}.{typed}"
            elif name in kinds and not fits_kind(value, kinds[name]):
                yield f"{entry}.{name}={explain_misfit(value, kinds[name])}"


def find_source_setting(config: RunConfig, group: str, name: str) -> str:
    """Return the setting from which an argument took its value, if both are still equal; else the argument's own
    key.
    """
    key = f"{group}.{name}"
    beside = [f"data.train.{name}"] if group.startswith(("data.val", "data.test")) else []
    for source in (*beside, *([SOURCES[name]] if name in SOURCES else [])):
        try:
            if repr(read_value(config, source)) == repr(read_value(config, key)):  # nan is not itself
                key = source
        except (KeyError, TypeError):
            continue
    return key
