"""Train some parameters only from an epoch on: the last layer first, the rest of a pretrained network later.

When: fine-tuning (`init_from`) where a new, random layer would first spoil the others. When not: parameters that are
never to be trained: `trainrun.transform.freeze`, which costs the optimizer nothing.
How: until then they get no gradient, and an optimizer leaves such parameters alone, weight decay included; its
averages of them begin with their first gradient, exactly as if they had come just then.
Source: Howard and Ruder 2018 (ULMFiT), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainrun.errors import ConfigError
from trainrun.patterns import matching

if TYPE_CHECKING:
    from trainrun.training.components import Components
    from trainrun.training.state import TrainState


class Unfreeze:
    """A hook. patterns: of the names of parameters; epoch: after so many finished epochs they are trained.

    Raises ConfigError for a pattern that fits no parameter.
    """

    def __init__(self, patterns: str | Sequence[str], epoch: int) -> None:
        self._patterns, self._epoch = patterns, epoch
        if epoch < 1:
            raise ConfigError(f"unfreeze: epoch={epoch}: must be a whole number, 1 or more")

    def on_start(self, run: Components, state: TrainState) -> None:
        parallel = run.config.parallel
        if run.parallel.world_size > 1 and not parallel.find_unused_parameters:
            raise ConfigError(
                "hook: Unfreeze leaves parameters without a gradient, for which ranks wait; add "
                "parallel.find_unused_parameters=true"
            )
        self._set(run, state)

    def on_epoch_start(self, run: Components, state: TrainState) -> None:
        self._set(run, state)

    def _set(self, run: Components, state: TrainState) -> None:
        names = [name for name, _ in run.model.named_parameters()]
        for name in matching(names, self._patterns, "unfreeze: patterns"):
            run.model.get_parameter(name).requires_grad_(state.epoch >= self._epoch)
