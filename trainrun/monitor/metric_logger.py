"""From device tensors to rows of plain numbers, for all monitors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter, time
from typing import Any, Protocol

import torch
from torch import Tensor

from trainrun.interfaces import Monitor, Parallel, RunFacts, StepReport, Summarizes
from trainrun.sums import metrics_of, over_ranks
from trainrun.timing.phases import DEVICE, PhaseTimer
from trainrun.training.state import TrainState


class CountsTokens(Protocol):
    """Useful tokens of this rank's training batches. counts: False if no length differs."""

    counts: bool

    def take(self) -> float:
        """Since the last call."""


class MetricLogger:
    """Exists on every rank, since sums are taken over all of them; only rank 0 has monitors.

    logs: False if nothing is logged: then losses are forgotten at once and nothing is ever read.
    on_position: told the step after every step, a few hundred nanoseconds at most (a progress bar).
    on_log: called at each log point after the row was handed on (plots drawn while the run goes on).
    unit: what an item is, `samples` or `tokens`. tokens: counts them for a task whose items are samples.
    tidy: called at the end of each log point (False) and of each validation (True), on every rank.
    phases: where the wait for a GPU is booked. task: what makes metrics of its sums.
    why_nan: finds the likely cause of a validation loss that is not finite, which is said once.
    write: takes a row of another kind, on rank 0.
    """

    def __init__(
        self, parallel: Parallel, monitors: Sequence[Monitor], learning_rates: Callable[[], dict[str, float]],
        steps_per_epoch: int | None, accumulate: int, logs: bool, on_position: Callable[[int], None] | None,
        on_log: Callable[[int], None] | None, unit: str, tidy: Callable[[bool], None] | None,
        tokens: CountsTokens, phases: PhaseTimer, task: Any, why_nan: Callable[[], str] | None,
        write: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:  # fmt: skip
        self._parallel, self._monitors, self._learning_rates = parallel, monitors, learning_rates
        self._steps_per_epoch, self._accumulate, self._logs = steps_per_epoch, accumulate, logs
        self._on_position, self._on_log, self._tidy = on_position, on_log, tidy
        self._task, self._why_nan, self._write, self.speed_name = task, why_nan, write, f"{unit}_per_second"
        # On a CPU nothing is waited for: adding up the losses is logging.
        self._book = phases.on if parallel.device.type != "cpu" else nullcontext
        self._tokens = tokens if unit != "tokens" else None
        self._seen_tokens = self._seen_items = 0.0
        self._mark, self._marked_step, self._marked_items = perf_counter(), 0, 0.0
        self._elsewhere = 0.0
        self.step = 0

    def on_start(self, facts: RunFacts, state: TrainState) -> None:
        self._mark, self._marked_step, self._marked_items = perf_counter(), state.step, state.items
        self.step = state.step
        if self._tokens is not None:
            self._tokens.take()  # batches were tried before
        for monitor in self._monitors:
            monitor.on_start(facts, state.step)

    def on_batch(self, state: TrainState, report: StepReport) -> None:
        """Every step, on the host only."""
        self.step = state.step
        if not self._logs:
            state.losses.clear()
        if self._on_position is not None:
            self._on_position(state.step)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """A log point: the one place where the host waits for the device."""
        losses, items = (state.losses, state.logged_items) if state.losses else (report.losses, report.items)
        with self._book(DEVICE):
            total = torch.stack(losses or [torch.tensor(math.nan)]).to("cpu", torch.float64).sum().item()
        new_tokens = self._tokens.take() if self._tokens is not None else 0.0
        values = [total, float(items), float(report.items), new_tokens]
        sums, numbers = over_ranks(self._parallel, self._sums_of(report), values)
        loss_total, logged_items, step_items, tokens = numbers
        metrics = {"loss": math.nan} | metrics_of(sums, step_items, self._task) if sums else {}
        row = {f"train/{name}": value for name, value in metrics.items()}
        row["train/loss"] = _ratio(loss_total, logged_items)
        row |= self._learning_rates()
        if report.grad.norm is not None:
            row["grad_norm"] = float(report.grad.norm)
        if state.skipped_steps:
            row["skipped_steps"] = float(state.skipped_steps)
        row |= self._speed(state, tokens)
        state.losses.clear()
        state.logged_items = 0
        for monitor in self._monitors:
            monitor.on_step(state.step, self.epoch_of(state), row)
        if self._on_log is not None:
            with self.paused():
                self._on_log(state.step)
        if self._tidy is not None:
            self._tidy(False)

    def _sums_of(self, report: StepReport) -> dict[str, Tensor]:
        """Those of the task, and for one that summarizes them the loss too."""
        summarizes = isinstance(self._task, Summarizes) and report.sums
        return report.sums | ({"loss": torch.stack(report.losses).sum()} if summarizes else {})

    def _speed(self, state: TrainState, tokens: float) -> dict[str, float]:
        now = perf_counter()
        seconds, steps = now - self._mark - self._elsewhere, state.step - self._marked_step
        items = (state.items - self._marked_items) * self._parallel.world_size
        self._mark, self._marked_step, self._marked_items, self._elsewhere = now, state.step, state.items, 0.0
        self._seen_tokens, self._seen_items = self._seen_tokens + tokens, self._seen_items + items
        speeds = {self.speed_name: _ratio(items, seconds), "step_seconds": _ratio(seconds, steps)}
        counts = self._tokens is not None and self._tokens.counts
        return speeds | ({"tokens_per_second": _ratio(tokens, seconds)} if counts else {})

    def speeds(self, items_per_second: float) -> dict[str, float]:
        """Return the whole run's speed in items and, once a log point has counted them, in useful tokens."""
        found = {self.speed_name: items_per_second}
        if not self._seen_tokens:
            return found
        return found | {"tokens_per_second": items_per_second * self._seen_tokens / self._seen_items}

    def on_eval(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """After a validation; its time does not count as training time."""
        self._elsewhere += sum(value for name, value in metrics.items() if name.endswith("/seconds"))
        for monitor in self._monitors:
            monitor.on_eval(state.step, self.epoch_of(state), metrics)
        losses = ((name, value) for name, value in metrics.items() if name.endswith("/loss"))
        named, loss = next(losses, ("", 0.0))  # of the first validation set
        if self._why_nan is not None and self._monitors and not math.isfinite(loss):
            with self.paused():
                self.note(f"step {state.step}: {named} is {loss}, which is never the best: {self._why_nan()}")
            self._why_nan = None
        if self._tidy is not None:
            self._tidy(True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training, and its time does not count as such."""
        started = perf_counter()
        try:
            yield
        finally:
            self._elsewhere += perf_counter() - started

    def write_row(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A row of a kind of its own: numbers, texts, lists and mappings."""
        if self._write is not None:
            self._write({"kind": kind, "step": step, "time": time(), **values})

    def note(self, text: str) -> None:
        for monitor in self._monitors:
            monitor.on_note(text)

    def epoch_of(self, state: TrainState) -> float:
        """Finished epochs, with the fraction of the current one where its length is known."""
        if not self._steps_per_epoch:
            return float(state.epoch)
        return state.epoch + math.ceil(state.batches / self._accumulate) / self._steps_per_epoch


def _ratio(total: float | Tensor, count: float) -> float:
    return float(total) / count if count else math.nan
