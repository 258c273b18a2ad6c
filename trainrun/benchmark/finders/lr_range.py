"""`trainrun autotune lr`: a learning-rate range test. The rate grows in every step while the loss is recorded.

What: steps of the run itself, with its optimizer, parameter groups (whose rates keep their proportions), precision
    and ranks, in a separate process. When: a new model or batch size. When not: you want the best schedule. A sweep
    (`--multirun optimizer.lr=...`) trains to the end. Source: Smith 2017 (arXiv:1506.01186), section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainrun.benchmark.run_overrides import (
    compose_config,
    parse_command,
    progress_line,
    relative_path,
    write_results,
)
from trainrun.benchmark.worker_messages import RateLosses, RateRange
from trainrun.benchmark.worker_process import WorkerPool
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.output import say
from trainrun.scheduler.schedule import set_lr

if TYPE_CHECKING:
    from argparse import Namespace

    from trainrun.interfaces import MicroBatch, StepReport
    from trainrun.training.components import Components

DIVERGED = 4.0  # times the smallest mean so far of as many losses as are looked at: single ones are noise
FIRST = 5  # the fewest of these
WINDOW = 0.1  # of the steps, that are averaged
LEAST_FALL = 0.02  # of the first losses
LIMIT = 24 * 3600.0  # seconds
ROOM = 4.0  # below the rate of the smallest loss, where it is about to rise again


class LossDiverged(Exception):
    """The exception that ends a range test before its last step."""


class RateSweep:
    """The schedule and the step of a range test. The rate grows from `low` to `high` by the same factor in each
    step.
    """

    def __init__(self, run: Components, wanted: RateRange) -> None:
        self._groups = run.optimizer.param_groups
        self._peaks: list[float] = list(run.schedule.peak_lrs)
        self._step, self._wanted = run.step, wanted
        self.rates: dict[str, float] = {}
        self.found = RateLosses([], [], self._peaks, False)
        self._smallest = math.inf
        if not self._peaks[0] > 0:
            raise ConfigError(
                f"optimizer.lr={self._peaks[0]:g}: the other groups are in proportion to it; give 1e-3"
            )

    def step(self, *run_and_window: Any) -> StepReport | None:
        """Train one step. Do nothing if it is called without arguments, as a schedule is."""
        return self._train_step(*run_and_window) if run_and_window else None

    def end_epoch(self) -> None: ...

    def _train_step(self, run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        done, wanted = len(self.found.rates), self._wanted
        rate = wanted.low * (wanted.high / wanted.low) ** (done / max(wanted.steps - 1, 1))
        for group, peak in zip(self._groups, self._peaks, strict=True):
            set_lr(group, peak * rate / self._peaks[0])
        report = self._step(run, micro_batches)
        loss = mean_loss(run, report)
        self.found.rates.append(rate)
        self.found.losses.append(loss)
        many = max(FIRST, round(WINDOW * wanted.steps))
        newest = self.found.losses[-many:]
        if not math.isfinite(loss) or min(newest) > DIVERGED * max(self._smallest, 1e-12):
            raise LossDiverged
        if len(newest) == many:
            self._smallest = min(self._smallest, sum(newest) / many)
        return report


def mean_loss(run: Components, report: StepReport) -> float:
    """Return the mean loss over all ranks. The host waits for the device."""
    total, count = run.parallel.sum_over_ranks([sum(map(float, report.losses)), float(report.items)])
    return total / count if count else 0.0


@dataclass(frozen=True)
class Suggestion:
    """The result of a range test.

    rate: the proposed rate of the first group; None if the loss did not fall. smallest: the rate at which the
        smoothed loss is smallest.
    """

    rate: float | None
    smallest: float
    why: str
    averaged: list[float]


def suggest_rate(curve: RateLosses) -> Suggestion:
    """Return the learning rate where the smoothed loss falls fastest, at most a quarter of the rate at its minimum."""
    losses, rates = np.array(curve.losses), np.array(curve.rates)
    good = np.isfinite(losses)
    losses, rates = losses[good], rates[good]
    if len(losses) < 2 * FIRST:
        return Suggestion(None, math.nan, f"only {len(losses)} steps were finite; begin lower: --low", [])
    half = max(1, round(WINDOW * len(losses)) // 2)
    padded = np.pad(losses, half, mode="edge")
    averaged = np.convolve(padded, np.ones(2 * half + 1) / (2 * half + 1), mode="valid")
    lowest = int(averaged.argmin())
    if averaged[lowest] > (1 - LEAST_FALL) * averaged[0] or lowest < 2:
        return Suggestion(
            None, float(rates[lowest]), "the loss did not fall; look at the picture", averaged.tolist()
        )
    until = averaged[: lowest + 1]
    begin = int(np.flatnonzero(until >= np.median(until))[-1])  # before it, slopes are noise
    slopes = np.gradient(averaged, np.log(rates))[begin : lowest + 1]
    steepest, bound = float(rates[begin + int(slopes.argmin())]), float(rates[lowest]) / ROOM
    why = (
        "where the loss falls fastest"
        if steepest <= bound
        else f"a quarter of {rates[lowest]:.2g}, its minimum"
    )
    return Suggestion(min(steepest, bound), float(rates[lowest]), why, averaged.tolist())


def main(wish: Namespace, words: list[str]) -> int:
    if not 0 < wish.low < wish.high or not math.isfinite(wish.high) or wish.steps < 4 * FIRST:
        raise ConfigError(
            f"autotune lr: --low {wish.low:g} --high {wish.high:g} --steps {wish.steps}: must be rates above 0, low "
            f"below high, and at least {4 * FIRST} steps"
        )
    typed, folder = parse_command("autotune-lr", words)
    config = compose_config(typed)
    with WorkerPool() as pool, progress_line() as progress:
        progress("range test", 60.0)
        curve: RateLosses = pool.start(config).request(
            RateRange(wish.low, wish.high, wish.steps), limit=LIMIT
        )
    advice = suggest_rate(curve)
    typed_lr = (config.optimizer or {}).get("lr")
    scale = typed_lr / curve.peaks[0] if isinstance(typed_lr, float | int) and typed_lr > 0 else 1.0
    ending = "diverged" if curve.diverged else "ended"
    say(f"range test: {len(curve.rates)} of {wish.steps} steps, {ending} at {curve.rates[-1]:.2g}")
    if advice.rate is None:
        say(f"no suggestion: {advice.why}")
    else:
        groups = (config.optimizer or {}).get("groups") or []
        others = len(set(curve.peaks)) > 1 or any("lr" in group for group in groups)
        others_text = (
            f"; all other rates times {advice.rate / curve.peaks[0]:.2g}, as in the test" if others else ""
        )
        say(f"suggestion: optimizer.lr={advice.rate * scale:.1e}{others_text} ({advice.why}; the loss is smallest at "
            f"{advice.smallest:.2g}); with warmup and decay this is the peak")  # fmt: skip
    write_results(folder, typed, {
        "rates": curve.rates, "losses": curve.losses, "diverged": curve.diverged, "suggestion": advice.rate,
        "why": advice.why, "peaks": curve.peaks,
        "suggestions": advice.rate and [advice.rate * peak / curve.peaks[0] for peak in curve.peaks],
    })  # fmt: skip
    picture = draw_lr_range_test(curve, advice, folder / "lr.png")
    say(f"details: {relative_path(folder / 'autotune.json')}, {picture.name}")
    return EXIT_DONE


def draw_lr_range_test(curve: RateLosses, advice: Suggestion, path: Path) -> Path:
    from trainrun.plots import canvas

    figure, (ax,) = canvas.build_panels("Learning rate range test", 1, height=3.4)
    ax.plot(curve.rates, curve.losses, color=canvas.TRAIN, alpha=0.3, linewidth=1, label="loss")
    ax.plot(
        curve.rates[: len(advice.averaged)],
        advice.averaged,
        color=canvas.TRAIN,
        linewidth=1.8,
        label="averaged",
    )
    if advice.rate is not None:
        ax.axvline(advice.rate, color=canvas.BEST, linestyle="--", label=f"suggestion {advice.rate:.1e}")
    ax.set_xscale("log")
    finite = [loss for loss in curve.losses if math.isfinite(loss)]
    if finite:
        low, high = min(finite), max(finite[: 2 * FIRST] or finite)
        ax.set_ylim(low - 0.1 * (high - low) - 1e-9, high + 0.5 * (high - low) + 1e-9)
    ax.set_xlabel("learning rate of the first group")
    ax.set_ylabel("train/loss")
    canvas.show_legend(ax)
    return canvas.save_figure(figure, path)
