"""What the arguments of the parts that `conf/` names may be; no torch here, so that a wrong one is told at once.

A part of the user's own, or another of torch's, says itself what is wrong with its arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainrun.config import RunConfig

_LOOKS_OTHER = re.compile(r"[+-]?\.?\d|(?i:true|false|null|none)\Z")


class Rule(NamedTuple):
    """text: what the value must be. null: whether it may also be left open. names: whether it is one of some names."""

    text: str
    holds: Callable[[Any], bool]
    null: bool = False
    names: bool = False


def number(whole: bool = False, null: bool = False, **limits: float) -> Rule:
    """limits: at_least, above, at_most, below."""

    def holds(value: Any) -> bool:
        if not is_finite(value) or (whole and not isinstance(value, int)):
            return False
        return bool(
            value >= limits.get("at_least", -math.inf)
            and value > limits.get("above", -math.inf)
            and value <= limits.get("at_most", math.inf)
            and value < limits.get("below", math.inf)
        )

    kind = "a whole number" if whole else "a number"
    return Rule(", ".join(filter(None, (kind, rule_of(limits)))), holds, null)


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def several(
    one: Rule, example: str, count: int | None = None, null: bool = False, empty: bool = False
) -> Rule:
    """one: what each of them must be, by `number`."""

    def holds(value: Any) -> bool:
        if not isinstance(value, list) or not (value or empty):
            return False
        return count in (None, len(value)) and all(map(one.holds, value))

    each = one.text.removeprefix("a ").replace("number", "numbers", 1)
    return Rule(f"{'a list of' if count is None else count} {each}, as {example}", holds, null)


def one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda value: value in names, names=True)


def rule_of(limits: Mapping[str, Any]) -> str:
    """Limits in words; empty if there are none."""
    words = {
        "at_least": "{} or more",
        "above": "more than {}",
        "at_most": "at most {}",
        "below": "below {}",
    }
    return " and ".join(
        text.format(limits[name]) for name, text in words.items() if limits.get(name) is not None
    )


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
COUNT, OPEN_COUNT = number(whole=True, at_least=1), number(whole=True, null=True, at_least=1)
POSITIVE, NOT_NEGATIVE = number(above=0), number(at_least=0)
SHARE, BELOW_1 = number(at_least=0, at_most=1), number(at_least=0, below=1)
GIVEN = Rule(NOT_NEGATIVE.text, lambda value: value is not None)  # what it is, is asked of every optimizer
POINT = Rule("a fraction with a point, as 0.3", lambda value: isinstance(value, float) and 0 <= value <= 1)
RATES = Rule(  # an optimizer may have several groups of parameters, as Muon
    f"{NOT_NEGATIVE.text}, or a list of them",
    lambda value: (
        NOT_NEGATIVE.holds(value) or (isinstance(value, list) and all(map(NOT_NEGATIVE.holds, value)))
    ),
)
SIZES = several(COUNT, "[256,128]")
STEPS = Rule(  # also as 1e3
    COUNT.text,
    lambda value: COUNT.holds(int(value) if isinstance(value, float) and value.is_integer() else value),
)
ANY_NUMBER = Rule("a number", lambda value: isinstance(value, float) or is_finite(value), null=True)

Rules = dict[str, Rule]
UPDATE: Rules = {"lr": GIVEN, "weight_decay": GIVEN}
PAIR: Rules = {"betas": several(BELOW_1, "[0.9,0.999]", 2), "eps": NOT_NEGATIVE}
ADAM: Rules = UPDATE | PAIR | {"amsgrad": FLAG}
LENGTH: Rules = {"total_steps": STEPS._replace(null=True)}
CLASSES: Rules = {"num_classes": OPEN_COUNT, "dropout": BELOW_1}
PICTURES: Rules = {"in_shape": several(COUNT, "[1,28,28]", null=True), "width": COUNT}
TORCH_SCHEDULERS, CURVES, MODELS = "torch.optim.lr_scheduler", "trainrun.scheduler.curves", "trainrun.model"
RULES: dict[str, Rules] = {
    "torch.optim.AdamW": ADAM,
    "torch.optim.Adam": ADAM,
    "torch.optim.SGD": UPDATE | {"momentum": NOT_NEGATIVE, "dampening": number(), "nesterov": FLAG},
    "trainrun.optimizer.muon.Muon": UPDATE | PAIR | {
        "momentum": BELOW_1, "nesterov": FLAG, "ns_steps": number(whole=True, at_least=1, at_most=99),
        "adamw_lr": number(null=True, at_least=0), "adjust_lr_fn": one_of("match_rms_adamw", "original"),
    },
    f"{CURVES}.cosine": LENGTH | {"min_factor": NOT_NEGATIVE},
    f"{CURVES}.linear": LENGTH | {"end_factor": NOT_NEGATIVE},
    f"{CURVES}.polynomial": LENGTH | {"power": NOT_NEGATIVE, "end_factor": NOT_NEGATIVE},
    f"{CURVES}.inverse_sqrt": {"timescale": POSITIVE},
    f"{CURVES}.wsd": LENGTH | {"decay_ratio": SHARE, "end_factor": NOT_NEGATIVE},
    f"{TORCH_SCHEDULERS}.CosineAnnealingWarmRestarts": {"T_0": COUNT, "T_mult": COUNT, "eta_min": NOT_NEGATIVE},
    f"{TORCH_SCHEDULERS}.ExponentialLR": {"gamma": NOT_NEGATIVE},
    f"{TORCH_SCHEDULERS}.MultiStepLR": {
        "milestones": several(number(whole=True, at_least=0), "[500,800]", empty=True), "gamma": NOT_NEGATIVE
    },
    f"{TORCH_SCHEDULERS}.OneCycleLR": {
        "total_steps": OPEN_COUNT, "max_lr": RATES, "pct_start": POINT, "div_factor": POSITIVE,
        "final_div_factor": POSITIVE,
    },
    f"{TORCH_SCHEDULERS}.ReduceLROnPlateau": {
        "mode": one_of("min", "max"), "factor": BELOW_1, "patience": number(whole=True, at_least=0),
        "threshold": NOT_NEGATIVE, "min_lr": RATES,
    },
    f"{TORCH_SCHEDULERS}.StepLR": {"step_size": STEPS, "gamma": NOT_NEGATIVE},
    "trainrun.task.classification.Classification": {
        "label_smoothing": SHARE, "class_dim": number(whole=True), "ignore_index": number(whole=True, null=True)
    },
    "trainrun.task.language_modeling.LanguageModeling": {"bytes_per_token": number(above=0, null=True)},
    "trainrun.task.vae.Vae": {"beta": NOT_NEGATIVE},
    f"{MODELS}.mlp.Mlp": CLASSES | {
        "in_shape": PICTURES["in_shape"], "hidden": several(COUNT, "[256,128]", null=True, empty=True)
    },
    f"{MODELS}.cnn.Cnn": CLASSES | PICTURES | {"residual": FLAG, "zero_init_residual": FLAG},
    f"{MODELS}.resnet.ResNet": CLASSES | PICTURES | {
        "blocks": several(COUNT, "[2,2,2]", null=True), "zero_init_residual": FLAG
    },
    f"{MODELS}.gpt.Gpt": {
        "dropout": BELOW_1, "context": COUNT, "tied": FLAG,
        **dict.fromkeys(("vocab_size", "layers", "width", "heads"), OPEN_COUNT),
    },
    f"{MODELS}.lstm.Lstm": CLASSES | {"vocab_size": OPEN_COUNT, "width": COUNT, "layers": COUNT},
    f"{MODELS}.vae.Vae": PICTURES | {"latent_dim": COUNT, "hidden": SIZES},
}  # fmt: skip
OUR_DATA = "trainrun.data."
LOADERS: Rules = {  # of every format
    "shape": PICTURES["in_shape"], "num_classes": OPEN_COUNT, "val_fraction": BELOW_1,
    "seed": number(whole=True), "num_samples": COUNT, "noise": NOT_NEGATIVE,
    "block_size": COUNT, "max_bytes": OPEN_COUNT, "row_groups": COUNT, "fill": ANY_NUMBER,
    **dict.fromkeys(("header", "normalize", "draft", "mapped", "check_crc"), FLAG),
    "in_memory": Rule("true, false or auto", lambda value: value == "auto" or isinstance(value, bool)),
}  # fmt: skip
MISSING = object()  # where there is no such key
GROUPS = ("optimizer", "scheduler", "task", "model", "data.train", "data.val", "data.test")
FROM = {  # what an argument is by default
    "max_lr": "optimizer.lr", "in_shape": "data.shape", "shape": "data.shape", "num_classes": "data.num_classes",
    "vocab_size": "data.num_classes",
}  # fmt: skip


def argument_faults(config: RunConfig) -> dict[str, str]:
    """By key one line for each wrong argument of the optimizer, the scheduler, the task, the network and the data."""
    faults: dict[str, str] = {}
    for group in GROUPS:
        node = _value_of(config, group)
        arguments = node if isinstance(node, dict) else {}
        for name, rule in rules_of(arguments.get("_target_")).items():
            value = arguments.get(name)
            if name not in arguments or (value is None and rule.null) or rule.holds(value):
                continue
            key = _source_of(config, group, name)
            shown = value if rule.names else _shown(value)
            faults.setdefault(key, f"{key}={shown}: must be {rule.text}{', or null' if rule.null else ''}")
    return faults


def _source_of(config: RunConfig, group: str, name: str) -> str:
    """The key that an argument has its value from, where it still has that."""
    key = f"{group}.{name}"
    beside = [f"data.train.{name}"] if group in ("data.val", "data.test") else []
    for source in (*beside, *([FROM[name]] if name in FROM else [])):
        if repr(_value_of(config, source)) == repr(_value_of(config, key)):  # nan is not itself
            key = source
    return key


def rules_of(target: object) -> Rules:
    name = str(target)
    return LOADERS if name.startswith(OUR_DATA) else RULES.get(name, {})


def _value_of(config: RunConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = found.get(name, MISSING) if isinstance(found, dict) else getattr(found, name, MISSING)
    return found


def _shown(value: Any) -> str:
    """As it is typed; a text that looks like something else in its quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and _LOOKS_OTHER.match(value):
        return f"'{value}' (a text)"
    return str(value)
