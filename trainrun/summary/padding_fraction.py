"""Which share of what a run computed on was padding, counted on its next batches after the training."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from trainrun.seeding import kept_random_state
from trainrun.summary.throughput_limits import ahead, batches_from, start_seconds
from trainrun.timing.phases import Session
from trainrun.training.components import Components
from trainrun.training.state import TrainState

BATCHES = 8
MOST_SHARE = 0.005  # of the time of all steps


def padding_fraction(run: Components, state: TrainState, session: Session) -> float:
    """0 if the batches say nothing of padding, and if reading some would take too long."""
    if not session.steps:
        return 0.0
    inline = not ahead(run)
    seconds = session.seconds.get("data", 0.0) if inline else session.loop_seconds
    usual = seconds / (session.steps * run.config.trainer.accumulate_grad_batches)
    needed = (ahead(run) + BATCHES) * usual + start_seconds(run)
    if needed > MOST_SHARE * session.loop_seconds:
        return 0.0
    useful = positions = 0
    try:
        with kept_random_state(), contextlib.closing(batches_from(run, state)) as batches:
            for _ in range(BATCHES):
                mask = real_positions(next(batches).data)
                if mask is None:
                    return 0.0
                useful, positions = useful + int(mask.sum()), positions + mask.numel()
    # Whatever the user's data does when it is asked again, a finished run is not lost to a figure.
    except Exception:
        return 0.0
    return 1 - useful / max(positions, 1)


def real_positions(batch: Any) -> Tensor | None:
    """(B, T) bool, False at padding; None if nothing says so."""
    if not isinstance(batch, dict):
        return None
    found = batch.get("attention_mask", batch.get("segment_ids"))
    return found.bool() if isinstance(found, Tensor) else None
