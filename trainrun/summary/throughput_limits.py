"""How fast a run could be at most: its loading alone, its training alone, and which of the two limits.

what: the slower of both bounds the speed, `max(load, train)`, however well they overlap. Where batches are read
    between steps on a CPU, the ledger has timed both apart over the whole run. Where they are read ahead, or a GPU
    computes, each is repeated alone after the training, for a moment (MOST_SHARE of the run): the next batches
    through the same engine, then forward and backward of copies of model and task. The rest of a step is as booked.
    On a CPU a step also takes over a batch that is there already, which workers make dearer than threads.
when: after runs of MIN_STEPS, where a moment is enough; nothing of the run is moved.
when not: shorter runs, models too large to copy, compiled steps on a GPU: then there is no figure.
source: max(load, train) as in the data stalls of https://arxiv.org/abs/2007.06775
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from statistics import median_low
from time import perf_counter, sleep
from typing import NamedTuple

import torch

from trainrun.data.threads import num_ahead
from trainrun.data.undecided import Undecided
from trainrun.interfaces import MicroBatch, counts_before
from trainrun.ledger import Session
from trainrun.parts import Parts
from trainrun.randomness import kept_random_state
from trainrun.start.stage import uncopied
from trainrun.start.trial import stand_ins
from trainrun.state import TrainState

MIN_STEPS = 50  # the first ones warm up
MOST_SHARE = 0.01  # of the time of all steps, for both together
WORKER_START = 0.1  # seconds for each process
MOST_BATCHES = 256  # of the loading alone
KEPT = 4  # of them the training alone uses
LEAST_STEPS = 2  # after one that warms up
TAKEN = 3  # batches that are taken over, at most

Clock = Callable[[], float]
Wait = Callable[[float], None]


class ThroughputLimits(NamedTuple):
    """load, train: items a second of this rank, each alone. reached: share of the lower one that the run had."""

    load: float
    train: float
    reached: float

    @property
    def limit(self) -> str:
        return "load" if self.load < self.train else "train"


class ItemSeconds(NamedTuple):
    """Seconds of one item: loaded alone, taken over when it is there already, and in forward and backward alone."""

    load: float
    take: float
    train: float


def throughput_limits(
    parts: Parts, state: TrainState, session: Session, clock: Clock = perf_counter, wait: Wait = sleep
) -> ThroughputLimits | None:
    """None if the run is too short, or if it cannot be told without moving it."""
    seconds, items = session.seconds, session.items
    if session.steps < MIN_STEPS or not items or not seconds.get("forward"):
        return None
    load, train = seconds.get("data", 0.0), seconds["forward"] + seconds.get("backward", 0.0)
    on_cpu = parts.parallel.device.type == "cpu"
    if ahead(parts) or not on_cpu:
        alone = measured_alone(parts, state, session, clock, wait)
        if alone is None:
            return None
        load = alone.load * items
        # On a CPU training alone cannot be slower than during the loading; also where the copy was not compiled.
        train = min(alone.train * items, train) + alone.take * items if on_cpu else alone.train * items
    train += session.update_seconds
    return ThroughputLimits(items / max(load, 1e-9), items / train, max(load, train) / session.loop_seconds)


def ahead(parts: Parts) -> int:
    """Batches that are read while others are trained on; 0 if each is read when it is asked for."""
    number, factor = readers(parts), parts.config.data.prefetch_factor
    return num_ahead(number, factor) if number and engine_of(parts) == "threads" else number * factor


def engine_of(parts: Parts) -> str:
    return parts.train.chosen.engine if isinstance(parts.train, Undecided) else parts.config.data.engine


def readers(parts: Parts) -> int:
    """Threads or worker processes besides the training."""
    if isinstance(parts.train, Undecided):
        return parts.train.chosen.number
    data = parts.config.data
    number = data.num_threads if data.engine == "threads" else data.num_workers
    return number if isinstance(number, int) and data.engine != "resident" else 0


def start_seconds(parts: Parts) -> float:
    """What it may take until the readers read; threads begin at once."""
    return 0.0 if engine_of(parts) == "threads" else WORKER_START * readers(parts)


def measured_alone(
    parts: Parts, state: TrainState, session: Session, clock: Clock, wait: Wait
) -> ItemSeconds | None:
    """None if the share of the run that it may take is too short for it."""
    accumulate = parts.config.trainer.accumulate_grad_batches
    usual = session.loop_seconds / (session.steps * accumulate)  # of a batch, so neither alone is longer
    number = max(readers(parts), 1)
    again = min(ahead(parts), TAKEN) if parts.parallel.device.type == "cpu" else 0
    needed = (ahead(parts) + 2 * again + 2 * number + 1 + LEAST_STEPS) * usual + start_seconds(parts)
    limit = MOST_SHARE * session.loop_seconds
    compiled = parts.config.trainer.compile.scope != "off" or parts.config.trainer.cuda_graphs
    if (
        needed > limit
        or uncopied(parts)
        or not counts_before(parts.task)
        or (compiled and parts.parallel.device.type != "cpu")
    ):
        return None
    began = clock()
    try:
        with kept_random_state():
            with contextlib.closing(batches_from(parts, state)) as batches:
                kept, load = measured_loading(parts, batches, number, began + limit / 2, clock)
                to_read = load * again * kept[-1].counted_by(parts.task)  # seconds, until all ahead are there
                wait(min(to_read, again * usual))
                take = measured_taking(parts, batches, kept[-1], again, lambda: wait(usual), clock)
            return ItemSeconds(load, take, measured_training(parts, kept, began + limit, clock))
    # Whatever the user's data and model do when they are asked again, a finished run is not lost to a figure.
    except Exception:
        return None


def measured_loading(
    parts: Parts, batches: Iterator[MicroBatch], number: int, deadline: float, clock: Clock
) -> tuple[list[MicroBatch], float]:
    """Some batches, the newest last, and the seconds of one item, once what was read ahead of the clock is used up."""
    kept: list[MicroBatch] = []
    for _ in range(ahead(parts)):
        kept.append(next(batches))
    count, items, begin = 0, 0, clock()
    while count < 2 * number or (count < MOST_BATCHES and clock() < deadline) or count % number:
        batch = next(batches)
        count, items = count + 1, items + batch.counted_by(parts.task)
        kept = [*kept[-KEPT + 1 :], batch]
    settle(parts.parallel.device)
    return kept, (clock() - begin) / max(items, 1)


def measured_taking(
    parts: Parts,
    batches: Iterator[MicroBatch],
    before: MicroBatch,
    number: int,
    step: Callable[[], None],
    clock: Clock,
) -> float:
    """Seconds of an item of a batch that was read when it was asked for; 0 if there is none before the epoch ends,
    behind which nobody has read yet. step: takes as long as one, after which caches are cold."""
    taken = []
    for _ in range(number):
        if before.last:
            break
        step()
        began = clock()
        before = next(batches)
        taken.append((clock() - began) / max(before.counted_by(parts.task), 1))
    return median_low(taken) if taken else 0.0


def batches_from(parts: Parts, state: TrainState) -> Generator[MicroBatch, None, None]:
    """Those that would come next."""
    epoch, start = state.epoch, state.batches
    while True:
        found: Iterator[MicroBatch] = parts.train.epoch(epoch, start)
        try:
            yield from found
        finally:
            getattr(found, "close", lambda: None)()
        epoch, start = epoch + 1, 0


def measured_training(parts: Parts, kept: list[MicroBatch], deadline: float, clock: Clock) -> float:
    """Seconds of one item in forward and backward of copies."""
    model, task = stand_ins(parts.model, parts.task)
    parameters = list(model.parameters())

    def step(batch: MicroBatch) -> int:
        with parts.precision.autocast():
            out = task.step(model, batch.data)
        out.loss_sum.backward()
        for parameter in parameters:
            parameter.grad = None
        return batch.counted_by(task)

    step(kept[0])
    settle(parts.parallel.device)
    count, items, begin = 0, 0, clock()
    while count < LEAST_STEPS or clock() < deadline:
        items += step(kept[count % len(kept)])
        count += 1
        if count % len(kept) == 0:
            settle(parts.parallel.device)  # or the host would go on giving work until the deadline
    settle(parts.parallel.device)
    return (clock() - begin) / max(items, 1)


def settle(device: torch.device) -> None:
    """Until the device has done all that it was given; the training is over."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
