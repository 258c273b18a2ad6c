"""Several optimizers by name, each with its own parameters and schedule.

what: without a custom step, all of them are updated in every step from one loss, and checked and clipped as one.
    With a custom step, `run.optimizers["generator"]` has its own guarded update and loss scale: `backward` computes
    gradients of its own parameters only, so the losses of two players never mix; `update` checks, clips, updates and
    clears. Schedules count steps of the run.
when: adversarial training, other rules for parts that are trained in turns; sparse gradients beside dense ones. when
    not: other learning rates for parts that are trained together: use groups of one optimizer. Several ranks
    (refused).
source: Goodfellow et al. 2014, arXiv:1406.2661
gain: their states, scales and schedules are in the checkpoint, so a resume is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from trainrun.errors import CheckpointError, PluginError
from trainrun.interfaces import GradReport
from trainrun.optimizer.build_optimizer import named_optimizer_state
from trainrun.optimizer.load_named_state import configured_fields, load_named_optimizer_state
from trainrun.precision.update import Update
from trainrun.scheduler.schedule import Schedule


class NamedOptimizer:
    """One optimizer by name, with the schedule of its learning rates. show: called with the gradients before each
    update.
    """

    def __init__(self, optimizer: Optimizer, guarded: Update, schedule: Schedule) -> None:
        self.optimizer, self.schedule, self.guarded = optimizer, schedule, guarded
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self._skipped = False
        self.show: Callable[[], None] = show_nothing

    def backward(self, loss_sum: Tensor, share: float) -> None:
        """Add the gradient of `share * loss_sum` to this optimizer's parameters. No other parameter gets one."""
        trained = [param for param in self.params if param.requires_grad]
        self.guarded.backward(loss_sum, share, trained)

    def update(self, want_norm: bool = False) -> GradReport:
        """Unscale, check, clip, update, and clear the gradients of this optimizer."""
        self.show()
        report = self.guarded.optimizer_step(self.optimizer, want_norm)
        self._skipped |= report.skipped
        return report

    def end_step(self) -> bool:
        """Advance the schedule unless an update was skipped in this step. Return whether one was skipped."""
        skipped, self._skipped = self._skipped, False
        if not skipped:
            self.schedule.step()
        return skipped


Named = Mapping[str, NamedOptimizer]


def end_step(named: Named) -> bool:
    """End the step of each optimizer. Return whether any of them skipped an update."""
    skips = [named_optimizer.end_step() for named_optimizer in named.values()]
    return any(skips)


class JoinedOptimizers(Optimizer):
    """All named optimizers as one: their groups and states. parts: the optimizers, which `plain_step` updates in
    order.
    """

    def __init__(self, named: Named) -> None:
        self._named = named
        self.parts = [item.optimizer for item in named.values()]
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [
            group
            for named_optimizer in self._named.values()
            for group in named_optimizer.optimizer.param_groups
        ]

    @property
    def state(self) -> Any:  # type: ignore[override]
        states = (named_optimizer.optimizer.state for named_optimizer in self._named.values())
        return defaultdict(dict, {key: param_state for state in states for key, param_state in state.items()})

    def step(self, closure: Any = None) -> NoReturn:
        refuse_single_update(self._named)


class JoinedPrecision:
    """The precision of several optimizers: one autocast, and the failures of all of them."""

    def __init__(self, named: Named, common: Update) -> None:
        self._named, self._common = named, common

    def autocast(self) -> AbstractContextManager[Any]:
        return self._common.autocast()

    def backward(self, loss_sum: Tensor, share: float) -> None:
        refuse_single_update(self._named)

    def optimizer_step(self, optimizer: Optimizer, want_norm: bool) -> GradReport:
        refuse_single_update(self._named)

    @property
    def params_with_gradient(self) -> set[Tensor]:
        return {
            param
            for named_optimizer in self._named.values()
            for param in named_optimizer.guarded.params_with_gradient
        }

    def reload_optimizer_state(self) -> None:
        for named_optimizer in self._named.values():
            named_optimizer.guarded.reload_optimizer_state()

    def failure(self, wait: bool) -> str:
        failures = (
            (name, named_optimizer.guarded.failure(wait)) for name, named_optimizer in self._named.items()
        )
        return next((f"optimizer.{name}: {failure}" for name, failure in failures if failure), "")

    def state_dict(self) -> dict[str, Any]:
        named = {name: item.guarded.state_dict() for name, item in self._named.items()}
        scales = {name: state["scaler"] for name, state in named.items() if state["scaler"] is not None}
        return {"named": named, "scaler": scales or None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, item in self._named.items():
            item.guarded.load_state_dict(state["named"][name])


class JoinedSchedules:
    """The schedules of several optimizers as one. together: whether they advance here, and not by name."""

    def __init__(self, named: Named, together: bool) -> None:
        self._together = together
        self._schedules = {name: item.schedule for name, item in named.items()}

    @property
    def lr(self) -> float:
        return next(iter(self._schedules.values())).lr

    @property
    def rates(self) -> dict[str, float]:
        return {"lr": self.lr} | {f"lr/{name}": schedule.lr for name, schedule in self._schedules.items()}

    @property
    def peak_lrs(self) -> list[float]:
        return [rate for schedule in self._schedules.values() for rate in schedule.peak_lrs]

    @property
    def warmup_steps(self) -> int:
        return max(schedule.warmup_steps for schedule in self._schedules.values())

    def step(self) -> None:
        for schedule in self._schedules.values() if self._together else ():
            schedule.step()

    def end_epoch(self) -> None:
        for schedule in self._schedules.values():
            schedule.end_epoch()

    def on_validation(self, metrics: dict[str, float]) -> None:
        for schedule in self._schedules.values():
            schedule.on_validation(metrics)

    def state_dict(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self._schedules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, item in self._schedules.items():
            item.load_state_dict(state[name])


def collect_optimizer_states(named: Named, model: nn.Module) -> dict[str, Any]:
    return {
        "named": {
            name: named_optimizer_state(named_optimizer.optimizer, model)
            for name, named_optimizer in named.items()
        }
    }


def load_optimizer_states(
    named: Named, model: nn.Module, place: str, tree: dict[str, Any], config: Mapping[str, Any]
) -> None:
    """Load the states by name. Raise CheckpointError if the names differ. config: the node of the optimizers.

    Arguments in the config override stored ones.
    """
    stored = tree.get("named", {})
    if list(stored) != list(named):
        stored_names = ", ".join(stored) or "one without a name"
        raise CheckpointError(
            f"checkpoint {place}: its optimizers are {stored_names}; now {', '.join(named)}"
        )
    for name, named_optimizer in named.items():
        load_named_optimizer_state(
            named_optimizer.optimizer, model, stored[name], configured_fields(config[name])
        )


def show_nothing() -> None:
    """Do nothing. Used before there is a run with hooks."""


def refuse_single_update(named: Named) -> NoReturn:
    raise PluginError(
        f'step: there are several optimizers ({", ".join(named)}); call run.optimizers["{next(iter(named))}"]'
        ".backward(loss_sum, share) and .update()"
    )
