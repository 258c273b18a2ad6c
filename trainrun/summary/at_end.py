"""What the spine asks for after the training: rows for pictures, and what the run could have had."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainrun.runs.run_folder import RunDir
from trainrun.summary.flops import MIN_SECONDS, MIN_STEPS, Work, measured_work
from trainrun.summary.sample_predictions import confusion_row
from trainrun.timing.phases import LOOP
from trainrun.training.components import Components
from trainrun.training.state import TrainState

NOTABLE = 0.10  # of the time between start-up and the end of the training
LEAST_SECONDS = 1.0  # less is not worth a command that takes longer
WITHOUT = ("hydra.", "run_name=", "output_dir=")  # words about the place of a run
LONGEST = 80  # characters of words that are said again
# What it is called, and the command that measures what could be won.
NAMES = {
    "data": ("waiting for data", "autotune"),
    "logging": ("logging", "diagnose"),
    "validation": ("validation", "diagnose"),
    "checkpoint": ("saving checkpoints", "diagnose"),
}


def sample_rows(run: Components, state: TrainState, run_dir: RunDir) -> list[dict[str, Any]]:
    """Rows of what the finished model predicts on its validation data. All ranks call it together."""
    row = confusion_row(run, run_dir)
    return [] if row is None else [row | {"step": state.step}]


def measured(
    run: Components, state: TrainState, run_dir: RunDir, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """What the run computed, and what was wasted. seconds: the account of time at the end of the training."""
    long = state.seconds >= MIN_SECONDS and state.step >= MIN_STEPS
    work = measured_work(run) if long else None
    words = run_dir.overrides.read_text(encoding="utf-8").splitlines() if run_dir.overrides.exists() else []
    return compute_facts(work, state.items / max(state.seconds, 1e-9)) | {"hint": hint(seconds, words)}


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


def hint(seconds: Mapping[str, float], words: Sequence[str]) -> str:
    """`waiting for data took 34 % (12 s); what would shorten it is measured by: trainrun autotune data=...`

    "" if nothing is notable; of several the largest. seconds: the ledger.
    """
    total = sum(seconds.get(name, 0.0) for name in (*LOOP, "validation", "checkpoint"))
    wasted = {name: seconds.get(name, 0.0) for name in ("logging", "validation", "checkpoint")}
    # While the host waited for data, a GPU may have worked on what it had been given: at the log points
    # the host then found it at work, and waited for it.
    wasted["data"] = seconds.get("data", 0.0) - seconds.get("device", 0.0)
    name = max(wasted, key=lambda name: wasted[name])
    if wasted[name] < LEAST_SECONDS or wasted[name] <= NOTABLE * total:
        return ""
    what, command = NAMES[name]
    same = shlex.join([word for word in words if not word.startswith(WITHOUT)])
    if len(same) > LONGEST:
        same = "... (the words in overrides.txt)"
    share = f"{what} took {100 * wasted[name] / total:.0f} % after start-up"
    return f"{share}; what could be won is measured by: trainrun {command} {same}".rstrip()
