"""The training loop, and nothing else.

One optimizer step equals one step on the micro-batches of all ranks joined together: every loss is a
sum, and the division by the count over the whole step happens once. No technique, device name, rank
or path is named here; what a step does differently, it does behind `parts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.interfaces import Gradients, MicroBatch, StepReport
from trainrun.ledger import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    RANKS,
    RUNNER,
    VALIDATION,
)
from trainrun.parts import Parts
from trainrun.randomness import kept_random_state
from trainrun.state import TrainState
from trainrun.sums import add_sums, flat_sums, metrics_of, over_ranks


def fit(parts: Parts, state: TrainState) -> TrainState:
    """Trains from `state` on until something ends the run; `state.stop_reason` says what."""
    windows = windows_from(parts, state)
    book = parts.ledger.open  # every second of the run is on one account
    while True:
        book(RUNNER)
        parts.cadence.look(state)  # sets stop_reason once a limit is reached or a stop was asked for
        if parts.cadence.validation_due(state):
            book(VALIDATION)
            metrics = evaluate(parts, "val")
            if not metrics:  # a stop came: what was half seen is not recorded, and a resume does it again
                state.stop_request = parts.parallel.agree(0, parts.cadence.stop_request(), 0).stop
                continue
            parts.cadence.note_validation(state, metrics)  # early stopping, and schedules that listen
            book(LOGGING)
            parts.board.on_eval(state, metrics)
            continue
        if parts.checkpoints.due(state):
            book(CHECKPOINT)
            parts.checkpoints.save(parts, state)
            book(RUNNER)
        if state.stop_reason:
            return state  # one extra pass: the end is evaluated and saved by the same lines
        book(DATA)
        window = next(windows)
        book(RUNNER)
        log = parts.cadence.log_due(state.step + 1)
        parts.task_calls.before_step(state)
        report = parts.stepper(parts, window, log)  # `train_step`, or one that equals it
        state.advance(window, report)
        if state.batches == 0:
            parts.schedule.end_epoch()
        parts.task_calls.after_step(state, log)
        parts.board.on_batch(state, report)  # counts on the host; the device is not waited for
        if log:
            book(LOGGING)
            parts.board.on_step(state, report)  # the only place where the host waits for the device


def windows_from(parts: Parts, state: TrainState) -> Iterator[list[MicroBatch]]:
    """The micro-batches of one step after the other; the last window of an epoch may be short."""
    size = parts.config.trainer.accumulate_grad_batches
    while True:
        batches = parts.train.epoch(state.epoch, state.batches)
        while window := list(islice(batches, size)):
            yield window


def train_step(parts: Parts, window: list[MicroBatch], log: bool) -> StepReport:
    """One update from one window. `log` asks for the task's sums and the gradient norm too."""
    found = parts.retry.run(window, lambda batches: add_gradients(parts, batches, log))
    found = parts.counting.settle(found)  # as it is, unless the count came with the outputs
    parts.ledger.open(OPTIMIZER)
    grad = parts.precision.optimizer_step(parts.optimizer, want_norm=log)
    if not grad.skipped:
        parts.schedule.step()
        parts.ema.update()
    parts.ledger.open(RUNNER)
    return StepReport(*found, grad)


def add_gradients(parts: Parts, window: list[MicroBatch], log: bool) -> Gradients:
    """Forward and backward of every micro-batch; only gradients change, and what the forward draws or writes."""
    task, precision, parallel, book = parts.task, parts.precision, parts.parallel, parts.ledger.open
    items = sum([batch.counted_by(task) for batch in window if batch.real])
    book(RANKS)
    agreed = parallel.agree(items, parts.cadence.stop_request(), parts.cadence.save_request())
    losses: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    counting = parts.counting
    for i, batch in enumerate(window):
        with parallel.sync_gradients(last=i == len(window) - 1):
            book(FORWARD)
            with precision.autocast():
                out = task.step(parts.wrapped, batch.data)
            book(BACKWARD)
            # ranks average: items is a mean; 0 where no target counts, and then no loss does, or where it comes late
            precision.backward(out.loss_sum, batch.real / (agreed.items or counting.expected))
        losses.append(out.loss_sum.detach() if batch.real else torch.zeros_like(out.loss_sum))
        items = items + counting.late(out) * batch.real
        if log:  # the same names on every rank, also where nothing counts
            add_sums(sums, out.sums, task, counts=batch.real)
    return Gradients(losses, items, agreed, sums)


def evaluate(parts: Parts, split: str) -> dict[str, float]:
    """Loss and metrics of the averaged model over one split, each sample counted once over all ranks.

    Empty, on all ranks, where a signal asked one of them to stop before its last batch.
    """
    batches = parts.splits()[split]
    model, task = parts.averaged, parts.task
    sums: dict[str, Tensor] = {}
    items, started, training, stopped = 0, perf_counter(), model.training, False
    model.eval()
    try:
        with torch.no_grad(), kept_random_state():  # validation cannot move the training's random numbers
            parts.task_calls.evaluation_starts(model, split)
            for batch in batches.epoch(0):
                if stopped := parts.cadence.interrupted():
                    break
                parts.task_calls.evaluation_sees(model, batch.data)
                for found, late in parts.retry.in_pieces(batch, lambda piece: sums_of(parts, model, piece)):
                    add_sums(sums, found, task)
                    items = items + late
                items = items + batch.counted_by(task)
            else:
                parts.task_calls.evaluation_ends(model)
    finally:
        model.train(training)
    answers = parts.parallel.gather(({name: total.shape for name, total in sums.items()}, stopped))
    if any(stopped for _, stopped in answers):
        return {}
    sums = {name: sums.get(name, torch.zeros(shape)) for name, shape in answers[0][0].items()}
    totals, (count,) = over_ranks(parts.parallel, sums, [float(items)])  # waits for the device
    metrics = {f"{split}/{name}": value for name, value in metrics_of(totals, count, task).items()}
    return metrics | {f"{split}/seconds": perf_counter() - started}


def sums_of(parts: Parts, model: nn.Module, batch: MicroBatch) -> tuple[dict[str, Tensor], Any]:
    """The sums of one batch of a validation, and its items as far as only its output says them."""
    with parts.precision.autocast():
        out = parts.task.step(model, batch.data)
    return flat_sums({"loss": out.loss_sum, **out.sums}, parts.task), parts.counting.late(out)
