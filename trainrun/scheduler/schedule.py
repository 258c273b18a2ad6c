"""The learning rates of an optimizer as a function of its updates.

A schedule is a linear warmup, followed by a curve in closed form or one of torch's schedulers
(`torch_scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainrun.errors import CheckpointError

if TYPE_CHECKING:
    from trainrun.scheduler.torch_scheduler import TorchScheduler

Curve = Callable[[int], float]


class Schedule:
    """The learning rate of every group for update s (0 is the first), with W = `warmup_steps`.

    s < W: base * (F + (1 - F) * (s + 1) / W) with F = `warmup_start_factor`, so that the first update has a positive
    rate and update W - 1 the base rate. s >= W: base * curve(s - W), or the rate of torch's scheduler after s - W of
    its steps.

    base is the group's rate when the optimizer was built; with a torch scheduler, its initial rate (OneCycleLR
    starts at max_lr / 25). curve: None for a constant rate. wrapped: a torch scheduler on this optimizer, instead of
    a curve.
    """

    def __init__(
        self, optimizer: Optimizer, curve: Curve | None, warmup_steps: int = 0, wrapped: TorchScheduler | None = None,
        warmup_start_factor: float = 0.0,
    ) -> None:  # fmt: skip
        self._optimizer, self._curve, self._wrapped = optimizer, curve, wrapped
        self.warmup_steps, self._start_factor = warmup_steps, warmup_start_factor
        self._count = 0
        self._base_lrs = self.lrs
        self._update_rates()

    @property
    def lr(self) -> float:
        """Learning rate of the first group for the coming update."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def rates(self) -> dict[str, float]:
        """Return the learning rates for a row of metrics."""
        return {"lr": self.lr}

    @property
    def peak_lrs(self) -> list[float]:
        """Return the base (or maximum) rate of each group."""
        pairs = zip(self._optimizer.param_groups, self._base_lrs, strict=True)
        return [float(group.get("max_lr", base or group.get("initial_lr", base))) for group, base in pairs]

    @property
    def lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def step(self) -> None:
        """Advance by one step. Called after every update that was not skipped."""
        self._count += 1
        if self._curve is not None or self._count <= self.warmup_steps:
            self._update_rates()
        elif self._wrapped is not None:
            self._wrapped.after_update(self._count)

    def end_epoch(self) -> None:
        """Advance by one epoch. Called after the last update of every epoch, skipped or not."""
        if self._wrapped is not None and self._count > self.warmup_steps:
            self._wrapped.after_epoch(self._count)

    def _update_rates(self) -> None:
        """Set the rates of the warmup, or of the curve after it."""
        if self._count < self.warmup_steps:
            start = self._start_factor
            factor = start + (1 - start) * (self._count + 1) / self.warmup_steps
        else:
            factor = 1.0 if self._curve is None else self._curve(self._count - self.warmup_steps)
        self._base_lrs += self.lrs[len(self._base_lrs) :]  # of groups that a hook has added
        self._set_rates([base * factor for base in self._base_lrs])

    def on_validation(self, metrics: dict[str, float]) -> None:
        """Pass the metrics to ReduceLROnPlateau. Other schedules ignore validations."""
        if self._wrapped is not None and self._count >= self.warmup_steps:
            self._wrapped.on_validation(metrics)

    def state_dict(self) -> dict[str, Any]:
        wrapped = {} if self._wrapped is None else self._wrapped.state_dict()
        rates = {"lrs": self.lrs, "bases": self._base_lrs}
        return {"count": self._count, **rates, "interval": "step", "wrapped": None} | wrapped

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, after the optimizer's state was restored. Raise CheckpointError for another number of
        groups.

        Warmup and curves are computed again from the step count, so a rate or length that was changed for a resume
        is used. Torch's schedulers continue from their rates, or repeat their steps if their arguments or the
        schedule changed.
        """
        if len(state["lrs"]) != len(self.lrs):
            raise CheckpointError(
                f"scheduler: the checkpoint has learning rates of {len(state['lrs'])} parameter groups, "
                f"the optimizer has {len(self.lrs)}"
            )
        self._count = state["count"]
        self._base_lrs += state.get("bases", [])[len(self._base_lrs) :]  # of groups that a hook has added
        rates = []
        if self._wrapped is not None:
            self._set_rates(self._base_lrs)
            rates = self._wrapped.load_state_dict(state, max(self._count - self.warmup_steps, 0))
        self._update_rates()
        self._set_rates(rates)

    def _set_rates(self, rates: list[float]) -> None:
        for group, lr in zip(self._optimizer.param_groups, rates, strict=False):
            set_lr(group, lr)


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the rate of a group. A tensor is changed in place, so that captured graphs see it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
