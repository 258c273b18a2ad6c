"""Whether a faster run still is the same training: its first steps beside those of the run it would replace.

Both begin with the same weights and the same samples. Rounding differs from kernel to kernel, and grows from step
to step; a mistake is far larger. The update is compared by its direction, over all parameters together: Adam gives
a weight without a gradient a step of its own size in a direction that rounding decides. Measured on the digits
with AdamW, 20 steps: threads, engines, ranks, accumulation and layout stay below 1e-6 in the loss, with a cosine
of 1.0000; bfloat16 changes the loss by 0.2 % (MLP, cosine 0.999) to 1.1 % (CNN with batch norm, cosine 0.97).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from trainrun.lab.orders import Path

EXACT, NUMERIC = "exact", "numeric"
MATHEMATICS: Final = (EXACT, NUMERIC)
SHOWN: Final = "shown"  # how far it goes is told, and nothing is turned away for it but other samples
LOSS_TOLERANCE: Final = {EXACT: 1e-4, NUMERIC: 0.02, SHOWN: math.inf}  # relative, at every step
LEAST_COSINE: Final = {EXACT: 0.99, NUMERIC: 0.9, SHOWN: -1.0}
SMALL_LOSS: Final = 0.1  # of the first loss: below it differences are relative to this


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
    """Of as many steps as both have. usual: how far two runs of the reference's own words are apart."""
    steps = min(len(reference.losses), len(found.losses))
    ours, theirs = found.losses[:steps], reference.losses[:steps]
    if any(not math.isfinite(loss) for loss in ours):
        return Verdict("a loss is not finite", math.inf, 0.0)
    if found.items[:steps] != reference.items[:steps]:
        return Verdict("other samples: the steps do not count the same items", math.inf, 0.0)
    floor = SMALL_LOSS * abs(theirs[0])
    loss = max(abs(a - b) / max(abs(b), floor, 1e-12) for a, b in zip(ours, theirs, strict=True))
    allowed = LOSS_TOLERANCE[mathematics] + 2 * usual.loss
    if loss > allowed:
        told = f"loss path: {loss:.2g} off, {mathematics} allows {allowed:.2g}"
        return Verdict(told, loss, 0.0)
    direction = cosine(reference.update, found.update)
    least = LEAST_COSINE[mathematics] - 2 * (1 - usual.cosine)
    if not direction >= least:
        told = f"update: cosine {direction:.3f}, {mathematics} needs {least:.2g}"
        return Verdict(told, loss, direction)
    return Verdict("", loss, direction)


def cosine(reference: str, found: str) -> float:
    """Of two updates, files as `Path.update` names them; not a number where other parameters were trained.

    One tensor at a time: the updates of a large model do not fit twice into memory.
    """
    import numpy as np
    from safetensors import safe_open

    products = np.zeros(3)
    with safe_open(reference, "numpy") as theirs, safe_open(found, "numpy") as ours:
        if set(theirs.keys()) != set(ours.keys()):
            return math.nan
        for name in theirs.keys():  # noqa: SIM118 - no mapping, it only has this method
            a, b = (file.get_tensor(name).astype(np.float64).ravel() for file in (theirs, ours))
            products += (np.sum(a * b), np.sum(a * a), np.sum(b * b))
    both, one, other = products
    if one == other == 0:
        return 1.0
    return float(both / math.sqrt(one * other)) if one and other else math.nan
