"""A run under test, from the inside: the real loop on the real parts, a few steps at each order."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Client
from pathlib import Path as FilePath
from typing import Any, Final

import psutil
import torch
from safetensors.torch import save_file

from trainrun import loop
from trainrun.build.data import loading_stages
from trainrun.errors import PluginError
from trainrun.interfaces import MicroBatch, StepReport, counts_before
from trainrun.lab.kept_state import KeptState
from trainrun.lab.limits import limits_of
from trainrun.lab.orders import (
    SAVING,
    WHOLE,
    Answer,
    Divide,
    Load,
    Measure,
    Order,
    Path,
    Profile,
    Save,
    Trace,
    Train,
    Turn,
    Validate,
)
from trainrun.lab.pacing import DueInBetween, FirstBatches, GoesOn, NeverDue, OnlySteps, Paced
from trainrun.lab.profile import profiled
from trainrun.lab.readers import cpu_seconds, resting
from trainrun.lab.ready import ready_of
from trainrun.lab.removals import CACHED, Ring, removed
from trainrun.ledger import ACCOUNTS, COMPILE, DATA
from trainrun.monitor.hardware import forget_peak
from trainrun.parts import Parts
from trainrun.state import SAVE_NOW, TrainState
from trainrun.summary.throughput_limits import ahead, settle

VALIDATION_SECONDS: Final = 3.0


class Driven:
    """The node `loop` of a run under test: it trains when it is told to. address, key: where the lab listens.
    folder: for files that are handed over."""

    def __init__(self, address: str, key: str, folder: str) -> None:
        self._address, self._key, self._folder = address, key, FilePath(folder)

    def __call__(self, parts: Parts, state: TrainState) -> TrainState:
        leads = parts.parallel.rank == 0
        gate = Client(self._address, authkey=bytes.fromhex(self._key)) if leads else None
        subject = Subject(parts, state, self._folder)
        try:
            if gate is not None:
                gate.send(ready_of(parts))
            while True:
                order = parts.parallel.gather(_heard(gate))[0]
                if order is None:
                    state.stop_reason = "the test is over"
                    return state
                answer = subject.obey(order)
                if parts.parallel.device.type == "cuda":
                    torch.cuda.empty_cache()  # while it stands still, the others have what only its steps need
                if gate is not None:
                    gate.send(answer)
        finally:
            subject.close()


def _heard(gate: Any) -> Order | None:
    """None if the lab is gone, and on the ranks that do not listen."""
    if gate is None:
        return None
    try:
        order: Order | None = gate.recv()
    except EOFError:
        return None
    return order


class Subject:
    """One rank of a run under test."""

    def __init__(self, parts: Parts, state: TrainState, folder: FilePath) -> None:
        self._own, self._folder = parts, folder
        self._stream = GoesOn(parts.train)
        self._parts = replace(parts, train=self._stream)
        self._ring = Ring(self._parts)
        self._state, self._kept = state, KeptState(parts)
        self._variants: dict[str, tuple[Parts, TrainState]] = {}
        self._ahead = -(-ahead(parts) // parts.config.trainer.accumulate_grad_batches)  # steps
        self._refilled = False  # whether readers had time to read ahead while nobody asked them
        self._schedule = copy.deepcopy(parts.schedule.state_dict())

    def obey(self, order: Order) -> Answer:
        match order:
            case Train():
                return self._train(order)
            case Trace():
                return self._trace(order.steps)
            case Load():
                return self._load(order)
            case Validate():
                return self._validate()
            case Save():
                return self._save()
            case Measure():
                return limits_of(self._own, self._parts.train)
            case Profile():
                return profiled(
                    lambda steps: self._run(self._parts, self._state, steps),
                    self._own.parallel.device,
                    self._folder / f"trace-{self._own.parallel.rank}.json.gz",
                )
            case Divide():
                own, state = self._own, self._state
                self._parts.train.close()
                return loading_stages(
                    own.config, own.parallel, own.train, state.epoch, state.batches, order.seconds
                )

    def close(self) -> None:
        self._ring.close()
        self._parts.train.close()

    def _train(self, order: Train) -> Turn:
        parts, state = self._variant(order.variant)
        self._rewind(parts, state)
        if order.again:
            self._kept.start_again()
        with nullcontext() if parts is self._parts else self._kept.without_trace():
            return self._train_from_here(order, parts, state)

    def _train_from_here(self, order: Train, parts: Parts, state: TrainState) -> Turn:
        if CACHED not in order.variant.split("+"):
            own = self._state
            state.epoch, state.batches = own.epoch, own.batches
            turn = self._turn(order, parts, state, max(order.warm, self._ahead * self._refilled))
            own.epoch, own.batches = state.epoch, state.batches  # one stream, which stays open
            self._refilled = False
            return turn
        self._fill_ring()
        workers = psutil.Process().children(recursive=True)
        self._refilled = not workers
        with resting(workers):
            return self._turn(order, parts, state, order.warm)

    def _fill_ring(self) -> None:
        """All ranks take as many windows, or they would go on with batches of different steps."""
        windows = self._windows()
        taken = self._ring.fill(windows)
        for _ in range(max(self._own.parallel.gather(taken)) - taken):
            next(windows)

    def _turn(self, order: Train, parts: Parts, state: TrainState, warm: int) -> Turn:
        ranks, loading = parts.parallel.world_size, ACCOUNTS[DATA]
        items_first, first = state.items, parts.ledger.read()
        forget_peak(parts.parallel.device)
        until = time.monotonic() + order.most_seconds if ranks == 1 else math.inf
        self._run(parts, state, warm, order.variant, until)
        step, items, spent, stream = state.step, state.items, parts.ledger.read(), self._stream
        positions, unmarked = stream.positions, stream.unmarked
        self._wait()
        began = time.perf_counter()
        self._run(parts, state, order.steps, order.variant, until)
        self._wait()
        seconds = time.perf_counter() - began
        now = parts.ledger.read()
        return Turn(
            seconds=seconds,
            steps=state.step - step,
            items=(state.items - items) * ranks,
            peak_bytes=self._peak_bytes(),
            accounts={name: value - spent.get(name, 0.0) for name, value in now.items()},
            compile_seconds=now.get(ACCOUNTS[COMPILE], 0.0),
            ahead_data_seconds=spent.get(loading, 0.0) - first.get(loading, 0.0),
            ahead_items=(items - items_first) * ranks,
            positions=(stream.positions - positions) * ranks if stream.unmarked == unmarked else 0.0,
        )

    def _variant(self, name: str) -> tuple[Parts, TrainState]:
        """Removals have a state of their own, so that the run goes on where it was but for the batches."""
        if name in ("", WHOLE, SAVING):
            return self._parts, self._state
        if name not in self._variants:
            state = copy.copy(self._state)
            state.losses = []
            self._variants[name] = removed(name, self._parts, self._ring), state
        return self._variants[name]

    def _run(
        self, parts: Parts, state: TrainState, steps: int, variant: str = "", until: float = math.inf
    ) -> None:
        """variant: WHOLE and SAVING bring what is due. until: see `Paced`."""
        if not steps:
            return
        paced: Any = (Paced if variant == WHOLE else OnlySteps)(parts.cadence, state, steps, until)
        checkpoints: Any = DueInBetween(parts.checkpoints) if variant in (WHOLE, SAVING) else NeverDue()
        loop.fit(replace(parts, cadence=paced, checkpoints=checkpoints), state)

    def _rewind(self, parts: Parts, state: TrainState) -> None:
        """A run that would be over goes on, with the learning rates of its beginning."""
        total = self._own.cadence.rhythm.total_steps
        if total is not None and state.step >= total:
            state.step = 0
            parts.schedule.load_state_dict(copy.deepcopy(self._schedule))

    def _trace(self, steps: int) -> Path:
        parts, state = self._parts, self._state
        before = {name: value.detach().clone() for name, value in parts.model.named_parameters()}
        losses: list[float] = []
        items: list[float] = []

        def seen(parts: Parts, window: list[MicroBatch], log: bool) -> StepReport:
            report = self._own.stepper(parts, window, log)
            total, count = parts.parallel.sum_over_ranks(
                [float(torch.stack(report.losses).sum()), float(report.items)]
            )
            losses.append(total / count if count else 0.0)
            items.append(count)
            return report

        self._run(replace(parts, stepper=seen), state, steps)
        changed = {
            name: (value.detach() - before[name]).float().cpu().contiguous()
            for name, value in parts.model.named_parameters()
        }
        file = self._folder / "update.safetensors"
        if parts.parallel.rank == 0:
            save_file(changed, file)
        return Path(tuple(losses), tuple(items), str(file))

    def _windows(self) -> Iterator[list[MicroBatch]]:
        """Read on where the training is; what is read here is not trained on."""
        state = self._state
        for window in loop.windows_from(self._parts, state):
            state.batches += len(window)
            if window[-1].last:
                state.epoch, state.batches = state.epoch + 1, 0
            yield window

    def _load(self, order: Load) -> Turn:
        if not counts_before(self._own.task):
            raise PluginError(
                f"task: {type(self._own.task).__name__} says its count with each output, so loading alone cannot be "
                "measured in items; add a method count(batch)"
            )
        windows, items = self._windows(), 0

        def read(number: int) -> None:
            nonlocal items
            for window in islice(windows, number):
                items += sum(batch.counted_by(self._own.task) for batch in window if batch.real)

        read(max(order.warm, ahead(self._own)))  # what was read ahead of the clock costs nothing any more
        items = 0
        self._wait()
        began, cpu = time.perf_counter(), cpu_seconds()
        read(order.batches)
        self._wait()
        seconds = time.perf_counter() - began
        return Turn(seconds, order.batches, items * self._own.parallel.world_size, cpu_seconds() - cpu)

    def _validate(self) -> Turn:
        assert self._own.val is not None
        few = FirstBatches(self._own.val, VALIDATION_SECONDS)
        turn = self._timed(lambda: loop.evaluate(replace(self._own, val=few), "val"))
        return replace(turn, seconds=turn.seconds * few.times_longer())

    def _save(self) -> Turn:
        self._run(self._parts, self._state, 1)  # what is saved already is not written again
        checkpoints, state = self._own.checkpoints, copy.copy(self._state)
        state.save_request, state.saved_step = SAVE_NOW, -1
        turn = self._timed(lambda: checkpoints.save(self._own, state))
        checkpoints.close()  # what goes on in the background is not waited for in a run
        return turn

    def _timed(self, work: Callable[[], object]) -> Turn:
        self._wait()
        forget_peak(self._own.parallel.device)
        began = time.perf_counter()
        work()
        self._wait()
        return Turn(time.perf_counter() - began, 0, 0.0, peak_bytes=self._peak_bytes())

    def _wait(self) -> None:
        settle(self._own.parallel.device)

    def _peak_bytes(self) -> int:
        device = self._own.parallel.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return self._kept.peak_without_it()
