"""A torch scheduler after the warmup.

Torch's schedulers often compute each value from the one in the optimizer. So during the warmup they are not stepped,
and at its end their initial values are restored in the optimizer.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainrun.errors import OF_ARGUMENTS, CheckpointError, ConfigError, PluginError
from trainrun.user_code import format_error, is_raised_by_torch

LENGTHS = {"total_steps", "_schedule_phases"}  # of OneCycleLR
MOVING = {"last_epoch", "_step_count", "_last_lr"}
IN_GROUPS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")  # what a new one leaves there


class TorchScheduler:
    """A torch scheduler. scheduler: built on the optimizer. metric: the validation metric for ReduceLROnPlateau.

    by_epoch: step at the end of each epoch after the warmup, independent of its number of updates.
    """

    def __init__(self, scheduler: LRScheduler, metric: str | None = None, by_epoch: bool = False) -> None:
        self._scheduler, self._metric, self._by_epoch = scheduler, metric, by_epoch
        self._groups = scheduler.optimizer.param_groups
        self._first = json.dumps(
            copy_plain_state(scheduler.state_dict()), default=Tensor.tolist, sort_keys=True
        )
        self._fields = [{name: group[name] for name in _list_group_fields(group)} for group in self._groups]

    def after_update(self, count: int) -> None:
        """Step the scheduler, unless it counts epochs. count: updates so far."""
        if not self._by_epoch:
            self._step(count)

    def after_epoch(self, count: int) -> None:
        if self._by_epoch:
            self._step(count)

    def _step(self, count: int) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            return
        try:
            self._scheduler.step()
        except OF_ARGUMENTS as error:
            if not is_raised_by_torch(error):
                raise
            name = type(self._scheduler).__name__
            raise PluginError(f"scheduler: {name}: at step {count}: {format_error(error)}") from error

    def on_validation(self, metrics: dict[str, float]) -> None:
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            return
        losses = (name for name in metrics if name.startswith("val/") and name.endswith("/loss"))
        name = self._metric or next(losses, "val/loss")  # of the first validation set
        if name not in metrics:
            metric_names = ", ".join(sorted(metrics)) or "none"
            raise ConfigError(
                f"scheduler.metric={name}: validation has no such metric; it has: {metric_names}"
            )
        self._scheduler.step(metrics[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the entries that this scheduler adds to the state of a schedule."""
        wrapped = copy_plain_state(self._scheduler.state_dict())
        return {"interval": self._interval, "wrapped": wrapped, "first": self._first}

    @property
    def _interval(self) -> str:
        return "epoch" if self._by_epoch else "step"

    def load_state_dict(self, state: dict[str, Any], steps: int) -> list[float]:
        """Restore a torch scheduler. Return the learning rates from which to continue; [] if it has not begun.

        state: of the schedule. steps: updates after the warmup so far. The optimizer has the scheduler's initial
            rates. If an argument, a rate or the kind of schedule changed, a scheduler of torch repeats all its
            steps; for a plateau or a custom class the rates change in proportion to the initial ones.
        """
        interval = state.get("interval", "step")
        if interval != self._interval:
            raise CheckpointError(
                f"scheduler.interval={self._interval}: the schedule in the checkpoint advances by {interval}; use "
                f"scheduler.interval={interval}"
            )
        wrapped, first, rates = (
            copy_plain_state(state["wrapped"] or {}),
            state.get("first"),
            list(state["lrs"]),
        )
        plateau = isinstance(self._scheduler, ReduceLROnPlateau)
        if plateau and "num_bad_epochs" not in wrapped:
            return []
        if not wrapped or first not in (None, self._first):
            if not plateau and (not wrapped or _is_torch_scheduler(self._scheduler)):
                member = wrapped.get("_schedulers", [wrapped])[0]  # of a chain, which does not count itself
                epochs = wrapped.get("last_epoch", member.get("last_epoch", 0))
                return self._replay(epochs if self._by_epoch else steps)
            old, new = json.loads(first or "{}"), json.loads(self._first)
            wrapped |= self._find_changed_values(old)
            pairs = zip(rates, old.get("_last_lr", rates), new.get("_last_lr", rates), strict=False)
            rates = [lr * now / before if before else lr for lr, before, now in pairs]
        elif first is None:  # of a version that did not keep it
            wrapped |= {name: getattr(self._scheduler, name) for name in LENGTHS & wrapped.keys()}
        self._scheduler.load_state_dict(wrapped)
        return rates

    def _find_changed_values(self, before: dict[str, Any]) -> dict[str, Any]:
        """Return the initial values of this scheduler that differ from those of the earlier session."""
        now, mine = json.loads(self._first), copy_plain_state(self._scheduler.state_dict())
        names = [name for name in now.keys() - MOVING if before.get(name) != now[name]]
        return {name: mine[name] for name in names if not isinstance(mine[name], dict)}

    def _replay(self, steps: int) -> list[float]:
        """Return the rates after `steps` steps of this scheduler from its beginning."""
        for group, fields in zip(self._groups, self._fields, strict=False):
            group.update(fields)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no update was made before
            for count in range(1, steps + 1):
                self._step(count)
        return [float(group["lr"]) for group in self._groups] if steps else []


def _list_group_fields(group: dict[str, Any]) -> set[str]:
    cycled = {"momentum", "betas"} if "base_momentum" in group else set()
    return group.keys() & {*IN_GROUPS, *cycled}


def _is_torch_scheduler(scheduler: LRScheduler) -> bool:
    return type(scheduler).__module__.startswith("torch.")


def copy_plain_state(tree: Any) -> Any:
    """Return a copy of a scheduler's state that JSON can hold.

    Entries that are not plain values (functions), or whose keys are not strings, are left out; a new scheduler has
    them.
    """
    if isinstance(tree, dict):
        return {
            key: copy_plain_state(value)
            for key, value in tree.items()
            if isinstance(key, str) and _is_plain(value)
        }
    if isinstance(tree, list | tuple):
        return [copy_plain_state(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | Tensor)
