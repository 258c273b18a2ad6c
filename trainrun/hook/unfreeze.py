"""`model.unfreeze_at`: frozen parameters are trained from an epoch or a step on.

When: fine-tuning (`init_from`), where a new random layer would first damage the others. How: until then they get no
    gradient, and an optimizer ignores such parameters, weight decay included; its state for them starts with their
    first gradient. Source: Howard and Ruder 2018 (ULMFiT), section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainrun.limits import EPOCH, STEP, parse_duration
from trainrun.output import format_count

if TYPE_CHECKING:
    from torch import nn

    from trainrun.train_state import TrainState
    from trainrun.training.components import Components
    from trainrun.transform.freeze import FrozenParameters


def check_unfreezing(node: Mapping[str, Any]) -> list[str]:
    """Return a message for each mistake in `model.freeze_norm` and `model.unfreeze_at`."""
    faults = []
    for name in ("freeze_norm", "unfreeze_at"):
        if (value := node.get(name)) and not node.get("freeze"):
            typed = "true" if value is True else value
            faults.append(
                f"model.{name}={typed}: applies to frozen weights, but none are frozen; add model.freeze='encoder.*'"
            )
    if (value := node.get("unfreeze_at")) is not None:
        try:
            is_whole = parse_duration(value, STEP, EPOCH).amount.is_integer()
            faults += (
                []
                if is_whole
                else [f"model.unfreeze_at={value}: must be whole epochs; use steps, as 500step"]
            )
        except ValueError as error:
            faults.append(f"model.unfreeze_at={value}: {error}")
    return faults


def build_unfreezing(frozen: FrozenParameters, until: str | None, model: nn.Module) -> Unfreeze:
    """Freeze the parameters, and return the hook that trains them later."""
    frozen.set(model, True)
    if until is None:
        return Unfreeze(frozen, None, False)
    duration = parse_duration(until, STEP, EPOCH)
    return Unfreeze(frozen, int(duration.amount), duration.unit == EPOCH, until)


def describe_unfreezing(frozen: FrozenParameters, until: str | None) -> str:
    size = sum(frozen.sizes.values())
    return (
        f"model.freeze: {format_count(len(frozen.sizes), 'tensor')} ({format_count(size, 'parameter')}) frozen"
        + (f", {format_count(len(frozen.norms), 'batch norm')} in evaluation mode" if frozen.norms else "")
        + ("" if until is None else f", until {until}")
    )


def set_training_mode(model: nn.Module, notes: list[str]) -> None:
    """Put all layers into training mode, as after a validation, because `from_pretrained` returns evaluation mode.

    A note names a layer that changed.
    """
    others = {name: layer for name, layer in model.named_modules() if not layer.training}
    model.train()
    if changed := [name or type(model).__name__ for name, layer in others.items() if layer.training]:
        rest = f" and {format_count(len(changed) - 1, 'other module')}" if len(changed) > 1 else ""
        notes.append(
            f"model: {changed[0]}{rest} came in evaluation mode (no dropout, batch norm as it is), now in training "
            "mode; model.freeze_norm=true keeps frozen batch norms as they are"
        )


class Unfreeze:
    """A hook that unfreezes parameters. after: the number of finished epochs or steps; None for never."""

    def __init__(self, frozen: FrozenParameters, after: int | None, by_epoch: bool, said: str = "") -> None:
        self._frozen, self._after, self._by_epoch, self._said = frozen, after, by_epoch, said

    def on_start(self, run: Components, state: TrainState) -> None:
        if self._after is None:  # another hook may train the parameters since
            self._frozen.set_norms(run.model, True)
            return
        self._set(run, state)
        rhythm = run.triggers.rhythm
        steps = self._after * (rhythm.steps_per_epoch or 0 if self._by_epoch else 1)
        if rhythm.total_steps is not None and steps >= rhythm.total_steps:
            run.monitors.note(
                f"model.unfreeze_at={self._said}: the run ends before, at step {rhythm.total_steps}: they stay frozen"
            )

    def on_step_end(self, run: Components, state: TrainState) -> None:
        if self._after == (state.epoch if self._by_epoch else state.step):
            self._set(run, state)

    def _set(self, run: Components, state: TrainState) -> None:
        done = state.epoch if self._by_epoch else state.step
        self._frozen.set(run.model, self._after is None or done < self._after)
