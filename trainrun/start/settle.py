"""What is measured before the rest is built, because the rest depends on it: number type and attention kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import nn

from trainrun.config import RunConfig
from trainrun.data.own_random import own_generator
from trainrun.data.undecided import Undecided
from trainrun.interfaces import Batches, Parallel
from trainrun.precision.amp import AUTOCAST_TYPES, emulates_bfloat16
from trainrun.randomness import kept_random_state
from trainrun.start.attention_kernel import chosen_kernel, set_kernel, undecided_layers
from trainrun.start.budget import ATTENTION, FEW_BATCHES, PRECISION
from trainrun.start.number_type import TYPES, faster_type, type_by_rule
from trainrun.start.trial import Clock, Size, Trial, copy_obstacle, foreign_loop, share_of
from trainrun.words.checks import parse_seconds

Chosen = dict[str, str]  # what RUN.json holds: `precision`, `attention`


def chosen_before(identity: dict[str, Any]) -> Chosen:
    """identity: what RUN.json holds."""
    return {key: identity[key] for key in ("precision", "attention") if key in identity}


def settled(config: RunConfig, model: nn.Module, task: Any, train: Batches, parallel: Parallel,
            chosen: Chosen, measure: bool, num_batches: float, notes: list[str],
            clock: Clock = perf_counter) -> RunConfig:  # fmt: skip
    """The config with `precision=auto` decided; the model with its attention kernel set.

    chosen: what the run began with, if it did; what is chosen here is added. num_batches: of the whole run.
    Every rank calls it, and decides the same.
    """
    layers = undecided_layers(model)
    free_type = config.precision.mode == "auto"
    wanted = (free_type and "precision" not in chosen, bool(layers) and "attention" not in chosen)
    if wanted[0] and emulates_bfloat16(parallel.device):
        wanted = (False, wanted[1])  # by rule: a type without hardware is never taken
    if measure and any(wanted):
        with kept_random_state(), without_search():
            Settling(config, model, task, train, parallel, num_batches, clock).decide(chosen, wanted, notes)
    if free_type and "precision" not in chosen:
        mode, why = type_by_rule(model, config.data.batch_size, parallel.device)
        chosen["precision"] = mode
        notes.append(f"precision: {mode}, not measured: {why}")
    if layers:
        set_kernel(layers, chosen.setdefault("attention", "auto"))  # the rule, also when the run goes on
    if not free_type:
        return config
    return dataclasses.replace(
        config, precision=dataclasses.replace(config.precision, mode=chosen["precision"])
    )


@contextlib.contextmanager
def without_search() -> Iterator[None]:
    """`trainer.benchmark` is for shapes that come again: in a trial cuDNN's search takes longer than all that is
    timed."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Settling:
    """One trial for both: how fast a step is decides how long they may take."""

    def __init__(self, config: RunConfig, model: nn.Module, task: Any, train: Batches, parallel: Parallel,
                 num_batches: float, clock: Clock) -> None:  # fmt: skip
        self._clock = clock
        self._config, self._model, self._task, self._train = config, model, task, train
        self._parallel, self._num_batches = parallel, num_batches
        self._device, self._gather = parallel.device, parallel.gather

    def decide(self, chosen: Chosen, wanted: tuple[bool, bool], notes: list[str]) -> None:
        if self._num_batches < FEW_BATCHES or any(self._gather(self._obstacle())):
            return
        trial: Trial | None = None
        size: Size | None = None
        # A fault of the user's own, in any of their code: the run meets it again and reports it.
        with contextlib.suppress(Exception), first_batch(self._train) as data:
            trial = Trial(self._model, self._task, data, self._device, self._clock)
            size = trial.size(share_of(PRECISION.seconds, len(TYPES)), self._usual_type())
        sizes = self._gather(size)
        if trial is None or size is None or not all(sizes):
            return
        size = max(sizes, key=lambda each: each.step_seconds)  # the slowest rank's
        run_seconds = self._run_seconds(size.step_seconds)
        modes = TYPES if wanted[0] else {self._usual_mode(): self._usual_type()}
        layers = undecided_layers(trial.model)
        kernels = dict.fromkeys(modes, (chosen.get("attention", "auto"), ""))
        if wanted[1]:
            kernels = self._kernels(trial, layers, size, modes, ATTENTION.of(run_seconds))
        mode = chosen.get("precision", self._usual_mode())
        if wanted[0]:
            found, told = faster_type(
                trial,
                size,
                PRECISION.of(run_seconds),
                self._usual_mode(),
                lambda mode: set_kernel(layers, kernels[mode][0]),
                self._gather,
            )
            if found:
                mode = chosen["precision"] = found
                notes.append(f"precision: {mode}, {told}")
        if wanted[1]:
            chosen["attention"], line = kernels[mode]
            notes += [line] if line else []

    def _kernels(self, trial: Trial, layers: list[Any], size: Size, modes: dict[str, torch.dtype | None],
                 limit: float) -> dict[str, tuple[str, str]]:  # fmt: skip
        """By mode: the kernel, and a line about it."""
        limit /= len(modes)
        return {
            mode: chosen_kernel(trial, layers, size, dtype, limit, self._device, self._gather)
            for mode, dtype in modes.items()
        }

    def _usual_mode(self) -> str:
        mode = self._config.precision.mode
        if mode != "auto":
            return mode
        return type_by_rule(self._model, self._config.data.batch_size, self._device)[0]

    def _usual_type(self) -> torch.dtype | None:
        return AUTOCAST_TYPES.get(self._usual_mode())

    def _run_seconds(self, step_seconds: float) -> float:
        longest = parse_seconds(self._config.trainer.max_time)
        return min(self._num_batches * step_seconds, math.inf if longest is None else longest)

    def _obstacle(self) -> str:
        """Why a trial could change the run, or would measure something else; "" if it is fair."""
        trainer, data = self._config.trainer, self._config.data
        if (
            trainer.deterministic
            or trainer.compile.scope != "off"
            or trainer.gradient_checkpointing != "none"
        ):
            return "another cost"
        if foreign_loop(self._config) or trainer.cpu_offload != "none" or trainer.activation_offload:
            return "another step"
        if not isinstance(self._train, Undecided) and data.num_workers not in ("auto", 0):
            return "workers would have to start"
        source = self._train.source if isinstance(self._train, Undecided) else None
        if own_generator(source) is not None:
            return "the data draws random numbers of its own"
        return copy_obstacle(self._model, self._device)


@contextlib.contextmanager
def first_batch(train: Batches) -> Iterator[Any]:
    """As the simplest engine reads it; whatever was opened for it is closed."""
    stream = train.stream(train.candidates[0].name) if isinstance(train, Undecided) else train
    batches = stream.epoch(0)
    try:
        yield next(batches).data
    finally:
        getattr(batches, "close", lambda: None)()
        stream.close()
