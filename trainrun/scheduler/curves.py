"""Learning-rate curves in closed form: from a step to a factor of the base learning rate.

`step` counts the updates since the end of the warmup, so the first update after it uses `curve(0)`. After
`total_steps` every curve keeps its final value.
"""

from __future__ import annotations

import math

from trainrun.limits import Fraction, NotNegative, Positive, Steps


def constant(step: int) -> float:
    """Return 1 at every step."""
    return 1.0


def linear(step: int, total_steps: Steps, end_factor: NotNegative = 0.0) -> float:
    """Decrease from 1 in a straight line to `end_factor`.

    With 0 it is the best simple curve for a fixed budget (Defazio et al. 2023, "When, why and how much?").
    """
    return 1.0 + (end_factor - 1.0) * _compute_progress(step, total_steps)


def cosine(step: int, total_steps: Steps, min_factor: NotNegative = 0.0) -> float:
    """Decrease along half a cosine from 1 to `min_factor` (Loshchilov and Hutter 2017, without restarts)."""
    return min_factor + (1.0 - min_factor) * 0.5 * (
        1.0 + math.cos(math.pi * _compute_progress(step, total_steps))
    )


def polynomial(
    step: int, total_steps: Steps, power: NotNegative = 1.0, end_factor: NotNegative = 0.0
) -> float:
    """Decrease from 1 to `end_factor` as (1 - progress)**power."""
    return end_factor + (1.0 - end_factor) * math.pow(1.0 - _compute_progress(step, total_steps), power)


def inverse_sqrt(step: int, timescale: Positive = 1000) -> float:
    """Return 1 / sqrt(1 + step / timescale), which needs no end (Vaswani et al. 2017, with a shifted start)."""
    return math.sqrt(timescale / (timescale + step))


def wsd(step: int, total_steps: Steps, decay_ratio: Fraction = 0.2, end_factor: NotNegative = 0.0) -> float:
    """Return 1 until the last `decay_ratio` of the steps, then decrease linearly to `end_factor` (warmup, stable,
    decay).

    A run that is cut at any point of the stable part and then decayed gives a finished model (Hu et al. 2024,
    MiniCPM).
    """
    decay_steps = decay_ratio * total_steps
    if decay_steps <= 0:
        return 1.0
    done = min(max(step - (total_steps - decay_steps), 0.0) / decay_steps, 1.0)
    return 1.0 + (end_factor - 1.0) * done


def _compute_progress(step: int, total_steps: float) -> float:
    return min(step, total_steps) / max(total_steps, 1)
