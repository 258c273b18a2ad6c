"""Choose the data engine by timing each candidate together with real training steps.

What: forward and backward of a *copy* of the model, on the real batches, with each engine in turn. The
model, its buffers, the task, gradients, the loss scale and all random states stay as they are, because
none of them takes part. When: `data.engine` or `data.num_workers` is auto and the run is long enough.
Cost: with what else is measured at the start at most 1.8 s and 4.5 % of the run (`budget`).
"""

from __future__ import annotations

import math
from statistics import median

from trainrun.data.choice import usable_cores
from trainrun.data.contest import Alone, Outcome, contest, winner
from trainrun.data.undecided import Candidate, Undecided
from trainrun.monitor.readable import duration, quantity
from trainrun.parts import Parts
from trainrun.randomness import kept_random_state
from trainrun.start.budget import ALL, FEW_BATCHES
from trainrun.start.stage import Stage
from trainrun.words.checks import parse_seconds

CONTEST_SHARE = 0.8  # of that time; the rest is for a last look at the winner, and for what takes longer
NEGLIGIBLE = 0.03  # of a step: loading that cannot matter


def choose_engine(parts: Parts, stage: Stage, spent: float = 0.0) -> str:
    """Decide how `parts.train` is read. Returns choice and reason in one line; "" if there is no choice.

    spent: seconds that other measurements of this start took. Every rank calls it: they measure at the same time,
    and the slowest counts.
    """
    if total_batches(parts) < FEW_BATCHES:
        return ""
    started = stage.clock() - spent
    stream, candidates = parts.train, shared_candidates(parts)
    if not isinstance(stream, Undecided) or len(candidates) < 2:
        return ""
    name, why = stream.default.name, ""
    try:
        with kept_random_state():
            name, why = _heard(parts, stream, stage, candidates, started)
    finally:
        stream.decide(name)
    for other in (parts.val, parts.test):
        if isinstance(other, Undecided) and other.default.engine == "workers":
            other.follow(name)
    return f"data: {name}, {why}"


def _heard(parts: Parts, stream: Undecided, stage: Stage, candidates: list[Candidate],
           started: float) -> tuple[str, str]:  # fmt: skip
    """The choice, and its reason."""
    default, first = stream.default.name, candidates[0].name
    mine = stage.first_look(candidates[0], started)
    told = parts.parallel.gather(mine)
    fault = next((heard.fault for heard in told if heard.fault), "")
    if fault:
        return default, f"not measured: {fault}"
    alone = Alone(*map(max, zip(*(heard.alone for heard in told), strict=True)))  # the slowest counts
    speed = samples_per_batch(parts)
    if alone.load < NEGLIGIBLE * alone.step:
        share = f"loading takes {100 * alone.load / alone.step:.2g} % of a step"
        return first, f"{quantity(speed / alone.both)} samples/s ({share})"
    run_seconds = run_seconds_of(parts, alone)
    limit = ALL.of(run_seconds)
    left = CONTEST_SHARE * limit - max(heard.elapsed for heard in told)
    measure = stage.measure(started, CONTEST_SHARE * limit)
    cores = max(1, usable_cores() // parts.parallel.local_world_size)
    outcome = contest(candidates, alone, left, measure, stream.prefetch_factor, cores)
    if first in outcome.unheard or (outcome.unheard and set(outcome.scores) <= {first}):
        short = f"a short run, about {duration(run_seconds)}"
        slow = f"a batch takes {duration(alone.both)}, too long to compare engines in {duration(limit)}"
        return default, f"not measured: {short if limit < ALL.seconds else slow}"
    name = winner(candidates, outcome.scores)
    if name is None:
        return default, "not measured: no engine gave its batches in time"
    if name != first and not all(parts.parallel.gather(stage.reads_the_same(name))):
        return default, f"not measured: {name} reads other samples: data.train gives another at each read"
    return name, described(name, outcome, speed)


def described(name: str, outcome: Outcome, samples: float) -> str:
    """`5.9k samples/s (workers=2: 4.8k, thread: 5.1k)`, the fastest first."""
    speeds = {key: samples / median(times) for key, times in outcome.scores.items()}
    others = sorted((key for key in speeds if key != name), key=lambda key: -speeds[key])
    listed = [f"{key}: {quantity(speeds[key])}" for key in others]
    listed += [f"{engine}: failed" for engine in outcome.failed]
    reason = ", ".join(listed) or "nothing could be notably faster"
    return f"{quantity(speeds[name])} samples/s ({reason})"


def shared_candidates(parts: Parts) -> list[Candidate]:
    """Those of all ranks: what fits into memory may differ."""
    own = parts.train.candidates if isinstance(parts.train, Undecided) else ()
    all_names = parts.parallel.gather([candidate.name for candidate in own])
    return [candidate for candidate in own if all(candidate.name in names for names in all_names)]


def total_batches(parts: Parts) -> float:
    """Micro-batches of the whole run; infinite if nothing but time or a signal ends it."""
    trainer, per_epoch = parts.config.trainer, parts.train.num_batches
    limits = [math.inf]
    if trainer.max_steps is not None:
        limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
    if trainer.max_epochs is not None and per_epoch is not None:
        limits.append(trainer.max_epochs * per_epoch)
    return min(limits)


def run_seconds_of(parts: Parts, alone: Alone) -> float:
    """How long the run may take, as far as loading and steps say."""
    longest = parse_seconds(parts.config.trainer.max_time)
    batches = loaded = total_batches(parts)
    if isinstance(parts.train, Undecided) and parts.train.fills and parts.train.num_batches is not None:
        loaded = min(batches, parts.train.num_batches)  # after that there is nothing to load
    return min(batches * alone.step + loaded * alone.load, math.inf if longest is None else longest)


def samples_per_batch(parts: Parts) -> float:
    """Return the average number of samples in a batch of all ranks together."""
    train = parts.train
    if train.num_batches and train.num_samples:
        return train.num_samples / train.num_batches
    return parts.config.data.batch_size * parts.parallel.world_size
