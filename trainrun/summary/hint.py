"""One line at the end of a run: what took more than a tenth of it besides training, and what would prove a remedy."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from trainrun.timing.phases import LOOP

NOTABLE = 0.10  # of the time between start-up and the end of the training
LEAST_SECONDS = 1.0  # less is not worth a command that takes longer
WITHOUT = ("hydra.", "run_name=", "output_dir=")  # words about the place of a run
LONGEST = 80  # characters of words that are said again
# What it is called, and the command that measures what could be won.
NAMES = {
    "data": ("waiting for data", "autotune"),
    "padding": ("computing on padding", "diagnose"),
    "logging": ("logging", "diagnose"),
    "validation": ("validation", "diagnose"),
    "checkpoint": ("saving checkpoints", "diagnose"),
}


def hint(seconds: Mapping[str, float], padding: float, words: Sequence[str]) -> str:
    """`waiting for data took 34 % (12 s); what would shorten it is measured by: trainrun autotune data=...`

    "" if nothing is notable; of several the largest. seconds: the ledger. padding: share of positions.
    """
    total = sum(seconds.get(name, 0.0) for name in (*LOOP, "validation", "checkpoint"))
    wasted = {name: seconds.get(name, 0.0) for name in ("logging", "validation", "checkpoint")}
    # While the host waited for data, a GPU may have worked on what it had been given: at the log points
    # the host then found it at work, and waited for it.
    wasted["data"] = seconds.get("data", 0.0) - seconds.get("device", 0.0)
    wasted["padding"] = padding * sum(seconds.get(name, 0.0) for name in ("forward", "backward", "device"))
    name = max(wasted, key=lambda name: wasted[name])
    if wasted[name] < LEAST_SECONDS or wasted[name] <= NOTABLE * total:
        return ""
    what, command = NAMES[name]
    same = shlex.join([word for word in words if not word.startswith(WITHOUT)])
    if len(same) > LONGEST:
        same = "... (the words in overrides.txt)"
    share = f"{what} took {100 * wasted[name] / total:.0f} % after start-up"
    return f"{share}; what could be won is measured by: trainrun {command} {same}".rstrip()
