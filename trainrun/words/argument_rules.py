"""What the arguments of the parts that `conf/` names may be; no torch here, so that a wrong one is told at once.

A part of the user's own, or another of torch's, says itself what is wrong with its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from trainrun.config import RunConfig


class Rule(NamedTuple):
    """text: what the value must be. null: whether it may also be left open."""

    text: str
    holds: Callable[[Any], bool]
    null: bool = False


def number(whole: bool = False, null: bool = False, **limits: float) -> Rule:
    """limits: at_least, above, at_most, below."""

    def holds(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            return False
        return (
            math.isfinite(value)
            and value >= limits.get("at_least", -math.inf)
            and value > limits.get("above", -math.inf)
            and value <= limits.get("at_most", math.inf)
            and value < limits.get("below", math.inf)
        )

    kind = "a whole number" if whole else "a number"
    return Rule(", ".join(filter(None, (kind, rule_of(limits)))), holds, null)


def several(one: Rule, example: str, count: int | None = None, null: bool = False) -> Rule:
    """one: what each of them must be, by `number`."""

    def holds(value: Any) -> bool:
        return isinstance(value, list) and count in (None, len(value)) and all(map(one.holds, value))

    each = one.text.removeprefix("a ").replace("number", "numbers", 1)
    return Rule(f"{'a list of' if count is None else count} {each}, as {example}", holds, null)


def rule_of(limits: Mapping[str, Any]) -> str:
    """Limits in words; empty where there are none."""
    words = {
        "at_least": "{} or more",
        "above": "more than {}",
        "at_most": "at most {}",
        "below": "below {}",
    }
    return " and ".join(
        text.format(limits[name]) for name, text in words.items() if limits.get(name) is not None
    )


def one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda value: value in names)


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
COUNT, OPEN_COUNT = number(whole=True, at_least=1), number(whole=True, null=True, at_least=1)
POSITIVE, NOT_NEGATIVE = number(above=0), number(at_least=0)
SHARE = number(at_least=0, at_most=1)
RATES = Rule(  # an optimizer may have several groups of parameters, as Muon
    f"{NOT_NEGATIVE.text}, or a list of them",
    lambda value: (
        NOT_NEGATIVE.holds(value) or (isinstance(value, list) and all(map(NOT_NEGATIVE.holds, value)))
    ),
)
DROPOUT = number(at_least=0, below=1)
GIVEN = Rule(NOT_NEGATIVE.text, lambda value: value is not None)  # what it is, is asked of every optimizer
SIZES = several(COUNT, "[256,128]", null=True)

Rules = dict[str, Rule]
UPDATE: Rules = {"lr": GIVEN, "weight_decay": GIVEN}
ADAM: Rules = UPDATE | {
    "betas": several(number(at_least=0, below=1), "[0.9,0.999]", 2), "eps": NOT_NEGATIVE, "amsgrad": FLAG
}  # fmt: skip
LENGTH: Rules = {"total_steps": OPEN_COUNT}
NETWORK: Rules = {
    "in_shape": several(COUNT, "[1,28,28]", null=True), "num_classes": OPEN_COUNT, "vocab_size": OPEN_COUNT,
    "dropout": DROPOUT, "hidden": SIZES, "blocks": SIZES, "residual": FLAG, "zero_init_residual": FLAG,
    "context": COUNT, "latent_dim": COUNT, "tied": FLAG,
}  # fmt: skip
WIDE: Rules = NETWORK | {"width": COUNT, "layers": COUNT}
TORCH_SCHEDULERS, CURVES = "torch.optim.lr_scheduler", "trainrun.scheduler.curves"
RULES: dict[str, Rules] = {
    "torch.optim.AdamW": ADAM,
    "torch.optim.Adam": ADAM,
    "torch.optim.SGD": UPDATE | {"momentum": NOT_NEGATIVE, "dampening": number(), "nesterov": FLAG},
    "trainrun.optimizer.muon.Muon": ADAM | {
        "momentum": DROPOUT, "nesterov": FLAG, "ns_steps": COUNT, "adamw_lr": number(null=True, at_least=0),
        "adjust_lr_fn": one_of("match_rms_adamw", "original"),
    },
    f"{CURVES}.cosine": LENGTH | {"min_factor": NOT_NEGATIVE},
    f"{CURVES}.linear": LENGTH | {"end_factor": NOT_NEGATIVE},
    f"{CURVES}.polynomial": LENGTH | {"power": NOT_NEGATIVE, "end_factor": NOT_NEGATIVE},
    f"{CURVES}.inverse_sqrt": {"timescale": POSITIVE},
    f"{CURVES}.wsd": LENGTH | {"decay_ratio": SHARE, "end_factor": NOT_NEGATIVE},
    f"{TORCH_SCHEDULERS}.CosineAnnealingWarmRestarts": {"T_0": COUNT, "T_mult": COUNT, "eta_min": NOT_NEGATIVE},
    f"{TORCH_SCHEDULERS}.ExponentialLR": {"gamma": NOT_NEGATIVE},
    f"{TORCH_SCHEDULERS}.MultiStepLR": {"milestones": several(COUNT, "[500,800]"), "gamma": NOT_NEGATIVE},
    f"{TORCH_SCHEDULERS}.OneCycleLR": LENGTH | {
        "max_lr": RATES, "pct_start": SHARE, "div_factor": POSITIVE, "final_div_factor": POSITIVE
    },
    f"{TORCH_SCHEDULERS}.ReduceLROnPlateau": {
        "mode": one_of("min", "max"),
        "factor": number(at_least=0, below=1), "patience": number(whole=True, at_least=0),
        "threshold": NOT_NEGATIVE, "min_lr": RATES,
    },
    f"{TORCH_SCHEDULERS}.StepLR": {"step_size": COUNT, "gamma": NOT_NEGATIVE},
    "trainrun.task.classification.Classification": {
        "label_smoothing": SHARE, "class_dim": number(whole=True), "ignore_index": number(whole=True)
    },
    "trainrun.task.language_modeling.LanguageModeling": {"bytes_per_token": POSITIVE},
    "trainrun.task.vae.Vae": {"beta": NOT_NEGATIVE},
    "trainrun.model.gpt.Gpt": NETWORK | dict.fromkeys(("layers", "width", "heads"), OPEN_COUNT),
    **dict.fromkeys([f"trainrun.model.{name}" for name in ("mlp.Mlp", "cnn.Cnn", "resnet.ResNet", "lstm.Lstm",
                                                           "vae.Vae")], WIDE),
}  # fmt: skip


def argument_faults(config: RunConfig) -> Iterator[str]:
    """One line for each wrong argument of the optimizer, the scheduler, the task and the network."""
    nodes = {
        "optimizer": config.optimizer,
        "scheduler": config.scheduler,
        "task": config.task,
        "model": config.model,
    }
    for group, node in nodes.items():
        arguments = node if isinstance(node, dict) else {}
        for name, rule in RULES.get(str(arguments.get("_target_")), {}).items():
            value = arguments.get(name)
            if name not in arguments or (value is None and rule.null) or rule.holds(value):
                continue
            shown = {"None": "null", "True": "true", "False": "false"}.get(str(value), value)
            yield f"{group}.{name}={shown}: must be {rule.text}{', or null' if rule.null else ''}"
