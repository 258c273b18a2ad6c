"""Everything after the last step: the checkpoint that is being written, pictures, what was measured, the summary."""

from __future__ import annotations

from typing import Any

from trainrun.build.listeners import Listeners
from trainrun.build.resumption import note_commit
from trainrun.ending.ceilings import Ceilings, Session, ceilings
from trainrun.ending.flops import MIN_SECONDS, MIN_STEPS, Work, measured_work
from trainrun.ending.hint import hint
from trainrun.ending.padding_share import padding_share
from trainrun.ending.showcase import show
from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_INTERRUPTED
from trainrun.interfaces import RunFacts
from trainrun.ledger import CHECKPOINT, MEASURING, PLOTS, RUNNER
from trainrun.parts import Parts
from trainrun.rundir import RunDir, check_there
from trainrun.state import TrainState
from trainrun.status import write_status
from trainrun.step.watched import Watched


def finish(
    parts: Parts,
    state: TrainState,
    run: RunDir,
    listeners: Listeners | None,
    facts: RunFacts,
    session: Session,
) -> int:
    """Returns the exit code."""
    parts.ledger.open(PLOTS)
    code = {2: EXIT_INTERRUPTED, 3: EXIT_AGAIN}.get(state.stop_request, EXIT_DONE)
    confusion = None
    if code == EXIT_DONE and parts.config.monitor.plots and parts.config.monitor.metrics_file:
        confusion = show(parts, run, parts.data_facts.class_names)  # the last checkpoint is written meanwhile
    parts.ledger.open(CHECKPOINT)
    parts.checkpoints.close()
    if listeners is None:
        return code
    check_there(run)
    note_commit(run)
    parts.ledger.open(MEASURING)
    found = measured(parts, state, run, session) if code == EXIT_DONE else {}
    parts.ledger.open(RUNNER)
    summary: dict[str, Any] = {
        "reason": state.stop_reason,
        "monitor": parts.cadence.best.metric,
        "mode": parts.cadence.best.mode,
        "value": state.best_metric,
        "best_step": state.best_step if state.best_step >= 0 else None,
        "step": state.step,
        "epoch": parts.board.epoch_of(state),
        "seconds": state.seconds,
        **parts.board.speeds(state.items * parts.parallel.world_size / max(state.seconds, 1e-9)),
        "skipped_steps": state.skipped_steps,
        **found,
        "num_parameters": facts.num_parameters,
        **parts.compile_log.summary(),
        **({"listener_faults": faults} if (faults := listeners.faults()) else {}),
        "metrics": {
            name: value for name, value in state.last_metrics.items() if not name.endswith("/seconds")
        },
    }
    status = "done" if code == EXIT_DONE else "stopped"
    write_status(run, parts.config, state=status, exit_code=code, message="", **summary)
    listeners.end(summary, [confusion | {"step": state.step}] if confusion is not None else [])
    return code


def measured(parts: Parts, state: TrainState, run: RunDir, session: Session) -> dict[str, Any]:
    """What the run computed, how fast it could have been, and what was wasted."""
    long = state.seconds >= MIN_SECONDS and state.step >= MIN_STEPS
    work = measured_work(parts) if long else None
    facts: dict[str, Any] = compute_facts(work, state.items / max(state.seconds, 1e-9))
    found = ceilings(parts, state, session)
    if found is not None:
        facts["ceilings"] = ceiling_facts(found, parts.parallel.world_size)
    if isinstance(parts.stepper, Watched):
        facts["hidden_syncs"] = dict(parts.stepper.found.most_common())
    padding = padding_share(parts, state, session)
    words = run.overrides.read_text(encoding="utf-8").splitlines() if run.overrides.exists() else []
    return facts | {"padding_share": padding, "hint": hint(session.seconds, padding, words)}


def compute_facts(work: Work | None, items_per_second: float) -> dict[str, float]:
    """Of one rank: the others do as much at the same time. No MFU where the peak is not steady, or is none."""
    if work is None:
        return {}
    done, peak = work.flops * items_per_second, max(work.peaks)
    facts = {"flops_per_item": work.flops, "flops_per_second": done}
    facts |= {"peak_flops_per_second": peak, "lowest_peak_flops_per_second": min(work.peaks)}
    if work.data_sheet:
        facts |= {"data_sheet_flops_per_second": work.data_sheet}
    return facts | ({"mfu": done / peak} if work.is_steady and done <= peak else {})


def ceiling_facts(found: Ceilings, world_size: int) -> dict[str, Any]:
    """Items a second of all ranks."""
    load, train = found.load * world_size, found.train * world_size
    return {
        "load_per_second": load,
        "train_per_second": train,
        "reached": found.reached,
        "limit": found.limit,
    }
