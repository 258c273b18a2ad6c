"""Measurements after the training: FLOP/s, bottleneck, padding, and rows for plots."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainrun.folder.run_folder import RunDir, read_overrides
from trainrun.summary.flops import MIN_SECONDS, MIN_STEPS, Work, measure_work
from trainrun.summary.sample_predictions import prediction_rows as prediction_rows
from trainrun.summary.throughput_limits import ThroughputLimits, padding_fraction, throughput_limits
from trainrun.timing.phases import LOOP, Session
from trainrun.train_state import TrainState
from trainrun.training.components import Components

NOTABLE = 0.10  # of the time between start-up and the end of the training
LEAST_SECONDS = 1.0  # less is not worth a command that takes longer
WITHOUT = ("hydra.", "run_name=", "output_dir=")  # settings about the folder of a run
# The name of each part, and the command that measures what could be gained.
NAMES = {
    "data": ("waiting for data", "autotune"),
    "padding": ("computing on padding", "diagnose"),
    "logging": ("logging", "diagnose"),
    "validation": ("validation", "diagnose"),
    "checkpoint": ("saving checkpoints", "diagnose"),
}


def measure_finished_run(
    run: Components, state: TrainState, run_dir: RunDir, session: Session
) -> dict[str, Any]:
    """Measure FLOP/s, the bottleneck, and the share of padding of a finished run."""
    long = state.seconds >= MIN_SECONDS and state.step >= MIN_STEPS
    work = measure_work(run) if long else None
    facts: dict[str, Any] = flop_facts(work, state.items / max(state.seconds, 1e-9))
    limits = throughput_limits(run, session)
    if limits is not None:
        facts["throughput_limits"] = limit_facts(limits, run.parallel.world_size)
    padding = padding_fraction(run, state, session)
    words = read_overrides(run_dir)
    return facts | {"padding_fraction": padding, "hint": bottleneck_hint(session.seconds, padding, words)}


def flop_facts(work: Work | None, items_per_second: float) -> dict[str, float]:
    """Return the FLOP/s of one rank, and the MFU if the GPU is known. All ranks compute at the same rate."""
    if work is None:
        return {}
    rate = work.flops * items_per_second
    facts = {"flops_per_item": work.flops, "flops_per_second": rate}
    if work.data_sheet:
        facts |= {"data_sheet_flops_per_second": work.data_sheet, "mfu": rate / work.data_sheet}
    return facts


def limit_facts(limits: ThroughputLimits, world_size: int) -> dict[str, Any]:
    """Return the throughput limits in items per second over all ranks."""
    load, train = limits.load * world_size, limits.train * world_size
    rates = {"load_per_second": load, "train_per_second": train}
    return rates | {"reached": limits.reached, "limit": limits.limit}


def bottleneck_hint(seconds: Mapping[str, float], padding: float, words: Sequence[str]) -> str:
    """Return a line that names the largest avoidable share of time, with a command that measures the remedy.

    Example: `waiting for data took 34 % after start-up; to measure what can be gained: trainrun autotune data=...`.
        Return "" if no share is notable. seconds: of each phase. padding: the share of padded positions. words: the
        typed settings of the run.
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
    subject, command = NAMES[name]
    same = shlex.join([word for word in words if not word.startswith(WITHOUT)])
    share = f"{subject} took {100 * wasted[name] / total:.0f} % after start-up"
    return f"{share}; to measure what can be gained: trainrun {command} {same}".rstrip()
