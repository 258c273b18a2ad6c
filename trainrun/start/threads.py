"""How many threads an operation of this run uses on the CPU, timed on the real step.

What: forward and backward of a copy of the model, with each number of threads in turn; of those within 1.2x of the
fastest the largest is taken, so that on a quiet machine the same run takes the same. When: `trainer.num_threads=auto`,
on a CPU, where the rule of `backends.set_threads` leaves a choice and the run is long enough. When not:
`trainer.deterministic=true`, a number of your own, compiled models. The number decides over the last bits of sums:
it is written down with the run, and a resume uses it again. Source: two threads next to busy processes, where each
waits for the other to be scheduled. Gain: not measured on a quiet machine; the rule's alone, see `set_threads`.
"""

from __future__ import annotations

from statistics import mean

import torch

from trainrun.data.undecided import Undecided
from trainrun.monitor.readable import duration
from trainrun.parts import Parts
from trainrun.randomness import kept_random_state
from trainrun.start.audition import run_seconds_of, shared_candidates, total_batches
from trainrun.start.budget import FEW_BATCHES, THREADS
from trainrun.start.stage import Stage

ROUNDS = 3  # at least, or there is no time to measure
MARGIN = 1.2


def choose_threads(parts: Parts, recorded: int | None, stage: Stage) -> str:
    """Set the number for this process. recorded: what the run began with. Returns a line to show, or "".

    Every rank calls it and sets the same.
    """
    trainer, usual = parts.config.trainer, torch.get_num_threads()
    if trainer.num_threads != "auto":
        return ""
    if recorded is not None:
        torch.set_num_threads(min(recorded, usual))
        return (
            "" if recorded == usual else f"trainer.num_threads: {torch.get_num_threads()}, as the run began"
        )
    fixed = trainer.deterministic or trainer.compile.scope != "off" or parts.parallel.device.type != "cpu"
    if fixed or not isinstance(parts.train, Undecided) or total_batches(parts) < FEW_BATCHES:
        return ""
    if min(parts.parallel.gather(usual)) == 1:
        return ""
    times: dict[int, float] = {}
    try:
        with kept_random_state():
            times = _heard(parts, stage)
    finally:
        parts.train.close()
        torch.set_num_threads(usual)
    if not times:
        return ""
    best = min(times.values())
    chosen = max(number for number, seconds in times.items() if seconds <= MARGIN * best)
    torch.set_num_threads(chosen)
    others = ", ".join(
        f"{number}: {duration(seconds)}" for number, seconds in times.items() if number != chosen
    )
    return f"trainer.num_threads: {chosen}, {duration(times[chosen])} a step ({others})"


def _heard(parts: Parts, stage: Stage) -> dict[int, float]:
    """Seconds of a step by number of threads, the slowest rank's; empty if nothing could be measured."""
    assert isinstance(parts.train, Undecided)
    candidates = shared_candidates(parts)
    told = parts.parallel.gather(stage.first_look(candidates[0], stage.clock()))
    if any(heard.fault for heard in told):
        return {}
    step = max(heard.alone.step for heard in told)
    alone = told[0].alone._replace(step=step)
    numbers = numbers_up_to(torch.get_num_threads())
    limit = THREADS.of(run_seconds_of(parts, alone))
    if 2 * ROUNDS * len(numbers) * step > limit:
        return {}
    found: dict[int, list[float]] = {number: [] for number in numbers}
    started = stage.clock()
    while len(found[1]) < ROUNDS or (stage.clock() - started < limit and len(found[1]) < 100):
        for number in numbers:
            torch.set_num_threads(number)
            stage.step_seconds()  # wakes the threads
            found[number].append(stage.step_seconds())
    rows = parts.parallel.gather({number: mean(seconds) for number, seconds in found.items()})
    return {number: max(row[number] for row in rows) for number in numbers}


def numbers_up_to(largest: int) -> list[int]:
    """1, 2, 4 and so on, and the largest itself."""
    return sorted({2**power for power in range(largest.bit_length())} | {largest})
