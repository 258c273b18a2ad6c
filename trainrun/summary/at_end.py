"""What the spine asks for after the training: rows for pictures, and what the run could have reached."""

from __future__ import annotations

from typing import Any

from trainrun.runs.run_folder import RunDir
from trainrun.summary.flops import MIN_SECONDS, MIN_STEPS, Work, measured_work
from trainrun.summary.hint import hint
from trainrun.summary.padding_fraction import padding_fraction
from trainrun.summary.sample_predictions import confusion_row
from trainrun.summary.throughput_limits import ThroughputLimits, throughput_limits
from trainrun.timing.phases import Session
from trainrun.training.components import Components
from trainrun.training.state import TrainState


def sample_rows(run: Components, state: TrainState, run_dir: RunDir) -> list[dict[str, Any]]:
    """Rows of what the finished model predicts on its validation data. All ranks call it together."""
    row = confusion_row(run, run_dir)
    return [] if row is None else [row | {"step": state.step}]


def measured(run: Components, state: TrainState, run_dir: RunDir, session: Session) -> dict[str, Any]:
    """What the run computed, how fast it could have been, and what was wasted."""
    long = state.seconds >= MIN_SECONDS and state.step >= MIN_STEPS
    work = measured_work(run) if long else None
    facts: dict[str, Any] = compute_facts(work, state.items / max(state.seconds, 1e-9))
    found = throughput_limits(run, session)
    if found is not None:
        facts["throughput_limits"] = limit_facts(found, run.parallel.world_size)
    padding = padding_fraction(run, state, session)
    words = run_dir.overrides.read_text(encoding="utf-8").splitlines() if run_dir.overrides.exists() else []
    return facts | {"padding_fraction": padding, "hint": hint(session.seconds, padding, words)}


def compute_facts(work: Work | None, items_per_second: float) -> dict[str, float]:
    """The FLOP/s of one rank, as the others do as much at the same time. No MFU where the peak is not steady."""
    if work is None:
        return {}
    done, peak = work.flops * items_per_second, max(work.peaks)
    facts = {"flops_per_item": work.flops, "flops_per_second": done}
    facts |= {"peak_flops_per_second": peak, "lowest_peak_flops_per_second": min(work.peaks)}
    if work.data_sheet:
        facts |= {"data_sheet_flops_per_second": work.data_sheet}
    return facts | ({"mfu": done / peak} if work.is_steady and done <= peak else {})


def limit_facts(found: ThroughputLimits, world_size: int) -> dict[str, Any]:
    """Items a second of all ranks."""
    load, train = found.load * world_size, found.train * world_size
    return {
        "load_per_second": load,
        "train_per_second": train,
        "reached": found.reached,
        "limit": found.limit,
    }
