"""The contract of a hook: its methods, and when they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Hook(Protocol):
    """An object that acts on a run (`hook.NAME._target_`). Every method is optional. All are called on every rank.

    run: `trainrun.training.components.Components`; state: `trainrun.train_state.TrainState`. With `state_dict` and
        `load_state_dict`, its own state is saved in every checkpoint and restored. Changes to weights are saved with
        the weights. Changes to what the config sets (`weight_decay` of the optimizer) must be made again in
        `on_start`.
    """

    def on_start(self, run: Any, state: Any) -> None:
        """Run before the first step of a session; `state.step` is above 0 after a resume."""

    def on_epoch_start(self, run: Any, state: Any) -> None:
        """Run before the first step of an epoch."""

    def on_gradients(self, run: Any) -> None:
        """Run after the gradients of a step are computed, and before `run.update` uses them. They are not yet unscaled,
        checked or clipped.
        """

    def on_step_end(self, run: Any, state: Any) -> None:
        """Run after every step; `state.step` includes it."""

    def on_epoch_end(self, run: Any, state: Any) -> None:
        """Run after the last step of an epoch, before its validation and checkpoint."""

    def on_validation_end(self, run: Any, state: Any, metrics: Mapping[str, float]) -> None:
        """Run after a validation. metrics: by name, such as `val/loss`."""

    def on_checkpoint(self, run: Any, state: Any) -> None:
        """Run just before a checkpoint is taken."""

    def on_end(self, run: Any, state: Any) -> None:
        """Run after the last step, also if the run was stopped."""
