"""The learning rates of an optimizer over the updates it has made.

One owner: linear warmup in front, then a curve in closed form, or one of torch's schedulers (`torch_scheduler.py`).
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
    """Sets every group's rate for update s (0 is the first), where W is `warmup_steps`:

    s < W: base * (F + (1 - F) * (s + 1) / W) with F = `warmup_start_factor`, so the first update learns already and
    update W - 1 has the base rate;
    s >= W: base * curve(s - W), or what torch's scheduler says after s - W of its steps.

    base is the rate of the group as the optimizer was built; with a torch scheduler it is what that
    scheduler starts with (OneCycleLR starts at max_lr / 25).

    curve: None for a constant rate. wrapped: a scheduler of torch, built on this optimizer, in place of a curve.
    """

    def __init__(
        self, optimizer: Optimizer, curve: Curve | None, warmup_steps: int = 0, wrapped: TorchScheduler | None = None,
        warmup_start_factor: float = 0.0,
    ) -> None:  # fmt: skip
        self._optimizer, self._curve, self._wrapped = optimizer, curve, wrapped
        self.warmup_steps, self._start_factor = warmup_steps, warmup_start_factor
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
        """Return the rate of each group that the schedule starts from, or climbs to."""
        pairs = zip(self._optimizer.param_groups, self._base_lrs, strict=True)
        return [float(group.get("max_lr", base or group.get("initial_lr", base))) for group, base in pairs]

    @property
    def lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def step(self) -> None:
        """Advance by a step; called after every update that was not skipped."""
        self._count += 1
        if self._curve is not None or self._count <= self.warmup_steps:
            self._follow()
        elif self._wrapped is not None:
            self._wrapped.after_update(self._count)

    def end_epoch(self) -> None:
        """Advance by an epoch; called after the last update of every epoch, skipped or not."""
        if self._wrapped is not None and self._count > self.warmup_steps:
            self._wrapped.after_epoch(self._count)

    def _follow(self) -> None:
        """Set the rates of the warmup, or those at its end."""
        if self._count < self.warmup_steps:
            start = self._start_factor
            factor = start + (1 - start) * (self._count + 1) / self.warmup_steps
        else:
            factor = 1.0 if self._curve is None else self._curve(self._count - self.warmup_steps)
        self._base_lrs += self.lrs[len(self._base_lrs) :]  # of groups that a hook has added
        self._set([base * factor for base in self._base_lrs])

    def on_validation(self, metrics: dict[str, float]) -> None:
        """Let ReduceLROnPlateau look at its metric; every other schedule ignores validations."""
        if self._wrapped is not None and self._count >= self.warmup_steps:
            self._wrapped.on_validation(metrics)

    def state_dict(self) -> dict[str, Any]:
        wrapped = {} if self._wrapped is None else self._wrapped.state_dict()
        rates = {"lrs": self.lrs, "bases": self._base_lrs}
        return {"count": self._count, **rates, "interval": "step", "wrapped": None} | wrapped

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, after the optimizer has its own.

        Warmup and curves are computed again from the step count, so a rate or length that was changed for a resume is
        used. Torch's
        schedulers continue from their rates, or repeat their steps if their arguments or the schedule changed.
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
            self._set(self._base_lrs)
            rates = self._wrapped.load_state_dict(state, max(self._count - self.warmup_steps, 0))
        self._follow()
        self._set(rates)

    def _set(self, rates: list[float]) -> None:
        for group, lr in zip(self._optimizer.param_groups, rates, strict=False):
            set_lr(group, lr)


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the rate of a group; if it is a tensor, in place, so that captured graphs see it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
