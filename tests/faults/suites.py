"""The cases of every suite: which faults, in which runs, how many."""

from __future__ import annotations

import random
from collections.abc import Callable

from faults.plan import CODE, DISK, WORKER, Case, Fault
from faults.referee import Reference
from faults.subjects import SUBJECTS

MATRIX = (
    "bf16", "fp16", "fp16-workers", "fp64", "workers", "bf16-workers", "threads", "resident", "bucket", "best",
)  # fmt: skip
RANKS = ("ddp", "ddp-sync", "ddp-fp16", "ddp-workers")
STOPS = ("term", "usr1", "usr2", "int")
Look = Callable[[str], Reference]
Make = Callable[[Look, random.Random, float], list[Case]]


def some(rng: random.Random, size: float, wanted: list[Case]) -> list[Case]:
    """All of them, or a share drawn at random."""
    return wanted if size >= 1 else rng.sample(wanted, max(1, round(size * len(wanted))))


def at_random(look: Look, rng: random.Random, name: str, action: str, place: str = "time") -> Fault:
    """Somewhere in the run, in a rank drawn at random."""
    reference, rank = look(name), rng.randrange(SUBJECTS[name].ranks)
    if place in ("time", "driver"):
        return Fault(action, place, round(rng.uniform(0.02, 1.0) * reference.seconds, 4), rank)
    counts = reference.counts[rank]
    count = counts["file" if place in ("file", "half", "after") else place]
    return Fault(action, place, rng.randrange(1, max(count, 1) + 1), rank)


def kills(look: Look, rng: random.Random, name: str, lives: int) -> Case:
    """Killed again and again at random times."""
    return Case(name, tuple(at_random(look, rng, name, "kill") for _ in range(lives)))


def f1(look: Look, rng: random.Random, size: float) -> list[Case]:
    return [kills(look, rng, name, 3) for name in ("fp32", "sync") for _ in range(round(34 * size) or 1)]


def f2(look: Look, rng: random.Random, size: float) -> list[Case]:
    return [kills(look, rng, name, 3) for name in MATRIX for _ in range(round(9 * size) or 1)]


def f3(look: Look, rng: random.Random, size: float) -> list[Case]:
    cases = []
    for name in ("fp32", "fp16-workers"):
        for place in ("mark", "batch"):
            count = look(name).counts[0][place]
            cases += [Case(name, (Fault("kill", place, n),)) for n in range(1, count + 1)]
    return some(rng, size, cases)


def f4(look: Look, rng: random.Random, size: float) -> list[Case]:
    names = [*RANKS, "ddp3"]
    return [kills(look, rng, names[n % len(names)], 2) for n in range(round(35 * size) or 1)]


def f5(look: Look, rng: random.Random, size: float) -> list[Case]:
    return [kills(look, rng, "fsdp", 2) for _ in range(round(25 * size) or 1)]


def f7(look: Look, rng: random.Random, size: float) -> list[Case]:
    """Of a whole run, then of a resume, which sweeps and cuts before it goes on."""
    cases = []
    for name in ("fp32", "sync"):
        reference = look(name)
        for place in ("file", "half", "after"):
            for n in range(1, reference.counts[0]["file"] + 1):
                cases.append(Case(name, (Fault("kill", place, n),)))
        middle = Fault("kill", "file", reference.counts[0]["file"] // 2)
        cases += [Case(name, (middle, Fault("kill", "half", n))) for n in range(1, 60)]
    return some(rng, size, cases)


def f8(look: Look, rng: random.Random, size: float) -> list[Case]:
    cases = []
    for name in ("fp32", "sync"):
        for action in (*DISK, *(f"{action}+" for action in DISK)):
            for n in range(1, look(name).counts[0]["file"] + 1):
                cases.append(Case(name, (Fault(action, rng.choice(["file", "half"]), n),)))
    return some(rng, size / 4, cases)


def f9(look: Look, rng: random.Random, size: float) -> list[Case]:
    """A whole run takes about 300 kB; a life that has room to its end is the last one."""
    names = ("fp32", "sync", "best", "ddp")
    return [
        Case(names[n % len(names)], tuple(Fault("full", "disk", rng.randrange(4, 150)) for _ in range(2)))
        for n in range(round(20 * size) or 1)
    ]


def f14(look: Look, rng: random.Random, size: float) -> list[Case]:
    names = ("workers", "fp32", "threads", "fp16-workers", "ddp", "ddp-workers")
    return [
        Case(name, (at_random(look, rng, name, action, "driver"),))
        for _ in range(round(3 * size) or 1)
        for name in names
        for action in STOPS
    ]


def f15(look: Look, rng: random.Random, size: float) -> list[Case]:
    """At every mark and every file operation: so during each save, validation and resume."""
    cases = []
    for place, count in (("mark", "mark"), ("file", "file")):
        for n in range(1, look("fp32").counts[0][count] + 1):
            cases.append(Case("fp32", (Fault(rng.choice(STOPS), place, n),)))
    for n in range(1, 60):
        cases.append(Case("sync", (Fault("kill", "batch", 25), Fault(rng.choice(STOPS), "file", n))))
    for _ in range(20):
        cases.append(Case("ddp", (at_random(look, rng, "ddp", rng.choice(STOPS), "mark"),)))
    return some(rng, size / 3, cases)


def f16(look: Look, rng: random.Random, size: float) -> list[Case]:
    names = [name for _ in range(5) for name in ("workers", "fp16-workers")]
    return some(rng, size, [
        Case(name, (Fault(action, "sample", rng.randrange(61)),)) for name in names for action in WORKER
    ])  # fmt: skip


def f17(look: Look, rng: random.Random, size: float) -> list[Case]:
    """The ranks start again by themselves, and the same life comes to its end."""
    kinds = (("stop", "batch"), ("error", "batch"), ("oom", "batch"), ("kill", "mark"), ("kill", "file"))
    cases = [
        Case("ddp-again", (at_random(look, rng, "ddp-again", *kind),)) for kind in kinds for _ in range(3)
    ]
    return some(rng, size, cases)


def f18(look: Look, rng: random.Random, size: float) -> list[Case]:
    """In every attempt: ahead of anything new to save, which must end; behind it, which comes to its end."""
    return some(rng, size, [
        Case("ddp-again", (Fault(action, "batch", n, rank),))
        for action in ("kill+", "error+")
        for rank in (0, 1)
        for n in (1, 14)
    ])  # fmt: skip


def f19(look: Look, rng: random.Random, size: float) -> list[Case]:
    return some(rng, size, [
        Case(name, (at_random(look, rng, name, action, "batch"),))
        for _ in range(6)
        for name in ("fp32", "bf16", "ddp")
        for action in CODE
    ])  # fmt: skip


def f24(look: Look, rng: random.Random, size: float) -> list[Case]:
    """While a save is under way in the background: kills and faults of its last operations, and at the exit."""
    cases = []
    for name in ("fp32", "best"):
        count = look(name).counts[0]["file"]
        for n in range(max(1, count - 60), count + 1):
            action = rng.choice(["kill", "eio", "enospc+", "term", "int"])
            cases.append(Case(name, (Fault(action, "file", n),)))
    return some(rng, size, cases)


def soak(look: Look, rng: random.Random, faults: int) -> list[Case]:
    """Mixed faults until there are as many as asked for."""
    single = ["fp32", "sync", *MATRIX]
    cases: list[Case] = []
    planned = 0
    while planned < faults:
        name = rng.choice(RANKS) if rng.random() < 0.06 else rng.choice(single)
        plan = [_any_fault(look, rng, name) for _ in range(rng.randrange(1, 6))]
        cases.append(Case(name, tuple(plan)))
        planned += len(plan)
    return cases


def _any_fault(look: Look, rng: random.Random, name: str) -> Fault:
    code = [action for action in CODE if action != "nan" or "fp16" not in name]  # a loss scale skips those
    action = rng.choice(["kill"] * 6 + [*STOPS, *DISK, *(f"{disk}+" for disk in DISK), *code])
    if "workers" in name and rng.random() < 0.2:
        return Fault(rng.choice(WORKER[:3]), "sample", rng.randrange(60))
    if action == "kill":
        place = rng.choice(["time", "mark", "batch", "file", "half", "after"])
    elif action in STOPS:
        place = rng.choice(["driver", "mark", "batch", "file"])
    elif action in code:
        place = "batch"
    else:
        place = rng.choice(["file", "half"])
    return at_random(look, rng, name, action, place)


SUITES: dict[str, tuple[str, Make]] = {
    "F1": ("kill -9 at random times", f1),
    "F2": ("the same: precisions, engines, workers, schedules, bucketing", f2),
    "F3": ("kill -9 at every micro-batch and every mark of the loop", f3),
    "F4": ("kill -9 of a random rank, 2 and 3 ranks", f4),
    "F5": ("kill -9 of a random rank, a model in shards", f5),
    "F7": ("kill -9 before, in and after every file operation", f7),
    "F8": ("ENOSPC, EDQUOT, EIO, EROFS at a file operation, once and from then on", f8),
    "F9": ("a file system that is full for real, life after life", f9),
    "F14": ("SIGTERM, SIGUSR1, SIGUSR2, SIGINT at random times", f14),
    "F15": ("stop signals in saves, validations and resumes", f15),
    "F16": ("loader workers killed, crashed, stalled", f16),
    "F17": ("a rank that stands still, fails, dies, and ranks that start again", f17),
    "F18": ("ranks that die in every attempt", f18),
    "F19": ("NaN, an exception, no memory in a micro-batch", f19),
    "F24": ("kills and faults while a save is under way", f24),
}
