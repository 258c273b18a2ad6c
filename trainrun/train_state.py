"""The state of a run that changes during the training, besides the tensors of its components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainrun.interfaces import MicroBatch, StepReport

# what a rank says at a step about saving; of all ranks the largest counts
SAVE_NONE = 0  # nothing, or: its part of the save under way is done
SAVE_NOW = 1  # the time between two saves is over
SAVE_BUSY = 2  # its part of the save under way is not done
SAVE_FAILED = 3

OF_THIS_RANK = ("losses", "logged_items", "sums", "sum_items")
OF_THIS_SESSION = ("stop_request", "save_request", "validate_request", "stop_reason", "bad")


class BadStep(NamedTuple):
    """The micro-batches of a step without an update, their losses, and the position in the data where they begin."""

    window: list[MicroBatch]
    losses: list[Tensor]
    epoch: int
    batches: int


class StartPosition(NamedTuple):
    """Where a run continues: the steps made, the finished epochs, and the samples that this epoch has used."""

    step: int
    epoch: int
    samples: int


@dataclass
class TrainState:
    """The training state besides tensors. Every checkpoint holds it, so that a resume is exact.

    step: optimizer updates tried. epoch: finished epochs. batches: micro-batches done in this epoch.
    items: items that the loss was averaged over so far, on an average rank. step_items: those of the last step.
    watched_metric, bad_validations, early_stop: the state of early stopping.
    best_by, watched_by: metric and mode of best_metric and of watched_metric; "" if unknown.
    ended_step: the step at which the training last ended by itself, after which `on_end` was called.
    seconds: training time of all sessions of the run.
    rollbacks: how often the run went back to a checkpoint. bad: the last step, if its update was skipped.
    losses, logged_items: of this rank, from steps that are in no row yet (0-d tensors, and their items).
    sums, sum_items: the task's sums in the sampled ones of these steps, and the items of each sum.
    logged, since_validation: losses and sums over all ranks, on the host, since the last log point and since the
        last validation.
    """

    step: int = 0
    epoch: int = 0
    batches: int = 0
    items: float = 0.0
    step_items: float = 0.0
    seconds: float = 0.0
    validated_step: int = -1
    saved_step: int = -1
    ended_step: int = -1
    best_metric: float | None = None
    best_step: int = -1
    best_by: str = ""
    watched_metric: float | None = None
    watched_by: str = ""
    bad_validations: int = 0
    early_stop: str = ""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    rollbacks: int = 0
    bad: BadStep | None = None
    stop_reason: str = ""
    stop_request: int = 0
    save_request: int = 0
    validate_request: bool = False
    losses: list[Tensor] = field(default_factory=list)
    logged_items: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    sum_items: dict[str, int] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)
    since_validation: dict[str, Tensor] = field(default_factory=dict)
    last_metrics: dict[str, float] = field(default_factory=dict)

    def advance(self, window: list[MicroBatch], report: StepReport) -> None:
        """Count a step after its update."""
        if report.grad.skipped:
            self.bad = BadStep(window, report.losses, self.epoch, self.batches)
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
        else:  # a loss that is not finite may be of one rank alone, so all leave out those of a skipped step
            self.skipped_in_a_row = 0
            self.losses += report.losses
            self.logged_items += report.items
        self.step += 1
        self.batches += len(window)
        if window[-1].last:
            self.epoch, self.batches = self.epoch + 1, 0
        self.step_items = report.agreed.items
        self.items += self.step_items
        self.validate_request = report.agreed.validate
        self.stop_request, self.save_request = report.agreed.stop, report.agreed.save

    def state_dict(self) -> dict[str, Any]:
        state = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in OF_THIS_SESSION
        }
        state["losses"] = torch.stack(self.losses) if self.losses else None
        state["last_metrics"] = dict(self.last_metrics)
        state["logged_items"] = int(self.logged_items)  # a task may count with tensors
        state["sum_items"] = {name: int(items) for name, items in self.sum_items.items()}
        for name in ("sums", "logged", "since_validation"):
            state[name] = dict(state[name])
        return state


def read_watched_value(metrics: Mapping[str, float], name: str, named: bool) -> float:
    """Return a metric of a validation; NaN if the loss of the same set is not finite, so that it is never the best.

    named: whether the user chose the metric. Then the loss does not matter, because some tasks have none in a
        validation.
    """
    losses = [value for key, value in metrics.items() if key.endswith("/loss") and name.startswith(key[:-4])]
    return float(metrics.get(name, math.nan)) if named or all(map(math.isfinite, losses)) else math.nan


class RollBack(Exception):
    """The exception that the run returns to its newest checkpoint and continues after the bad step in the data.

    epoch, batches: the position after the bad step. rollbacks: their number so far, with this one. seconds: of
        training so far.
    """

    def __init__(self, state: TrainState) -> None:
        super().__init__(f"step {state.step}: back to the newest checkpoint")
        self.step, self.epoch, self.batches = state.step, state.epoch, state.batches
        self.rollbacks, self.seconds = state.rollbacks + 1, state.seconds

    def apply(self, state: TrainState) -> None:
        """Apply the rollback to the state of the checkpoint."""
        state.epoch, state.batches = self.epoch, self.batches
        state.rollbacks, state.seconds = self.rollbacks, self.seconds
