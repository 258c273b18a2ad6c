"""The training loop.

It names no technique, device, rank or path; what differs between runs is behind `run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from trainrun.interfaces import MicroBatch
from trainrun.timing.phases import CHECKPOINT, DATA, LOGGING, RUNNER, VALIDATION
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.evaluate import validate


def fit(run: Components, state: TrainState) -> TrainState:
    """Train from `state` until the run ends, and return the state. `state.stop_reason` has the reason."""
    windows, phase = (
        iterate_windows(run, state),
        run.phases.open,
    )  # every second of the run belongs to one phase
    while True:
        phase(RUNNER)
        due = run.triggers.after_step(state)  # of a resume also what was due when it stopped
        if due.validate:
            phase(VALIDATION)
            validate(run, state)  # an early stop, for instance, is due in the next pass
            continue
        if due.stop and run.hooks.end(run, state):
            continue  # hooks changed the weights: what is saved as the last is validated, like all others
        if run.checkpoints.is_due(state):
            phase(CHECKPOINT)
            run.hooks.on_checkpoint(run, state)
            run.checkpoints.save(run, state)
        if due.stop:
            return state  # one extra pass: the end is evaluated and saved by the same lines
        phase(DATA)
        micro_batches = next(windows)
        phase(RUNNER)
        run.hooks.before_step(run, state)
        run.task_calls.before_step(state)
        report = run.step(run, micro_batches)
        state.advance(micro_batches, report)
        if state.batches == 0:
            run.schedule.end_epoch()
        run.task_calls.after_step(state, due.log)
        run.hooks.after_step(run, state)
        run.monitors.on_batch(state, report)  # counts on the host; the device is not waited for
        if due.log:
            phase(LOGGING)
            run.monitors.on_step(state, report)  # the only place where the host waits for the device


def iterate_windows(run: Components, state: TrainState) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of each step. The last window of an epoch may be shorter."""
    size = run.config.trainer.accumulate_grad_batches
    while True:
        batches = run.train.epoch(state.epoch, state.batches)
        while window := list(islice(batches, size)):
            yield window
