"""The contract of a hook: what it may do, and when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Hook(Protocol):
    """Acts on a run (`hook.NAME._target_`): every method may be left out; called on every rank.

    run: `trainrun.training.components.Components`; state: `trainrun.train_state.TrainState`. With `state_dict` and
    `load_state_dict` its own state is saved with every checkpoint and resumed. What it sets elsewhere is saved where
    that is (weights); what the config names (`weight_decay` of the optimizer) it sets again in `on_start`.
    """

    def on_start(self, run: Any, state: Any) -> None:
        """Run before the first step of a session; `state.step` is above 0 after a resume."""

    def on_epoch_start(self, run: Any, state: Any) -> None:
        """Run before the first step of an epoch."""

    def on_gradients(self, run: Any) -> None:
        """Run after the gradients of a step are computed, before `run.update` unscales, checks, clips and uses
        them.
        """

    def on_step_end(self, run: Any, state: Any) -> None:
        """Run after every step, which `state.step` counts already."""

    def on_epoch_end(self, run: Any, state: Any) -> None:
        """Run after the last step of an epoch, before its validation and checkpoint."""

    def on_validation_end(self, run: Any, state: Any, metrics: Mapping[str, float]) -> None:
        """Run after a validation. metrics: by name, as `val/loss`."""

    def on_checkpoint(self, run: Any, state: Any) -> None:
        """Run just before a checkpoint is taken."""

    def on_end(self, run: Any, state: Any) -> None:
        """Run after the last step, also if the run was stopped."""
