"""Train a racer with the usual loop, and evaluate it on all validation data at fixed numbers of samples.

The racer's own validations stay as they are, and their time counts. The time of the judge's evaluations does not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainrun.assemble.data_pipeline import build_sources, open_split
from trainrun.benchmark.snapshot import peak_rss
from trainrun.config.schema import RunConfig, replace_values
from trainrun.data.engines.stream import OpenedStream
from trainrun.errors import ConfigError
from trainrun.interfaces import Batches
from trainrun.runtime.machine import wait_for_device
from trainrun.timing.phases import MEASURING
from trainrun.train_state import TrainState
from trainrun.training import loop
from trainrun.training.components import Components
from trainrun.training.evaluate import evaluate
from trainrun.training.triggers import STOP_INTERRUPT, Due

NUM_LOOKS = 20  # of a training, where nobody says how many samples lie between two of them
TOO_LATE = "the race: too late"


class JudgedLoop:
    """The node `loop` of a racer.

    file: receives a row from rank 0 for each evaluation. metric: such as `val/acc`. every: samples between two
        evaluations; None for a twentieth of the training. target, mode: the value that the metric must reach.
        limits: seconds of training, and with the start of its process, after which a run is stopped. began: the
        start of the process, as `time.time()`. reads: settings of `data` with which the judge reads the validation
        data, those of the first racer.
    """

    def __init__(
        self, file: str, metric: str, mode: str, every: int | None = None, target: float | None = None,
        limits: Mapping[str, float] | None = None, began: float = 0.0, reads: Mapping[str, Any] = {},
    ) -> None:  # fmt: skip
        self._file, self._metric, self._mode = Path(file), metric, mode
        self._every, self._target, self._reads = every, target, dict(reads)
        self._limits, self._process_began = limits, began

    def __call__(self, run: Components, state: TrainState) -> TrainState:
        every = self._every or default_interval(run)
        judge = Judge(run, self._file, self._metric, every, use_whole_validation(run.config, self._reads))
        if self._target is not None:
            start = time.time() - self._process_began
            judge.wait_for(self._target, self._mode, training_limit(self._limits, start))
        try:
            judged: Any = JudgedTriggers(run.triggers, judge)
            state = loop.fit(replace(run, triggers=judged), state)
            if state.stop_request < STOP_INTERRUPT and (judge.looked_at != state.step or run.hooks.by_key):
                judge.evaluate_if_due(state)  # hooks may change the weights at the end
            return state
        finally:
            judge.close()


class JudgedTriggers:
    """A wrapper of the triggers of a run: after each step the judge may evaluate the run, or end it."""

    def __init__(self, triggers: Any, judge: Judge) -> None:
        self._triggers, self._judge = triggers, judge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._triggers, name)

    def after_step(self, state: TrainState) -> Due:
        due: Due = self._triggers.after_step(state)
        if self._judge.is_due(state):
            self._judge.evaluate_if_due(state)
        if self._judge.is_too_late and not due.stop:
            state.stop_reason = TOO_LATE
            return Due(False, True, due.log)
        return due


class Judge:
    """Evaluates a run on all of its validation data, and writes the seconds of training until then.

    config: of the run, with the settings with which the judge reads the validation data.
    """

    def __init__(self, run: Components, file: Path, metric: str, every: int, config: RunConfig) -> None:
        self._run, self._file, self._metric, self._every = run, file, metric, every
        self._leads = run.parallel.rank == 0
        self._began, self._away = time.perf_counter(), 0.0
        self.looked_at = 0  # the step of the newest evaluation
        self._intervals_done = 0
        self._better, self._limit = -math.inf, math.inf
        self._sign, self._has_arrived = 1, True
        self.is_too_late = False
        self._write({"began": time.time(), "every": every})
        self._own: Batches | None = None
        self._split = metric.rpartition("/")[0]
        validation = self._open_validation(config)
        self._components = replace(run, validation=validation, test=None)
        self._away = time.perf_counter() - self._began

    def wait_for(self, target: float, mode: str, most_seconds: float) -> None:
        """Set the target, and the seconds of training after which a run that has not reached it is stopped."""
        self._sign = 1 if mode == "max" else -1
        self._better, self._limit, self._has_arrived = self._sign * target, most_seconds, False

    def _open_validation(self, config: RunConfig) -> dict[str, Batches]:
        """Return the validation set of the metric, opened again if the run reads a part of it or in another way."""
        run, split = self._run, self._split
        stream = run.validation.get(split)
        if stream is not None and config == run.config:
            return {split: stream}
        source = stream.source if isinstance(stream, OpenedStream) else None
        if source is None and stream is None:
            source = build_sources(config, [])[0].get(split)
        opened = None
        if source is not None:
            opened = open_split(config, run.parallel, split, source, [], lambda text: None)
        if opened is None:
            names = ", ".join(run.validation) or "none"
            raise ConfigError(f"--until {self._metric}: no such validation set; there are {names}")
        self._own = opened
        return {split: opened}

    def is_due(self, state: TrainState) -> bool:
        intervals = count_samples(self._run, state) // self._every
        return state.step > self.looked_at and intervals > self._intervals_done

    def evaluate_if_due(self, state: TrainState) -> None:
        """Evaluate the current weights with the clock stopped. Raise ConfigError if the metric does not exist."""
        run = self._run
        wait_for_device(run.parallel.device)
        paused = time.perf_counter()
        seconds = paused - self._began - self._away
        samples = count_samples(run, state)
        self.looked_at, self._intervals_done = state.step, int(samples // self._every)
        peak = peak_memory(run)
        with run.phases.measure(MEASURING):
            metrics = evaluate(self._components, self._split)
        value = metrics.get(self._metric)
        if metrics and value is None:
            names = ", ".join(name for name in metrics if not name.endswith("/seconds"))
            raise ConfigError(f"--until {self._metric}: no such metric; there are {names}")
        if value is not None:
            row = {"samples": samples, "step": state.step, "seconds": seconds, "value": value}
            self._write({**row, "peak_bytes": peak})
            self._has_arrived = self._has_arrived or self._sign * value >= self._better
        late = not self._has_arrived and seconds > self._limit
        self.is_too_late = bool(run.parallel.gather(late)[0])
        if self.is_too_late:
            self._write({"late": True})
        self._away += time.perf_counter() - paused

    def _write(self, row: dict[str, Any]) -> None:
        if self._leads:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


def training_limit(limits: Mapping[str, float] | None, start: float) -> float:
    """Return the seconds of training after which a run is late by both limits, or infinity without limits.

    limits: seconds `with_start` of the process, and of `training` alone. start: seconds that the start took. Times are
    compared with the start and without. A run beyond one limit alone can still arrive in time for the other comparison.
    """
    if limits is None:
        return math.inf
    return max(limits["training"], limits["with_start"] - start)


def use_whole_validation(config: RunConfig, reads: Mapping[str, Any]) -> RunConfig:
    """Return the config with all validation data. reads: how the first racer reads it."""
    limit = config.trainer.limit_val_batches
    whole = limit if isinstance(limit, float) and limit == 1.0 else 1.0
    return replace_values(config, {"trainer.limit_val_batches": whole, **reads})


def count_samples(run: Components, state: TrainState) -> float:
    """Return the number of training samples so far, over all ranks; an estimate if batches have different sizes."""
    lengths, num_samples = run.triggers.rhythm.lengths, run.train.num_samples
    if lengths.steps_per_epoch is not None and num_samples is not None and state.step > 0:
        return lengths.measure_position(state, "epoch")[1] * num_samples
    return state.step * count_step_samples(run)


def count_step_samples(run: Components) -> int:
    config = run.config
    return config.data.batch_size * config.trainer.accumulate_grad_batches * run.parallel.world_size


def default_interval(run: Components) -> int:
    """Return a twentieth of the samples of the training. Raise ConfigError if its length is not known."""
    rhythm = run.triggers.rhythm
    if rhythm.total_steps is None:
        raise ConfigError("--every: the length of this training is not known; give a number of samples")
    samples = rhythm.total_steps * count_step_samples(run)
    if rhythm.steps_per_epoch is not None and run.train.num_samples is not None:
        samples = round(rhythm.total_steps / rhythm.steps_per_epoch * run.train.num_samples)
    return max(samples // NUM_LOOKS, 1)


def peak_memory(run: Components) -> int:
    """Return the peak memory of this rank in bytes: of its GPU, or of its process."""
    device = run.parallel.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss()
