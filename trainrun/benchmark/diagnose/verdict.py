"""Turn measurements into at most two causes in words. Each has its cost and the settings to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainrun.benchmark.diagnose.ablations import BUCKET
from trainrun.benchmark.diagnose.diagnosis import CLEAR, Diagnosis, WhatIf
from trainrun.benchmark.remedies import Remedy, find_remedies, is_loading_busy
from trainrun.benchmark.run_overrides import compose_config

LARGE: Final = 1.3  # of a larger batch, which is another training: a gain below it is not worth a word
LEAST_OF_LARGER: Final = 3  # pairs with it, for the same reason: the interval of two may be narrow by luck
MOST_OF_UPDATE: Final = 1 / 3  # of a step: above it, fewer updates are worth a word
MOST_CAUSES: Final = 2

# Of equal gains the first is named; what a larger batch also explains comes before it.
CAUSES: Final = {
    "data": "loading",
    "compile": "compiling",
    "logging": "logging",
    "checkpoint": "checkpoints",
    "validation": "validation",
    "threads": "the number of threads",
    "padding": "padding",
    "islands": "parts of the model outside of mixed precision",
    "ranks": "the exchange of gradients",
    "update": "the optimizer's update",
    "dispatch": "fixed costs of a step (small calls, the update), which a larger batch would share",
}
INSIDE: Final = ("compile", "threads", "padding", "islands", "ranks", "update")  # a larger batch shares them


@dataclass(frozen=True)
class Cause:
    """A part of the run that costs time, and remedies for it."""

    what_if: WhatIf
    text: str
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True)
class Verdict:
    """The causes of a diagnosis, and a text.

    first: the name of the first cause; `healthy` without one; `unclear` if noise may hide a cause.
    """

    causes: tuple[Cause, ...]
    text: str
    first: str


def reach_verdict(diagnosis: Diagnosis) -> Verdict:
    worth = likely_costs(diagnosis)
    causes = [build_cause(diagnosis, what_if) for what_if in certain_causes(diagnosis)[:MOST_CAUSES]]
    tried = ""
    if diagnosis.untried:
        tried = f". No time was left for: {', '.join(diagnosis.untried)} (try a larger --budget)"
    if not causes and worth:
        return Verdict((), describe_unclear(diagnosis, worth[0]), "unclear")
    if not causes and diagnosis.untried and all(each.gain.pairs < 2 for each in diagnosis.what_ifs):
        return Verdict((), "unclear: too few turns were measured" + tried, "unclear")
    if not causes and f"data.padding={BUCKET}" in diagnosis.untried:
        return Verdict((), f"unclear: there is padding, which may cost something{tried}", "unclear")
    if not causes:
        text = "healthy: beside forward, backward and update, nothing takes a tenth of the time"
        return Verdict((), text + tried, "healthy")
    text = "; ".join(
        f"{cause.text}: up to {gain_text(cause.what_if)} {faster_text(cause.what_if)}" for cause in causes
    )
    if len(causes) > 1:
        text += " (the two gains overlap, so they do not add up)"
    hidden = [
        candidate
        for candidate in worth
        if candidate.gain.value > causes[0].what_if.gain.value and not is_certain(candidate)
    ]
    text += "".join(f"; {describe_unclear(diagnosis, candidate)}" for candidate in hidden[:1])
    return Verdict(tuple(causes), text + tried, causes[0].what_if.name)


def certain_causes(diagnosis: Diagnosis) -> list[WhatIf]:
    """Return the costs that are certain, the most expensive first."""
    return [what_if for what_if in likely_costs(diagnosis) if is_certain(what_if)]


def likely_costs(diagnosis: Diagnosis) -> list[WhatIf]:
    """Return the costs whose removal seems to gain time, the largest first.

    The optimizer update counts only if a faster one exists. A larger batch counts only if it gains much. It comes
    after the costs that explain most of its gain, because a larger batch also has fewer of these per sample.
    """
    clear = []
    for what_if in diagnosis.what_ifs:
        is_large = what_if.gain.value >= CLEAR
        if what_if.name == "update":
            is_large = is_large and bool(find_remedies(what_if, diagnosis))
        elif what_if.name == "dispatch":
            is_large = what_if.gain.value >= LARGE and are_fixed_costs_large(what_if, diagnosis)
        if is_large:
            clear.append(what_if)
    inside = max((each.gain.value for each in clear if each.name in INSIDE), default=1.0)

    def order(each: WhatIf) -> tuple[bool, float]:
        return each.name == "dispatch" and inside > each.gain.value**0.5, -each.gain.value

    return sorted(clear, key=order)


def are_fixed_costs_large(larger_batch: WhatIf, diagnosis: Diagnosis) -> bool:
    """Return whether a larger batch gains much in small calls, or the update takes much of a step.

    A larger batch also gains by fewer updates for as many samples. A moderate gain by these alone is no fault.
    """
    update = max(
        [1 - 1 / what_if.gain.value for what_if in diagnosis.what_ifs if what_if.name == "update"],
        default=0.0,
    )
    size = int(larger_batch.setting.partition("=")[2])
    times = size / compose_config(diagnosis.overrides).data.batch_size
    rest = 1 / larger_batch.gain.value - update / times  # with the larger batch, without its updates
    return update >= MOST_OF_UPDATE or 1 - update >= LARGE * rest


def is_certain(what_if: WhatIf) -> bool:
    enough = what_if.name != "dispatch" or what_if.gain.pairs >= LEAST_OF_LARGER
    return enough and what_if.is_faster()


def describe_unclear(diagnosis: Diagnosis, what_if: WhatIf) -> str:
    start = f"unclear: {CAUSES[what_if.name]} may cost something"
    if not what_if.is_reliable or what_if.gain.low > 1.0:
        turns = f"{what_if.gain.pairs} turns" if what_if.gain.pairs > 1 else "a single turn"
        gain = f"{gain_text(what_if)} {faster_text(what_if)}, in {turns}"
        return f"{start} ({gain}): no time for more; try a larger --budget"
    low, high = (100 * (bound - 1) for bound in what_if.gain[1:3])
    gain = f"{low:+.0f} to {high:+.0f} % {faster_text(what_if)}"
    return f"{start} ({gain}); turns differ too much to tell; try a larger --budget"


def faster_text(what_if: WhatIf) -> str:
    """Return `faster without`, or `faster with trainer.num_threads=1` if the cost has no opposite."""
    return f"faster with {what_if.setting}" if what_if.name in ("threads", "dispatch") else "faster without"


def gain_text(what_if: WhatIf) -> str:
    return f"{100 * (what_if.gain.value - 1):.0f} %"


def build_cause(diagnosis: Diagnosis, what_if: WhatIf) -> Cause:
    return Cause(what_if, describe_cause(diagnosis, what_if.name), find_remedies(what_if, diagnosis))


def describe_cause(diagnosis: Diagnosis, name: str) -> str:
    if name != "data":
        return CAUSES[name]
    if not is_loading_busy(diagnosis):
        return "loading, which mostly waits (a disk, a network, a sleep)"
    if diagnosis.info.engine == "resident":
        return "gathering the samples of a batch in memory"
    return "loading, which mostly computes (decoding, Python)"
