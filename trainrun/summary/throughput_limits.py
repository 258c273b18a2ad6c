"""The limits of a run's speed: loading alone, training alone, the bottleneck, and padding.

what: the slower of loading and training limits the speed, `max(load, train)`, however well they overlap. If batches
    are read between steps on a CPU, the timer of phases has measured both separately over the whole run. when not:
    batches that are read ahead, and GPUs. There the time spent waiting for data shows the bottleneck, and `trainrun
    diagnose` measures loading and training alone.
source: max(load, train) as in the data stalls of https://arxiv.org/abs/2007.06775
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

from torch import Tensor

from trainrun.data.engines.stream import OpenedStream
from trainrun.data.stream_options import count_read_ahead
from trainrun.interfaces import batch_fields
from trainrun.seeding import restore_random_state
from trainrun.timing.phases import Session
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.without_trace import iterate_endlessly

MIN_STEPS = 50  # the first ones warm up
WORKER_START = 0.1  # seconds for each process
BATCHES = 8  # whose padding is counted
MOST_SHARE = 0.005  # of the time of all steps, for that


class ThroughputLimits(NamedTuple):
    """The throughput of loading alone and of training alone, in items per second of one rank.

    reached: the throughput of the run, divided by the lower of these two limits.
    """

    load: float
    train: float
    reached: float

    @property
    def limit(self) -> str:
        return "load" if self.load < self.train else "train"


def throughput_limits(run: Components, session: Session) -> ThroughputLimits | None:
    """Return the limits. Return None if the run is too short, or if its phases do not separate loading from
    training.
    """
    seconds, items = session.seconds, session.items
    if session.steps < MIN_STEPS or not items or not seconds.get("forward"):
        return None
    if num_batches_ahead(run) or run.parallel.device.type != "cpu":
        return None
    load = seconds.get("data", 0.0)
    train = seconds["forward"] + seconds.get("backward", 0.0) + session.update_seconds
    return ThroughputLimits(items / max(load, 1e-9), items / train, max(load, train) / session.loop_seconds)


def num_batches_ahead(run: Components) -> int:
    """Return how many batches are read ahead; 0 if each is read between two steps."""
    number, factor = num_readers(run), run.config.data.prefetch_factor
    return (
        count_read_ahead(number, factor) if number and reading_engine(run) == "threads" else number * factor
    )


def reading_engine(run: Components) -> str:
    return run.train.read_by.engine if isinstance(run.train, OpenedStream) else run.config.data.engine


def num_readers(run: Components) -> int:
    """Return the number of threads or worker processes that read data."""
    if isinstance(run.train, OpenedStream):
        return run.train.read_by.number
    data = run.config.data
    number = data.num_threads if data.engine == "threads" else data.num_workers
    return number if isinstance(number, int) and data.engine != "resident" else 0


def worker_start_seconds(run: Components) -> float:
    """Return the seconds until worker processes start to read; 0 for threads."""
    return 0.0 if reading_engine(run) == "threads" else WORKER_START * num_readers(run)


def padding_fraction(run: Components, state: TrainState, session: Session) -> float:
    """Return the share of padded positions in the next batches; 0 if unknown, or if reading takes too long."""
    if not session.steps:
        return 0.0
    inline = not num_batches_ahead(run)
    seconds = session.seconds.get("data", 0.0) if inline else session.loop_seconds
    usual = seconds / (session.steps * run.config.trainer.accumulate_grad_batches)
    needed = (num_batches_ahead(run) + BATCHES) * usual + worker_start_seconds(run)
    if needed > MOST_SHARE * session.loop_seconds:
        return 0.0
    useful = positions = 0
    try:
        with (
            restore_random_state(),
            closing(iterate_endlessly(run.train, [state.epoch, state.batches])) as batches,
        ):
            for _ in range(BATCHES):
                mask = find_padding_mask(next(batches).data)
                if mask is None:
                    return 0.0
                useful, positions = useful + int(mask.count_nonzero()), positions + mask.numel()
    # Whatever the user's data does when it is asked again, a finished run is not lost to a figure.
    except Exception:
        return 0.0
    return 1 - useful / max(positions, 1)


def find_padding_mask(batch: Any) -> Tensor | None:
    """Return the mask (B, T) of a batch, which is 0 at padding; None if the batch has none."""
    fields = batch_fields(batch)
    mask = fields.get("attention_mask", fields.get("segment_ids"))
    return mask if isinstance(mask, Tensor) else None
