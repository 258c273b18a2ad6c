"""What the turns of a setting say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from trainrun.lab.contest import FIRST_ROUNDS
from trainrun.lab.duel import Duel
from trainrun.lab.evidence import BEATEN, KEPT, NOISE, REJECTED, SLOWER, UNPAID, UNTRIED, Trial
from trainrun.lab.statistics import Ratio

MEMORY_SHARE: Final = 0.9  # of the device that a setting may fill


def weighed(trial: Trial, duel: Duel, memory_bytes: int, smallest: float) -> Trial:
    """Kept is what is faster by more than `smallest`, as far as its pairs can say."""
    if duel.fault:
        return replace(trial, state=REJECTED, reason=duel.fault)
    if len(duel.pairs) < FIRST_ROUNDS:
        return replace(trial, state=UNTRIED, reason=f"time for {len(duel.pairs)} turns only")
    ratio = duel.ratio()
    trial = replace(trial, ratio=ratio, peak_bytes=duel.peak_bytes)
    if memory_bytes and duel.peak_bytes > MEMORY_SHARE * memory_bytes:
        return replace(
            trial, state=REJECTED, reason=f"fills more than {100 * MEMORY_SHARE:.0f} % of the memory"
        )
    if ratio.high < 1:
        return replace(trial, state=SLOWER)
    faster = ratio.low > 1 and ratio.value > 1 + smallest
    return replace(trial, state=KEPT if faster else NOISE)


def paid(trial: Trial, run_seconds: float, smallest: float) -> Trial:
    """Compilation, only where the whole run is shorter with it. run_seconds: without it."""
    assert trial.ratio is not None
    extra, speed = trial.extra_seconds, trial.ratio.value
    if not math.isfinite(run_seconds) or run_seconds / (extra + run_seconds / speed) > 1 + smallest:
        return trial
    needed = extra / (1 - 1 / speed)
    told = f"{extra:.0f} s more to start: paid back after {needed:.0f} s of training, the run takes {run_seconds:.0f} s"
    return replace(trial, state=UNPAID, reason=told)


def beaten(trials: Sequence[Trial], best: Trial) -> list[Trial]:
    """All but the best; what would have been kept without it says so."""
    return [
        replace(trial, state=BEATEN, reason=f"by {best.title}") if trial.state == KEPT else trial
        for trial in trials
        if trial is not best
    ]


def value_of(trial: Trial) -> float:
    return trial.ratio.value if trial.ratio is not None else 0.0


def resolved(noise: Ratio) -> float:
    """The smallest effect that the machine shows now. noise: of two runs of the same words."""
    return max(noise.high - 1, 1 - noise.low)
