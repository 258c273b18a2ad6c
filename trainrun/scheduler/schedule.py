"""The learning rates of an optimizer over the updates it has made.

One owner: linear warmup in front, then either a curve in closed form or one of torch's schedulers.
torch's are often recursive (each value is computed from the one in the optimizer), so during the warmup
the wrapped one is not stepped at all, and gets the value it left in the optimizer back at its end.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainrun.errors import OF_ARGUMENTS, CheckpointError, ConfigError, PluginError, is_of_torch, named
from trainrun.scheduler.curves import constant

Curve = Callable[[int], float]


class Schedule:
    """Sets every group's rate for update s (0 is the first), where W is `warmup_steps`:

    s < W: base * (s + 1) / W, so the first update learns already and update W - 1 has the base rate;
    s >= W: base * curve(s - W), or what torch's scheduler says after s - W of its steps.

    base is the rate of the group as the optimizer was built; with a torch scheduler it is what that
    scheduler starts with (OneCycleLR starts at max_lr / 25).

    shape: a curve, a torch scheduler that was built on this optimizer, or None for a constant rate.
    metric: the validation metric that ReduceLROnPlateau reads; validations during the warmup do not count.
    by_epoch: torch's scheduler takes a step at the end of each epoch (of the first one behind the warmup on), however
        many updates it had, and however many of them were skipped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shape: Curve | LRScheduler | None,
        warmup_steps: int = 0,
        metric: str | None = None,
        by_epoch: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._by_epoch = by_epoch
        self._wrapped = shape if isinstance(shape, LRScheduler) else None
        self._curve = None if isinstance(shape, LRScheduler) else shape
        self.warmup_steps = warmup_steps
        self._metric = metric
        self._count = 0
        self._base_lrs = self.lrs
        self._follow()

    @property
    def lr(self) -> float:
        """Learning rate of the first group for the coming update."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def rates(self) -> dict[str, float]:
        """For a row of metrics."""
        return {"lr": self.lr}

    @property
    def peak_lrs(self) -> list[float]:
        """The rate of each group that the schedule starts from, or climbs to."""
        groups = self._optimizer.param_groups
        return [float(group.get("max_lr", base)) for group, base in zip(groups, self._base_lrs, strict=True)]

    @property
    def lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def step(self) -> None:
        """Once after every update that was not skipped."""
        self._count += 1
        if self._curve is not None or self._count <= self.warmup_steps:
            self._follow()
        elif not self._by_epoch:
            self._step_wrapped()

    def end_epoch(self) -> None:
        """Once after the last update of every epoch, skipped or not."""
        if self._by_epoch and self._count > self.warmup_steps:
            self._step_wrapped()

    def _step_wrapped(self) -> None:
        wrapped = self._wrapped
        if wrapped is None or isinstance(wrapped, ReduceLROnPlateau):
            return
        try:
            wrapped.step()
        except OF_ARGUMENTS as error:
            if not is_of_torch(error):
                raise
            name = type(wrapped).__name__
            raise PluginError(f"scheduler: {name}: at step {self._count}: {named(error)}") from error

    def _follow(self) -> None:
        """The rates of the warmup, of its end, and of the start where there is none."""
        if self._count < self.warmup_steps:
            self._scale((self._count + 1) / self.warmup_steps)
        elif self._curve is not None:
            self._scale(self._curve(self._count - self.warmup_steps))
        else:
            self._scale(1.0)

    def _scale(self, multiplier: float) -> None:
        for group, base in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            set_lr(group, base * multiplier)

    def on_validation(self, metrics: dict[str, float]) -> None:
        """Let ReduceLROnPlateau look at its metric; every other schedule ignores validations."""
        if not isinstance(self._wrapped, ReduceLROnPlateau) or self._count < self.warmup_steps:
            return
        losses = (name for name in metrics if name.startswith("val/") and name.endswith("/loss"))
        name = self._metric or next(losses, "val/loss")  # of the first validation set
        if name not in metrics:
            known = ", ".join(sorted(metrics)) or "none"
            raise ConfigError(f"scheduler.metric={name}: validation has no such metric; it has: {known}")
        self._wrapped.step(metrics[name])

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self._count,
            "lrs": self.lrs,
            "interval": "epoch" if self._by_epoch else "step",
            "wrapped": None if self._wrapped is None else plain(self._wrapped.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the optimizer has its state.

        The warmup and the curves are computed again from the count, so a rate or a length that was
        changed for a resume holds; torch's schedulers go on from the rates they had.
        """
        if len(state["lrs"]) != len(self._base_lrs):
            raise CheckpointError(
                f"scheduler: the checkpoint has learning rates of {len(state['lrs'])} parameter groups, "
                f"the optimizer has {len(self._base_lrs)}"
            )
        before, now = state.get("interval", "step"), "epoch" if self._by_epoch else "step"
        if self._wrapped is not None and before != now:
            raise CheckpointError(
                f"scheduler.interval={now}: the checkpoint's schedule was counted by {before}; use "
                f"scheduler.interval={before}"
            )
        self._count = state["count"]
        self._follow()
        if self._wrapped is not None and state["wrapped"] is not None:
            self._wrapped.load_state_dict(plain(state["wrapped"]))
            for group, lr in zip(self._optimizer.param_groups, state["lrs"], strict=True):
                set_lr(group, lr)


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Into the tensor where the rate is one, so that captured graphs see it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def plain(tree: Any) -> Any:
    """The state of one of torch's schedulers as a tree that survives JSON: a copy without the entries of dicts that
    are no plain values (functions), or whose keys are not strings; a freshly built scheduler has those."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items() if isinstance(key, str) and _is_plain(value)}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | Tensor)


UNKNOWN_LENGTH = "the number of steps is not known in advance; set trainer.max_steps"
# Arguments that mean "the length of the training": filled in where they are None or not given.
LENGTHS = ("total_steps", "num_training_steps", "T_max")
LENGTHS_OF_CLASS = {"LinearLR": "total_iters", "PolynomialLR": "total_iters"}
RULES = ("none", "linear", "sqrt")


def resolve_warmup(
    steps: int | None, ratio: float | None, epochs: float | None, total_steps: int | None, steps_per_epoch: int | None
) -> int:  # fmt: skip
    """The warmup in steps, rounded to the nearest. At most one may be set; ratio: of all steps."""
    words = {"steps": steps or None, "ratio": ratio, "epochs": epochs}
    given = {word: value for word, value in words.items() if value is not None}
    if not given:
        return 0
    if len(given) > 1:
        keys = " and ".join(f"scheduler.warmup_{word}" for word in given)
        raise ConfigError(f"{keys}: set only one of them")
    ((word, value),) = given.items()
    said = f"scheduler.warmup_{word}={value:g}"
    if value < 0 or (word == "ratio" and value > 1):
        raise ConfigError(f"{said}: must be {'between 0 and 1' if word == 'ratio' else '0 or more'}")
    if word == "ratio" and total_steps is None:
        raise ConfigError(f"{said}: {UNKNOWN_LENGTH}, or use scheduler.warmup_steps")
    if word == "epochs" and steps_per_epoch is None:
        raise ConfigError(f"{said}: the length of an epoch is not known; use scheduler.warmup_steps")
    found = round(value * ({"ratio": total_steps, "epochs": steps_per_epoch}.get(word) or 1))
    if total_steps is not None and found > total_steps:
        raise ConfigError(
            f"{said}: a warmup of {found} steps is longer than the run of {total_steps}; use less, or 0"
        )
    return found


def scaled_lr(lr: float, rule: str, global_batch_size: int, base_batch_size: int) -> tuple[float, str]:
    """The learning rate times (global / base) or its square root, and a note ("" if nothing changes).

    linear: for SGD (Goyal et al. 2017); sqrt: for Adam and its kin (Malladi et al. 2022).
    """
    if rule not in RULES:
        raise ConfigError(f"scheduler.lr_scaling={rule}: choose one of {', '.join(RULES)}")
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
) -> Schedule:  # fmt: skip
    """target: a torch scheduler class, or any function whose first argument is `optimizer` and that returns a torch
    scheduler; else a curve, called as `target(step, **keywords)`.

    total_steps: of the whole run, the warmup included; the target is told what is left after it.
    metric: what ReduceLROnPlateau looks at (`val/loss`). by_epoch: the target counts epochs, of `steps_per_epoch`.
    """
    if by_epoch and (not makes_scheduler(target) or target is ReduceLROnPlateau):
        plateau = target is ReduceLROnPlateau
        other = "ReduceLROnPlateau counts validations" if plateau else "this one is given the step"
        raise ConfigError(
            f"scheduler.interval=epoch: for schedulers of torch.optim.lr_scheduler, and {other}; leave it out"
        )
    if target is constant:  # nothing is written into the optimizer after the warmup
        return Schedule(optimizer, None, warmup_steps, metric)
    name = getattr(target, "__name__", type(target).__name__)
    left = None if total_steps is None else max(total_steps - warmup_steps, 1)
    if by_epoch:
        left = None if left is None or steps_per_epoch is None else -(-left // steps_per_epoch)
    keywords = _with_length(target, name, keywords, left)
    shape: LRScheduler | Curve
    try:
        if makes_scheduler(target):
            shape = _checked_scheduler(target(optimizer, **keywords), name)
        else:
            shape = _checked_curve(partial(target, **keywords), name)
    except OF_ARGUMENTS as error:
        if not (isinstance(error, TypeError | ValueError) or is_of_torch(error)):
            raise
        raise PluginError(f"scheduler: {name}: {named(error)}") from error
    return Schedule(optimizer, shape, warmup_steps, metric, by_epoch)


def makes_scheduler(target: Callable[..., Any]) -> bool:
    """Whether the target is called once with the optimizer, and not with a step at every update."""
    if inspect.isclass(target):
        return issubclass(target, LRScheduler)
    return next(iter(_parameters(target)), "") == "optimizer"


def _with_length(
    target: Callable[..., Any], name: str, keywords: dict[str, Any], left: int | None
) -> dict[str, Any]:
    """The keywords, with the length of the training where the target asks for it and nobody said it."""
    asked = [word for word in (*LENGTHS, LENGTHS_OF_CLASS.get(name)) if word in _parameters(target)]
    if keywords.get("epochs") is not None and keywords.get("steps_per_epoch") is not None:
        return keywords  # OneCycleLR computes its length from these
    missing = [word for word in asked if word is not None and keywords.get(word) is None]
    if missing and left is None:
        raise ConfigError(f"scheduler.{missing[0]}: {UNKNOWN_LENGTH}, or scheduler.{missing[0]} itself")
    return keywords | dict.fromkeys(missing, left)


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # a callable without a readable signature
        return {}


def _checked_scheduler(made: Any, name: str) -> LRScheduler:
    if not isinstance(made, LRScheduler):
        raise PluginError(
            f"scheduler: {name} returned a {type(made).__name__}; it must return a scheduler of "
            "torch.optim.lr_scheduler (a curve takes the step as its first argument, not the optimizer)"
        )
    return made


def _checked_curve(curve: Curve, name: str) -> Curve:
    value = curve(0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PluginError(
            f"scheduler: {name}(0) returned a {type(value).__name__}; it must return a number, what the "
            "learning rate of the optimizer is multiplied by"
        )
    return curve
