"""Whether a faster run still is the same training: its first steps against those of the run it would replace.

Both begin with the same weights and the same samples. Rounding differs from kernel to kernel, and grows from step
to step; a mistake is far larger. The update is compared by direction and length, over all parameters together: Adam
gives a weight without a gradient a step of its own size in a direction that rounding decides. Losses are compared on
the scale of the first one: where they come near nothing, a difference relative to themselves says nothing.

Measured with AdamW after 3, 10 and 20 steps of MLP, CNN with batch norm, GPT and LSTM (`scripts/bench_gate.py`):
threads, micro-batches, layout and attention kernels stay within 5e-5 of the loss, cosine 0.99999 and 1e-4 of the
length; bfloat16 within 1.2 %, 0.992 and 0.3 %, all three of the CNN (the others: 0.6 %, 0.997 and 0.01 %).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from trainrun.lab.orders import Path

EXACT, NUMERIC = "exact", "numeric"
MATHEMATICS: Final = (EXACT, NUMERIC)
SHOWN: Final = "shown"  # how far it goes is told, and nothing is turned away for it but other samples
# Of a loss, at every step, relative to that step's or to the first, whichever is larger.
LOSS_TOLERANCE: Final = {EXACT: 1e-4, NUMERIC: 0.02, SHOWN: math.inf}
LEAST_COSINE: Final = {EXACT: 0.9999, NUMERIC: 0.98, SHOWN: -1.0}
# Another learning rate has the same direction.
LENGTH_TOLERANCE: Final = {EXACT: 0.002, NUMERIC: 0.02, SHOWN: math.inf}


class Verdict(NamedTuple):
    """fault: why this is another training, or "". loss: the largest relative difference of a step."""

    fault: str
    loss: float
    cosine: float


def loosest(*mathematics: str) -> str:
    """What settings together may differ by."""
    return max(mathematics, key=MATHEMATICS.index, default=EXACT)


REPEATS: Final = Verdict("", 0.0, 1.0)


def judge(reference: Path, found: Path, mathematics: str, usual: Verdict = REPEATS) -> Verdict:
    """Compare as many first steps as both have. usual: how far two runs of the reference's own words differ."""
    steps = min(len(reference.losses), len(found.losses))
    ours, theirs = found.losses[:steps], reference.losses[:steps]
    if any(not math.isfinite(loss) for loss in ours):
        return Verdict("a loss is not finite", math.inf, 0.0)
    if found.items[:steps] != reference.items[:steps]:
        return Verdict("other samples: the steps do not count the same items", math.inf, 0.0)
    first = max(abs(theirs[0]), 1e-12)
    loss = max(abs(a - b) / max(abs(b), first) for a, b in zip(ours, theirs, strict=True))
    allowed = LOSS_TOLERANCE[mathematics] + 2 * usual.loss
    if loss > allowed:
        told = f"loss path: {loss:.2g} off, {mathematics} allows {allowed:.2g}"
        return Verdict(told, loss, 0.0)
    direction, length = beside(reference.update, found.update)
    least = LEAST_COSINE[mathematics] - 2 * (1 - usual.cosine)
    if not direction >= least:
        told = f"update: cosine {direction:.4f}, {mathematics} needs {least:.4g}"
        return Verdict(told, loss, direction)
    longer = LENGTH_TOLERANCE[mathematics] + 2 * math.sqrt(2 * (1 - min(usual.cosine, 1.0)))
    if not abs(length - 1) <= longer:
        told = f"update: {length:.4f} times as long, {mathematics} allows {100 * longer:.2g} % more or less"
        return Verdict(told, loss, direction)
    return Verdict("", loss, direction)


def beside(reference: str, found: str) -> tuple[float, float]:
    """Cosine of two updates, and length of the second over the first's; files as `Path.update` names them.

    Not numbers where other parameters were trained. One tensor at a time: the updates of a large model do not fit
    twice into memory.
    """
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
