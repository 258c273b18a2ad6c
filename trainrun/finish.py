"""The end of a run after its last step: the last checkpoint, the status, the summary."""

from __future__ import annotations

from typing import Any

from trainrun.build.listeners import Listeners
from trainrun.build.resumption import note_commit
from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_INTERRUPTED
from trainrun.interfaces import RunFacts
from trainrun.ledger import CHECKPOINT, MEASURING, PLOTS, RUNNER, Session
from trainrun.parts import Parts
from trainrun.rundir import RunDir, check_there
from trainrun.satellites import satellite
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
    """Return the exit code."""
    parts.ledger.open(PLOTS)
    code = {2: EXIT_INTERRUPTED, 3: EXIT_AGAIN}.get(state.stop_request, EXIT_DONE)
    at_end = None
    if code == EXIT_DONE:
        at_end = satellite("summary.at_end", "nothing is measured after the training", parts.board.note)
    rows: list[dict[str, Any]] = []
    if at_end is not None and parts.config.monitor.plots and parts.config.monitor.metrics_file:
        rows = at_end.sample_rows(parts, state, run)  # the last checkpoint is written meanwhile
    parts.ledger.open(CHECKPOINT)
    parts.checkpoints.close()
    if listeners is None:
        return code
    check_there(run)
    note_commit(run)
    parts.ledger.open(MEASURING)
    measured = at_end.measured(parts, state, run, session) if at_end is not None else {}
    parts.ledger.open(RUNNER)
    summary = summary_of(parts, state, facts) | measured
    if faults := listeners.faults():
        summary["listener_faults"] = faults
    status = "done" if code == EXIT_DONE else "stopped"
    write_status(run, parts.config, state=status, exit_code=code, message="", **summary)
    listeners.end(summary, rows)
    return code


def summary_of(parts: Parts, state: TrainState, facts: RunFacts) -> dict[str, Any]:
    """How the training ended, as it stands in the last row, in `status.json` and on the screen."""
    found = parts.stepper.found if isinstance(parts.stepper, Watched) else None
    return {
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
        "num_parameters": facts.num_parameters,
        **({"hidden_syncs": dict(found.most_common())} if found is not None else {}),
        **parts.compile_log.summary(),
        "metrics": {
            name: value for name, value in state.last_metrics.items() if not name.endswith("/seconds")
        },
    }
