"""Build a schedule from the config: warmup, lengths, rates scaled by batch size, and messages for mistakes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainrun.errors import OF_ARGUMENTS, ConfigError, PluginError
from trainrun.scheduler.schedule import Curve, Schedule
from trainrun.scheduler.torch_scheduler import TorchScheduler
from trainrun.user_code import format_error, is_raised_by_torch

UNKNOWN_LENGTH = "the number of steps is not known in advance; set trainer.max_steps or trainer.max_epochs"
# Arguments that mean "the length of the training": filled in where they are None or not given.
LENGTHS = ("total_steps", "num_training_steps", "T_max")
LENGTHS_OF_CLASS = {"LinearLR": "total_iters", "PolynomialLR": "total_iters"}


def resolve_warmup(
    steps: int | None, ratio: float | None, epochs: float | None, total_steps: int | None, steps_per_epoch: int | None
) -> int:  # fmt: skip
    """Return the warmup in steps. Raise ConfigError if more than one of steps, ratio (of all steps) and epochs is
    set.
    """
    words = {"steps": steps or None, "ratio": ratio, "epochs": epochs}
    typed = {word: value for word, value in words.items() if value is not None}
    if not typed:
        return 0
    if len(typed) > 1:
        keys = " and ".join(f"scheduler.warmup_{word}" for word in typed)
        raise ConfigError(f"{keys}: set only one of them, and the other to null")
    ((word, value),) = typed.items()
    setting = f"scheduler.warmup_{word}={value:g}"
    if value < 0 or (word == "ratio" and value > 1):
        raise ConfigError(f"{setting}: must be {'between 0 and 1' if word == 'ratio' else '0 or more'}")
    if word == "ratio" and total_steps is None:
        raise ConfigError(f"{setting}: {UNKNOWN_LENGTH}, or use scheduler.warmup_steps")
    if word == "epochs" and steps_per_epoch is None:
        raise ConfigError(f"{setting}: the length of an epoch is not known; use scheduler.warmup_steps")
    rounded = round(value * ({"ratio": total_steps, "epochs": steps_per_epoch}.get(word) or 1))
    if total_steps is not None and rounded > total_steps:
        raise ConfigError(
            f"{setting}: a warmup of {rounded} steps is longer than the run of {total_steps}; use less, or 0"
        )
    return rounded


def scale_learning_rate(
    lr: float, rule: str, global_batch_size: int, base_batch_size: int
) -> tuple[float, str]:
    """Return the learning rate scaled by (global / base) batch size or its root, and a note ("" without a change).

    rule: none, linear or sqrt. linear: for SGD (Goyal et al. 2017); sqrt: for Adam and similar (Malladi et al.
        2022).
    """
    if rule == "none":
        return lr, ""
    if base_batch_size < 1:
        raise ConfigError(f"scheduler.base_batch_size={base_batch_size}: must be 1 or more")
    ratio = global_batch_size / base_batch_size
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    note = (
        f"scheduler.lr_scaling={rule}: lr {lr:g} x {factor:.4g} = {lr * factor:g} "
        f"for a global batch of {global_batch_size} instead of {base_batch_size}"
    )
    return lr * factor, note


def build_schedule(
    optimizer: Optimizer, target: Callable[..., Any], keywords: dict[str, Any], warmup_steps: int,
    total_steps: int | None, metric: str | None = None, steps_per_epoch: int | None = None, by_epoch: bool = False,
    validates: bool = True, warmup_start_factor: float = 0.0,
) -> Schedule:  # fmt: skip
    """Build the schedule of an optimizer.

    target: a torch scheduler class; or a function whose first argument is `optimizer` and that returns a torch
        scheduler; or a curve, called as `target(step, **keywords)`.
    total_steps: of the whole run, with warmup; the target gets the steps after the warmup.
    metric: the metric of ReduceLROnPlateau (`val/loss`). by_epoch: whether the target counts epochs of
        `steps_per_epoch`.
    validates: whether the run has validation data.
    """
    if by_epoch and (not builds_scheduler(target) or target is ReduceLROnPlateau):
        plateau = target is ReduceLROnPlateau
        other = (
            "does not apply to ReduceLROnPlateau"
            if plateau
            else "needs a scheduler of torch.optim.lr_scheduler"
        )
        raise ConfigError(f"scheduler.interval=epoch: {other}; leave it out")
    name = getattr(target, "__name__", type(target).__name__)
    left = None if total_steps is None else max(total_steps - warmup_steps, 1)
    if by_epoch:
        left = None if left is None or steps_per_epoch is None else -(-left // steps_per_epoch)
    keywords = _add_length(target, name, keywords, left)
    try:
        if builds_scheduler(target):
            made = _check_scheduler(target(optimizer, **keywords), name)
            if isinstance(made, ReduceLROnPlateau) and not validates:
                raise ConfigError(
                    "scheduler=plateau: there is no validation data; set data.val, or use another scheduler"
                )
            return Schedule(
                optimizer, None, warmup_steps, TorchScheduler(made, metric, by_epoch), warmup_start_factor
            )
        curve = _check_curve(partial(target, **keywords), name)
    except OF_ARGUMENTS as error:
        if not (isinstance(error, TypeError | ValueError) or is_raised_by_torch(error)):
            raise
        way = "; give a function as a node: {_target_: package.function, _partial_: true}"
        way *= "'str' object is not callable" in str(error)
        raise PluginError(f"scheduler: {name}: {format_error(error)}{way}") from error
    return Schedule(optimizer, curve, warmup_steps, None, warmup_start_factor)


def builds_scheduler(target: Callable[..., Any]) -> bool:
    """Return whether the target builds a torch scheduler from the optimizer, and is not a curve over steps."""
    if inspect.isclass(target):
        return issubclass(target, LRScheduler)
    return next(iter(_list_parameters(target)), "") == "optimizer"


def _add_length(
    target: Callable[..., Any], name: str, keywords: dict[str, Any], left: int | None
) -> dict[str, Any]:
    """Return the keywords with the length of the training, if the target takes it and the user did not set it."""
    length_names = [
        word for word in (*LENGTHS, LENGTHS_OF_CLASS.get(name)) if word in _list_parameters(target)
    ]
    if keywords.get("epochs") is not None and keywords.get("steps_per_epoch") is not None:
        return keywords  # OneCycleLR computes its length from these
    missing = [word for word in length_names if word is not None and keywords.get(word) is None]
    if missing and left is None:
        raise ConfigError(f"scheduler.{missing[0]}: {UNKNOWN_LENGTH}, or scheduler.{missing[0]} itself")
    return keywords | dict.fromkeys(missing, left)


def _list_parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # a callable without a readable signature
        return {}


def _check_scheduler(made: Any, name: str) -> LRScheduler:
    if not isinstance(made, LRScheduler):
        raise PluginError(
            f"scheduler: {name} returned a {type(made).__name__}; it must return a scheduler of "
            "torch.optim.lr_scheduler (a curve takes the step as its first argument, not the optimizer)"
        )
    return made


def _check_curve(curve: Curve, name: str) -> Curve:
    value = curve(0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PluginError(
            f"scheduler: {name}(0) returned a {type(value).__name__}; it must return a number, what the "
            "learning rate of the optimizer is multiplied by"
        )
    return curve
