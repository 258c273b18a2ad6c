"""From what was measured to at most two causes in words, each with its ceiling and what to try."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainrun.lab.findings import CLEAR, Diagnosis, WhatIf
from trainrun.lab.statistics import Ratio

LARGE: Final = 1.3  # of a larger batch, which is another training: a gain below is not worth a word
LEAST_OF_LARGER: Final = 3  # pairs with it, for the same reason: of two the interval may be narrow by luck
BUSY_MACHINE: Final = 0.1  # cores of other processes
MOST_CAUSES: Final = 2
BUSY: Final = 0.7  # cores: loading that computes; below, it waits
BUSY_AMONG_OTHERS: Final = 0.2  # who computes waits for a core as well
AGAIN: Final = 0.5  # of the seconds of a first reading: what took more was there already
ROOF: Final = 0.6  # of the fastest matrix product: there is little left to take

# of equal gains the first is named; what a larger batch also explains comes before it
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
    "dispatch": "calls that are too small: the batch is tiny for this machine",
}
INSIDE: Final = (
    "compile",
    "threads",
    "padding",
    "islands",
    "ranks",
    "update",
)  # of a step: a larger batch shares them


@dataclass(frozen=True)
class Cause:
    """name: of CAUSES. words: what to try, of the run's own words."""

    what_if: WhatIf
    text: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """first: the name of the first cause; else `healthy`, or `unclear` where a cause may hide in the noise."""

    causes: tuple[Cause, ...]
    text: str
    first: str


def verdict(found: Diagnosis) -> Verdict:
    worth = worth_naming(found)
    causes = [cause_of(found, what_if) for what_if in worth if is_certain(what_if)][:MOST_CAUSES]
    if not causes and worth:
        return Verdict((), unclear_text(found, worth[0]), "unclear")
    if not causes and found.untried and all(each.gain.pairs < 2 for each in found.what_ifs):
        return Verdict((), "unclear: nothing was taken away often enough" + untried_text(found), "unclear")
    if not causes:
        text = "healthy: nothing around the step costs a tenth of the time (the update is part of it). "
        return Verdict((), text + bound_by(found) + untried_text(found), "healthy")
    lines = [f"{cause.text}: up to {gain_text(cause.what_if)} faster without" for cause in causes]
    together = (
        " (the two are not added up: together at most what is measured together)" if len(causes) > 1 else ""
    )
    hidden = [one for one in worth if one.gain.value > causes[0].what_if.gain.value and not is_certain(one)]
    more = "".join(f"; {unclear_text(found, one)}" for one in hidden[:1])
    text = "; ".join(lines) + together + more + untried_text(found)
    return Verdict(tuple(causes), text, causes[0].what_if.name)


def is_certain(what_if: WhatIf) -> bool:
    enough = what_if.name != "dispatch" or what_if.gain.pairs >= LEAST_OF_LARGER
    return enough and what_if.gain.low > 1.0


def untried_text(found: Diagnosis) -> str:
    if not found.untried:
        return ""
    return f". No time was left for: {', '.join(found.untried)} (--budget 120 may have it)"


def unclear_text(found: Diagnosis, what_if: WhatIf) -> str:
    if not what_if.sure or what_if.gain.low > 1.0:
        turns = f"{what_if.gain.pairs} turns" if what_if.sure else "a single turn"
        return (
            f"unclear: {CAUSES[what_if.name]} may cost something ({gain_text(what_if)} faster without, in {turns}); "
            "there was no time for more: try --budget 120"
        )
    low, high = (100 * (bound - 1) for bound in what_if.gain[1:3])
    others = ", and other processes are in the way" if found.others >= BUSY_MACHINE else ""
    return (
        f"unclear: {CAUSES[what_if.name]} may cost something ({low:+.0f} to {high:+.0f} % faster without); turns "
        f"differ too much to tell{others}; try --budget 120"
    )


def worth_naming(found: Diagnosis) -> list[WhatIf]:
    """What seems to gain, the most first. The update only where there is a faster one; a larger batch only where it
    gains much, and after what else in a step costs time."""
    clear = [each for each in found.what_ifs if each.gain.value >= CLEAR]
    if found.fused:
        clear = [each for each in clear if each.name != "update"]
    clear = [each for each in clear if each.name != "dispatch" or each.gain.value >= LARGE]
    explained = any(each.name in INSIDE for each in clear)
    return sorted(clear, key=lambda each: (explained and each.name == "dispatch", -each.gain.value))


def gain_text(what_if: WhatIf) -> str:
    return f"{100 * (what_if.gain.value - 1):.0f} %"


def cause_of(found: Diagnosis, what_if: WhatIf) -> Cause:
    text, words = CAUSES[what_if.name], WORDS.get(what_if.name, ())
    match what_if.name:
        case "data":
            text, words = of_loading(found)
            what_if = of_named_stage(found, what_if)
        case "threads":
            words = (what_if.about,)
        case "padding":
            text = f"padding ({100 * found.limits.padding:.0f} % of all positions)"
    return Cause(what_if, text, words)


def of_named_stage(found: Diagnosis, what_if: WhatIf) -> WhatIf:
    """What the stage that is named costs, of all that loading does."""
    if found.stages is None:
        return what_if
    samples, transform, rest = found.stages.samples, found.stages.transform, found.stages.rest
    named, whole = max(samples, transform, rest), samples + transform + rest
    if named == samples and found.stages.awake is not None:
        named += rest - found.stages.awake  # what it takes longer after a wait ends with the wait
    share = named / whole

    def freed(value: float) -> float:
        return 1 / (1 - share * (1 - 1 / value)) if value else 0.0

    gain = what_if.gain
    return replace(what_if, gain=Ratio(freed(gain.value), freed(gain.low), freed(gain.high), gain.pairs))


def of_loading(found: Diagnosis) -> tuple[str, tuple[str, ...]]:
    """The stage that takes most of it, and whether it waits or computes."""
    stages = found.stages
    beside = (THREADS if found.ready.thread_safe else WORKERS, "data.cache=memory")
    if stages is None or stages.samples >= max(stages.transform, stages.rest):
        busy = found.load_busy if stages is None else stages.computing / max(stages.samples, 1e-9)
        what = "loading" if stages is None else "loading: samples are read"
        if busy >= (BUSY if found.others < BUSY_MACHINE else BUSY_AMONG_OTHERS):
            return f"{what}, which mostly computes (decoding, Python)", WORDS["data"]
        if stages is not None and stages.again < AGAIN * stages.samples:
            return f"{what}, which mostly waits for files that are opened for the first time", beside
        return f"{what}, which mostly waits (a disk, a network, a sleep)", beside
    if stages.transform >= stages.rest:
        return "loading: data.transform", WORDS["data"][1:]  # it comes after the cache
    return "loading: samples are put together to batches", WORDS["data"]


THREADS: Final = "data.engine=threads data.num_threads=4"  # for data that says thread_safe = True
WORKERS: Final = "data.engine=workers data.num_workers=4"
WORDS: Final[dict[str, tuple[str, ...]]] = {
    "data": ("data.cache=memory", "data.engine=workers data.num_workers=auto"),
    "compile": (
        "data.padding=bucket data.pad_multiple=64",
        "trainer.compile.dynamic=true",
        "trainer.compile=off",
    ),
    "logging": ("monitor.log_every_n_steps=500", "monitor=fast"),
    "checkpoint": ("checkpoint.async_save=true", "checkpoint.train_time_interval=10min"),
    "validation": ("trainer.check_val_every_n_epoch=5", "trainer.limit_val_batches=0.2"),
    "padding": ("data.padding=bucket",),
    "ranks": ("trainer.accumulate_grad_batches=4", "parallel.static_graph=true"),
    "update": ("optimizer.fused=true",),
    "dispatch": ("trainer.compile=step", "data.batch_size=256"),
}


def bound_by(found: Diagnosis) -> str:
    """Return what limits the step itself, by the lowest limit."""
    roofs = {name: value for name, value in found.limits.items_per_second.items() if name != "data"}
    if not roofs:
        return ""
    name = min(roofs, key=lambda each: roofs[each])
    share = found.speed / roofs[name]
    close = ": at the roof, only other mathematics would be faster" if share >= ROOF else ""
    names = {
        "compute": "computing",
        "copy": "copying to the device",
        "memory": "memory",
        "dispatch": "the calls of operations",
    }
    return f"The lowest roof is {names[name]}, of which {100 * share:.0f} % is reached{close}"
