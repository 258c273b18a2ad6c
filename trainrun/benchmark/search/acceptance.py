"""Whether a faster run still is the same training: its first steps against those of the run it would replace.

Both begin with the same weights and the same samples. Rounding differs from kernel to kernel, and grows from step to
step; a mistake is far larger. The update is compared by direction and length, of all parameters together: Adam gives
a weight without a gradient a step of its own size in a direction that rounding decides. Losses are compared on the
scale of the first one: if they come near nothing, a difference relative to themselves says nothing.

Measured with AdamW after 3, 10 and 20 steps of MLP, CNN with batch norm, GPT and LSTM: threads, micro-batches, layout
and attention kernels stay within 5e-5 of the loss, cosine 0.99999 and 1e-4 of the length; bfloat16 within 1.2 %, 0.992
and 0.3 %, all three of the CNN (the others: 0.6 %, 0.997 and 0.01 %).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from trainrun.benchmark.worker_messages import FirstSteps

EXACT, NUMERIC = "exact", "numeric"
SHOWN: Final = "shown"  # differences are shown, and only other samples are refused
GATES: Final = (EXACT, NUMERIC, SHOWN)
LOSS_TOLERANCE: Final = {EXACT: 1e-4, NUMERIC: 0.02, SHOWN: math.inf}
LEAST_COSINE: Final = {EXACT: 0.9999, NUMERIC: 0.98, SHOWN: -1.0}
# Another learning rate keeps the direction.
LENGTH_TOLERANCE: Final = {EXACT: 0.002, NUMERIC: 0.02, SHOWN: math.inf}


class Acceptance(NamedTuple):
    """reason: why this is another training, or "". loss: the largest relative difference of a step. cosine: of the
    updates."""

    reason: str
    loss: float
    cosine: float


SAME: Final = Acceptance("", 0.0, 1.0)


def loosest(*gates: str) -> str:
    """Return what settings together may differ by."""
    return max(gates, key=GATES.index, default=EXACT)


def accept(reference: FirstSteps, found: FirstSteps, gate: str, usual: Acceptance = SAME) -> Acceptance:
    """Compare as many first steps as both have. usual: how far two runs of the reference's own settings differ."""
    steps = min(len(reference.losses), len(found.losses))
    ours, theirs = found.losses[:steps], reference.losses[:steps]
    if not all(map(math.isfinite, ours)):
        return Acceptance("a loss is not finite", math.inf, 0.0)
    if found.items[:steps] != reference.items[:steps]:
        return Acceptance("other samples: the steps do not count the same items", math.inf, 0.0)
    first = max(abs(theirs[0]), 1e-12)
    loss = max(abs(a - b) / max(abs(b), first) for a, b in zip(ours, theirs, strict=True))
    allowed = LOSS_TOLERANCE[gate] + 2 * usual.loss
    if loss > allowed:
        return Acceptance(f"loss path: {loss:.2g} off, {gate} allows {allowed:.2g}", loss, 0.0)
    cosine, length = compare_updates(reference.update, found.update)
    least = LEAST_COSINE[gate] - 2 * (1 - usual.cosine)
    longer = LENGTH_TOLERANCE[gate] + 2 * math.sqrt(2 * (1 - min(usual.cosine, 1.0)))
    reason = ""
    if not cosine >= least:
        reason = f"update: cosine {cosine:.4f}, {gate} needs {least:.4g}"
    elif not abs(length - 1) <= longer:
        reason = f"update: {length:.4f} times as long, {gate} allows {100 * longer:.2g} % more or less"
    return Acceptance(reason, loss, cosine)


def compare_updates(reference: str, found: str) -> tuple[float, float]:
    """Return the cosine of two updates, and the length of the second over the first's; NaN if other parameters were
    trained. One tensor at a time: the updates of a large model do not fit twice into memory."""
    import numpy as np
    from safetensors import safe_open

    products = np.zeros(3)
    with safe_open(reference, "numpy") as theirs, safe_open(found, "numpy") as ours:
        if set(theirs.keys()) != set(ours.keys()):
            return math.nan, math.nan
        for name in theirs.keys():  # noqa: SIM118 - no mapping, it only has this method
            a, b = (file.get_tensor(name).astype(np.float64).ravel() for file in (theirs, ours))
            products += (np.sum(a * b), np.sum(a * a), np.sum(b * b))
    both, one, other = products
    if one == other == 0:
        return 1.0, 1.0
    if not (one and other):
        return math.nan, math.nan
    return float(both / math.sqrt(one * other)), math.sqrt(other / one)
