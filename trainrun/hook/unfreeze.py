"""`model.unfreeze_at`: frozen parameters are trained from an epoch or a step on: the last layer first, the rest later.

When: fine-tuning (`init_from`) where a new, random layer would first spoil the others.
How: until then they get no gradient, and an optimizer leaves such parameters alone, weight decay included; its
averages of them begin with their first gradient, exactly as if they had come just then.
Source: Howard and Ruder 2018 (ULMFiT), section 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainrun.formatting import counted

if TYPE_CHECKING:
    from trainrun.training.components import Components
    from trainrun.training.state import TrainState
    from trainrun.transform.freeze import Frozen


def told(frozen: Frozen, until: str | None) -> str:
    size = sum(param.numel() for param in frozen.params)
    return (
        f"model.freeze: {counted(len(frozen.params), 'tensor')} ({counted(size, 'parameter')}) frozen"
        + (f", {counted(len(frozen.norms), 'batch norm')} in evaluation mode" if frozen.norms else "")
        + ("" if until is None else f", until {until}")
    )


class Unfreeze:
    """A hook. after: so many finished epochs, or steps; None: never."""

    def __init__(self, frozen: Frozen, after: int | None, by_epoch: bool) -> None:
        self._frozen, self._after, self._by_epoch = frozen, after, by_epoch

    def on_start(self, run: Components, state: TrainState) -> None:
        self._set(run, state)

    def on_step_end(self, run: Components, state: TrainState) -> None:
        if self._after == (state.epoch if self._by_epoch else state.step):
            self._set(run, state)

    def _set(self, run: Components, state: TrainState) -> None:
        done = state.epoch if self._by_epoch else state.step
        self._frozen.set(run.model, self._after is None or done < self._after)
