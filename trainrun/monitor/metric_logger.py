"""Turn device tensors into rows of plain numbers for all monitors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter, time
from typing import Any, Protocol

import torch
from torch import Tensor

from trainrun.errors import PluginError
from trainrun.interfaces import Monitor, Parallel, RunFacts, StepReport, Summarizes
from trainrun.monitor.rank_times import RankTimes
from trainrun.sums import (
    ITEMS,
    LOSSES,
    add_by_name,
    compute_train_metrics,
    describe_changed_shape,
    sum_all_ranks,
)
from trainrun.timing.phases import CHECKPOINT, DEVICE, PhaseTimer
from trainrun.train_state import TrainState

ZERO = torch.zeros((), dtype=torch.float64)


class TokenSource(Protocol):
    """A counter of the non-padding tokens in this rank's batches. counts: False if all sequences have one length."""

    counts: bool

    def take(self) -> float:
        """Return the number of tokens since the previous call."""


class MetricLogger:
    """The logger of training and validation metrics. Every rank has one, because sums are over all ranks; rank 0 has
    monitors.

    logs: False if nothing is logged; then losses are dropped at once and never read.
    on_position: called with the step after every step; may take a few hundred nanoseconds (a progress bar).
    on_log: called at each log point after its row was written.
    unit: what an item is, `samples` or `tokens`. samples_per_step: samples of a full step over all ranks, None if
        this varies. If a task counts more items than these, its speed is reported in items.
    tokens: counts tokens for a task whose items are samples.
    learning_rates: returns the rates of the coming update, for steps whose report has none.
    tidy: called on every rank at the end of each log point (False) and of each validation (True).
    phases: the timer to which the wait for a GPU is added. task: computes metrics from its sums.
    why_nan: returns the likely cause of a non-finite validation loss, which is printed once.
    write: writes a row of another kind, on rank 0.

    A training row has the means since the previous row; a validation row has the means since the previous
    validation. An unscheduled validation (at the time limit) leaves all sums unchanged, so that a resumed run writes
    the same rows as an uninterrupted one.
    """

    def __init__(
        self, parallel: Parallel, monitors: Sequence[Monitor], learning_rates: Callable[[], dict[str, float]],
        steps_per_epoch: int | None, accumulate: int, logs: bool, on_position: Callable[[int], None] | None,
        on_log: Callable[[int], None] | None, unit: str, samples_per_step: int | None,
        tidy: Callable[[bool], None] | None, tokens: TokenSource, phases: PhaseTimer, task: Any,
        why_nan: Callable[[], str] | None, write: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:  # fmt: skip
        self._parallel, self._monitors, self._learning_rates = parallel, monitors, learning_rates
        self._steps_per_epoch, self._accumulate, self._logs = steps_per_epoch, accumulate, logs
        self._on_position, self._on_log, self._tidy = on_position, on_log, tidy
        self._task, self._why_nan, self._write, self.speed_name = task, why_nan, write, f"{unit}_per_second"
        self._samples_per_step = samples_per_step if unit == "samples" else None
        self._summarizes = isinstance(task, Summarizes)
        self._phases = phases
        self._rank_times = RankTimes(phases, parallel) if parallel.world_size > 1 else None
        self._saved_seconds = 0.0
        # On a CPU nothing is waited for: adding up the losses is logging.
        self._book = phases.measure if parallel.device.type != "cpu" else nullcontext
        self._tokens = tokens if unit != "tokens" else None
        self._seen_tokens = self._seen_items = 0.0
        self._mark, self._marked_step, self._marked_items = perf_counter(), 0, 0.0
        self._elsewhere = 0.0
        self.step = 0
        self.validated: tuple[int, int | None] = (
            0,
            None,
        )  # batches of the validation at hand, and all of them

    def on_start(self, facts: RunFacts, state: TrainState) -> None:
        facts = replace(facts, seconds_before=state.seconds, epochs_before=self.compute_epoch(state))
        self._mark, self._marked_step, self._marked_items = perf_counter(), state.step, state.items
        self.step, self._saved_seconds = state.step, self._phases.read_seconds(CHECKPOINT)
        if self._tokens is not None:
            self._tokens.take()  # batches were tried before
        if self._rank_times is not None:
            self._rank_times.start(state.step)
        for monitor in self._monitors:
            monitor.on_start(facts, state.step)

    def on_batch(self, state: TrainState, report: StepReport) -> None:
        """Add the sums of a step without waiting for the device. Called in every step."""
        self.step = state.step
        if not self._logs:
            state.losses.clear()
        elif report.sums and not report.grad.skipped:
            self._add_sums(state, report)
        if self._on_position is not None:
            self._on_position(state.step)

    def on_validation_batch(self, number: int, total: int | None) -> None:
        """Store the position in a validation. number: the batch, counted from 1. Called for every batch."""
        self.validated = number, total

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write a row of training metrics at a log point. This is the only point where the host waits for the
        device.
        """
        only_skipped = not state.losses and not state.logged
        if only_skipped:  # the loss of such a step says why, and is part of no other mean
            state.losses, state.logged_items = list(report.losses), report.items
        new_tokens = self._tokens.take() if self._tokens is not None else 0.0
        sums, (tokens,) = self._read_sums(state, [new_tokens])
        row = self._train_metrics(add_by_name(state.logged, sums))
        if not only_skipped:
            state.since_validation = add_by_name(state.since_validation, sums)
        state.logged = {}
        self._reset_sums(state)
        row |= report.grad.learning_rates or self._learning_rates()
        if report.grad.norm is not None:
            row["grad_norm"] = float(report.grad.norm)
        if state.skipped_steps:
            row["skipped_steps"] = float(state.skipped_steps)
        row |= self._measure_speed(state, tokens)
        for monitor in self._monitors:
            monitor.on_step(state.step, self.compute_epoch(state), row)
        if self._rank_times is not None:
            times, note = self._rank_times.measure(state.step)
            self.write_row("ranks", state.step, times)
            if note:
                self.note(note)
        if self._on_log is not None:
            with self.exclude_time():
                self._on_log(state.step)
        if self._tidy is not None:
            self._tidy(False)

    def _add_sums(self, state: TrainState, report: StepReport) -> None:
        """Add the sums of a step on the device. Raise PluginError if a sum has another shape than before.

        For a task with `summarize` the sum of the loss is added too.
        """
        sums = report.sums
        if self._summarizes:
            sums = {**sums, "loss": torch.stack(report.losses).sum()}
        for name, value in sums.items():
            before = state.sums.get(name)
            if before is not None and before.shape != value.shape:
                raise PluginError(describe_changed_shape(self._task, name, value, before))
            state.sums[name] = value if before is None else before.add_(value)
            state.sum_items[name] = state.sum_items.get(name, 0) + report.items

    def _read_sums(self, state: TrainState, numbers: list[float]) -> tuple[dict[str, Tensor], list[float]]:
        """Return the losses and sums on the device, and further numbers, each summed over all ranks."""
        with self._book(DEVICE):
            losses = torch.stack(state.losses).to("cpu", torch.float64).sum() if state.losses else ZERO
        counts = {**state.sum_items, LOSSES: state.logged_items}
        items = {
            ITEMS + name: torch.scalar_tensor(float(count), dtype=torch.float64)  # in a sixth of the time
            for name, count in counts.items()
        }
        return sum_all_ranks(self._parallel, {**state.sums, LOSSES: losses, **items}, numbers)

    def _train_metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return {f"train/{name}": value for name, value in compute_train_metrics(sums, self._task).items()}

    def _reset_sums(self, state: TrainState) -> None:
        """Reset the losses and sums that are on the device."""
        state.losses.clear()
        state.sums.clear()
        state.sum_items.clear()
        state.logged_items = 0

    def _measure_speed(self, state: TrainState, tokens: float) -> dict[str, float]:
        now = perf_counter()
        saving = self._phases.read_seconds(CHECKPOINT)
        self._elsewhere += saving - self._saved_seconds
        self._saved_seconds = saving
        seconds, steps = now - self._mark - self._elsewhere, state.step - self._marked_step
        items = (state.items - self._marked_items) * self._parallel.world_size
        self._mark, self._marked_step, self._marked_items, self._elsewhere = now, state.step, state.items, 0.0
        if self._samples_per_step is not None and items > steps * self._samples_per_step:
            self.speed_name = "items_per_second"
        self._seen_tokens, self._seen_items = self._seen_tokens + tokens, self._seen_items + items
        speeds = {
            self.speed_name: _compute_mean(items, seconds),
            "step_seconds": _compute_mean(seconds, steps),
        }
        counts = self._tokens is not None and self._tokens.counts
        return speeds | ({"tokens_per_second": _compute_mean(tokens, seconds)} if counts else {})

    def speeds(self, items_per_second: float) -> dict[str, float]:
        """Return the run's speed in items per second, and in tokens per second if tokens are counted."""
        rates = {self.speed_name: items_per_second}
        if not self._seen_tokens:
            return rates
        return rates | {"tokens_per_second": items_per_second * self._seen_tokens / self._seen_items}

    def on_eval(self, state: TrainState, metrics: Mapping[str, float], scheduled: bool = True) -> None:
        """Write a row after a validation and exclude its seconds from the training time. scheduled: whether it was
        due.
        """
        self._elsewhere += sum(value for name, value in metrics.items() if name.endswith("/seconds"))
        row = {**self._metrics_since_validation(state, scheduled), **metrics}
        for monitor in self._monitors:
            monitor.on_eval(state.step, self.compute_epoch(state), row)
        losses = ((name, value) for name, value in metrics.items() if name.endswith("/loss"))
        named, loss = next(losses, ("", 0.0))  # of the first validation set
        if self._why_nan is not None and self._monitors and not math.isfinite(loss):
            with self.exclude_time():
                self.note(f"step {state.step}: {named} is {loss}, which is never the best: {self._why_nan()}")
            self._why_nan = None
        if self._tidy is not None:
            self._tidy(True)

    def _metrics_since_validation(self, state: TrainState, scheduled: bool) -> dict[str, float]:
        """Return the training metrics of all steps since the last scheduled validation."""
        if not self._logs:
            return {}
        sums, _ = self._read_sums(state, [])
        metrics = self._train_metrics(add_by_name(state.since_validation, sums))
        if scheduled:
            state.logged, state.since_validation = add_by_name(state.logged, sums), {}
            self._reset_sums(state)
        return metrics

    @contextmanager
    def exclude_time(self) -> Iterator[None]:
        """Exclude the time of the block from the training time."""
        started = perf_counter()
        try:
            yield
        finally:
            self._elsewhere += perf_counter() - started

    def write_row(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a row of another kind on rank 0. Values are numbers, texts, lists and mappings."""
        if self._write is not None:
            self._write({"kind": kind, "step": step, "time": time(), **values})

    def note(self, text: str) -> None:
        for monitor in self._monitors:
            monitor.on_note(text)

    def compute_epoch(self, state: TrainState) -> float:
        """Return the finished epochs, plus the fraction of the current one if the length of an epoch is known."""
        if not self._steps_per_epoch:
            return float(state.epoch)
        return state.epoch + math.ceil(state.batches / self._accumulate) / self._steps_per_epoch


def _compute_mean(total: float | Tensor, count: float) -> float:
    return float(total) / count if count else math.nan
