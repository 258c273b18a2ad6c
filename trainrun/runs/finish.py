"""The end of a run after its last step: the last checkpoint, the status, the summary."""

from __future__ import annotations

from typing import Any

from trainrun.assemble.monitors import Listeners
from trainrun.checkpoint.manifest import committed_steps
from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_INTERRUPTED
from trainrun.interfaces import RunFacts
from trainrun.runs.run_folder import RunDir, check_there, note_saved
from trainrun.runs.status import write_status
from trainrun.satellites import satellite
from trainrun.timing.phases import CHECKPOINT, MEASURING, PLOTS, RUNNER, Session
from trainrun.training.components import Components
from trainrun.training.state import TrainState


def finish(
    run: Components,
    state: TrainState,
    run_dir: RunDir,
    listeners: Listeners | None,
    facts: RunFacts,
    session: Session,
) -> int:
    """Return the exit code."""
    run.phases.open(PLOTS)
    if listeners is not None:
        listeners.prepare_end()
    code = {2: EXIT_INTERRUPTED, 3: EXIT_AGAIN}.get(state.stop_request, EXIT_DONE)
    at_end = None
    if code == EXIT_DONE:
        at_end = satellite("summary.at_end", "nothing is measured after the training", run.monitors.note)
    rows: list[dict[str, Any]] = []
    if at_end is not None and run.config.monitor.plots and run.config.monitor.metrics_file:
        rows = at_end.sample_rows(run, state, run_dir)  # the last checkpoint is written meanwhile
    run.phases.open(CHECKPOINT)
    run.checkpoints.close()
    if listeners is None:
        return code
    check_there(run_dir)
    note_commit(run_dir)
    run.phases.open(MEASURING)
    measured = at_end.measured(run, state, run_dir, session) if at_end is not None else {}
    run.phases.open(RUNNER)
    summary = summary_of(run, state, facts) | measured
    if faults := listeners.faults():
        summary["listener_faults"] = faults
    status = "done" if code == EXIT_DONE else "stopped"
    write_status(run_dir, run.config, state=status, exit_code=code, message="", **summary)
    listeners.end(summary, rows)
    return code


def note_commit(run_dir: RunDir) -> None:
    """Have RUN.json say that there are checkpoints, once there are."""
    if committed_steps(run_dir.checkpoints):
        note_saved(run_dir)


def summary_of(run: Components, state: TrainState, facts: RunFacts) -> dict[str, Any]:
    """How the training ended, as it stands in the last row, in `status.json` and on the screen."""
    return {
        "reason": state.stop_reason,
        "monitor": run.triggers.best.metric,
        "mode": run.triggers.best.mode,
        "value": state.best_metric,
        "best_step": state.best_step if state.best_step >= 0 else None,
        "step": state.step,
        "epoch": run.monitors.epoch_of(state),
        "seconds": state.seconds,
        **run.monitors.speeds(state.items * run.parallel.world_size / max(state.seconds, 1e-9)),
        "skipped_steps": state.skipped_steps,
        "num_parameters": facts.num_parameters,
        **hidden_syncs(run),
        **({} if run.compile_log is None else run.compile_log.summary()),
        "metrics": {
            name: value for name, value in state.last_metrics.items() if not name.endswith("/seconds")
        },
    }


def hidden_syncs(run: Components) -> dict[str, Any]:
    """What made the host wait, where `monitor.sync_debug` looked for it."""
    if not run.config.monitor.sync_debug:
        return {}
    from trainrun.training.checks.sync_debug import Watched

    return {"hidden_syncs": dict(run.step.found.most_common())} if isinstance(run.step, Watched) else {}
