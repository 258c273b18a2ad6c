"""One of torch's schedulers behind the warmup.

They are often recursive (each value is computed from the one in the optimizer), so during the warmup the wrapped one
is not stepped at all, and gets the value it left in the optimizer back at its end.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainrun.errors import OF_ARGUMENTS, CheckpointError, ConfigError, PluginError
from trainrun.user_code import is_of_torch, named

LENGTHS = {"total_steps", "_schedule_phases"}  # of OneCycleLR


class TorchScheduler:
    """scheduler: built on the optimizer of the schedule. metric: the validation metric that ReduceLROnPlateau reads.

    by_epoch: it takes a step at the end of each epoch (of the first one behind the warmup on), however many updates it
        had, and however many of them were skipped.
    """

    def __init__(self, scheduler: LRScheduler, metric: str | None = None, by_epoch: bool = False) -> None:
        self._scheduler, self._metric, self._by_epoch = scheduler, metric, by_epoch

    def after_update(self, count: int) -> None:
        """count: updates so far."""
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
            if not is_of_torch(error):
                raise
            name = type(self._scheduler).__name__
            raise PluginError(f"scheduler: {name}: at step {count}: {named(error)}") from error

    def on_validation(self, metrics: dict[str, float]) -> None:
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            return
        losses = (name for name in metrics if name.startswith("val/") and name.endswith("/loss"))
        name = self._metric or next(losses, "val/loss")  # of the first validation set
        if name not in metrics:
            known = ", ".join(sorted(metrics)) or "none"
            raise ConfigError(f"scheduler.metric={name}: validation has no such metric; it has: {known}")
        self._scheduler.step(metrics[name])

    def state_dict(self) -> dict[str, Any]:
        """What differs of the state of a schedule."""
        return {"interval": self._interval, "wrapped": plain(self._scheduler.state_dict())}

    @property
    def _interval(self) -> str:
        return "epoch" if self._by_epoch else "step"

    def load_state_dict(self, state: dict[str, Any]) -> list[float]:
        """state: of the schedule. Returns the rates to go on from; none where it was another kind of schedule."""
        before = state.get("interval", "step")
        if before != self._interval:
            raise CheckpointError(
                f"scheduler.interval={self._interval}: the checkpoint's schedule was counted by {before}; use "
                f"scheduler.interval={before}"
            )
        if state["wrapped"] is None:
            return []
        wrapped = plain(state["wrapped"])
        for name in LENGTHS & wrapped.keys():  # a run that goes on for longer has phases of that length
            wrapped[name] = getattr(self._scheduler, name)
        self._scheduler.load_state_dict(wrapped)
        return list(state["lrs"])


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
