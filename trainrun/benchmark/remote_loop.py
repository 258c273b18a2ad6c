"""The training loop of a run under measurement: the real loop with the real components, a few steps for each
message.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from multiprocessing.connection import Client
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import psutil
import torch

from trainrun.benchmark.diagnose.ablations import CACHED, CachedBatches, apply_ablations
from trainrun.benchmark.diagnose.profile import profile_steps
from trainrun.benchmark.finders.lr_range import LossDiverged, RateSweep
from trainrun.benchmark.pacing import FirstBatches, OpenStream, PacedCheckpoints, PacedTriggers
from trainrun.benchmark.snapshot import StateSnapshot
from trainrun.benchmark.worker_messages import (
    KEEPING,
    SAVING,
    VALIDATING,
    Load,
    Message,
    Profile,
    RateLosses,
    RateRange,
    Reply,
    RunInfo,
    Save,
    Train,
    Turn,
    Validate,
)
from trainrun.data.engines.iterable import count_most_readers
from trainrun.data.engines.stream import OpenedStream
from trainrun.data.map_style import is_thread_safe
from trainrun.errors import TrainingError
from trainrun.interfaces import MicroBatch
from trainrun.runtime.machine import wait_for_device
from trainrun.step.whole import describe_task_obstacle
from trainrun.summary.throughput_limits import num_batches_ahead
from trainrun.timing.phases import ACCOUNTS, COMPILE
from trainrun.train_state import SAVE_NOW, TrainState
from trainrun.training import loop
from trainrun.training.components import Components
from trainrun.training.evaluate import evaluate

VALIDATION_SECONDS: Final = 3.0
MOST_KEPT: Final = 12  # batches


class RemoteLoop:
    """The `loop` of a run under measurement. It trains only when it receives a request.

    address: the socket of the command, in a folder of the same user. folder: for files that are sent to the
        command.
    """

    def __init__(self, address: str, folder: str) -> None:
        self._address, self._folder = address, Path(folder)

    def __call__(self, run: Components, state: TrainState) -> TrainState:
        leads = run.parallel.rank == 0
        connection: Any = Client(self._address) if leads else None
        worker = Worker(run, state, self._folder)
        try:
            if leads:
                connection.send(describe_run(run))
            while True:
                message = None
                with contextlib.suppress(EOFError):  # the command is gone
                    message = connection.recv() if leads else None
                message = run.parallel.gather(message)[0]
                if message is None:
                    state.stop_reason = "the measurement is over"
                    return state
                reply = worker.reply(message)
                if run.parallel.device.type == "cuda":
                    torch.cuda.empty_cache()  # a stopped run leaves the others the memory that only its steps need
                if leads:
                    connection.send(reply)
        finally:
            worker.close()


def describe_run(run: Components) -> RunInfo:
    """Return facts about the run before its first step."""
    config, device, train = run.config, run.parallel.device, run.train
    opened = train if isinstance(train, OpenedStream) else None
    intervals = run.triggers.rhythm
    val, val_every = intervals.val, None
    if val is not None and val.unit == "step":
        val_every = val.amount
    elif val is not None and val.unit == "epoch" and intervals.steps_per_epoch is not None:
        epochs = max(val.amount, intervals.every_n_epoch if val.amount >= 1 else 0)
        val_every = intervals.steps_per_epoch * epochs
    on_gpu = device.type == "cuda"
    return RunInfo(
        unit=run.monitors.speed_name.removesuffix("_per_second"),
        engine=opened.read_by.engine if opened is not None else "",
        number=opened.read_by.number if opened is not None else 0,
        num_threads=torch.get_num_threads(),
        device=str(device),
        world_size=run.parallel.world_size,
        total_steps=intervals.total_steps,
        val_every=val_every,
        layers=tuple(sorted({type(module).__name__ for module in run.model.modules()})),
        memory_bytes=torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total,
        precision=config.precision.mode,
        thread_safe=opened is not None and is_thread_safe(opened.source),
        reads_ahead=num_batches_ahead(run) > 0,
        most_readers=None if opened is None else count_most_readers(opened.source, run.parallel.world_size),
        one_graph=not describe_task_obstacle(run.task, run.task_calls.informed),
    )


class Worker:
    """One rank of a run under measurement."""

    def __init__(self, run: Components, state: TrainState, folder: Path) -> None:
        self._own, self._state, self._folder = run, state, folder
        self._stream = OpenStream(run.train)
        self._components = replace(run, train=self._stream)
        self._cached, self._snapshot = CachedBatches(self._stream), StateSnapshot(run)
        self._variants: dict[str, tuple[Components, TrainState]] = {}
        self._steps_ahead = -(-num_batches_ahead(run) // run.config.trainer.accumulate_grad_batches)
        self._refilled = False  # readers had time to read ahead while nobody asked them
        self._first_schedule = copy.deepcopy(run.schedule.state_dict())
        self._device = run.parallel.device

    def reply(self, message: Message) -> Reply:
        match message:
            case Train():
                return self._train(message)
            case Load():
                return self._measure_loading(message)
            case Validate():
                return self._measure_validation()
            case Save():
                return self._measure_checkpoint()
            case RateRange():
                return self._rate_range(message)
            case Profile():
                file = self._folder / f"trace-{self._own.parallel.rank}.json.gz"
                return profile_steps(
                    lambda steps: self._run(self._components, self._state, steps), self._device, file
                )

    def close(self) -> None:
        self._stream.close()

    def _train(self, message: Train) -> Turn:
        run, state = self._build_variant(message.variant)
        self._allow_more_steps(run, state)
        if message.restart:
            self._snapshot.restart()
        if CACHED in message.variant.split("+"):
            return self._train_cached(message, run, state)
        loop_state = self._state
        state.epoch, state.batches = loop_state.epoch, loop_state.batches
        turn = self._measure_turn(message, run, state, max(message.warm, self._steps_ahead * self._refilled))
        loop_state.epoch, loop_state.batches = state.epoch, state.batches  # one stream, which stays open
        self._refilled = False
        return turn

    def _train_cached(self, message: Train, run: Components, state: TrainState) -> Turn:
        workers = psutil.Process().children(recursive=True)
        self._refilled = not workers
        with suspend_workers(workers):
            return self._measure_turn(message, run, state, message.warm)

    def _measure_turn(self, message: Train, run: Components, state: TrainState, warm: int) -> Turn:
        ranks = run.parallel.world_size
        until = time.monotonic() + message.most_seconds if ranks == 1 else math.inf
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._run(run, state, warm, message.variant, until)
        if message.variant == KEEPING:
            self._stream.keep(MOST_KEPT)
        step, items, spent = state.step, state.items, run.phases.read()
        self._stream.take_positions()
        wait_for_device(self._device)
        began = time.perf_counter()
        step_ends = self._run(run, state, message.steps, message.variant, until)
        wait_for_device(self._device)
        seconds, now = time.perf_counter() - began, run.phases.read()
        self._stream.keeps = False
        positions, real_positions = self._stream.take_positions()
        return Turn(
            seconds=seconds,
            steps=state.step - step,
            items=(state.items - items) * ranks,
            positions=positions,
            real_positions=real_positions,
            peak_bytes=self._snapshot.peak_bytes(self._device),
            phases={name: value - spent.get(name, 0.0) for name, value in now.items()},
            compile_seconds=now.get(ACCOUNTS[COMPILE], 0.0),
            step_deviation=relative_deviation([began, *step_ends]),
        )

    def _build_variant(self, name: str) -> tuple[Components, TrainState]:
        """Return components and state of a variant. An ablation has its own state, so that the run itself is not
        changed.
        """
        if not set(name.split("+")) - {"", VALIDATING, SAVING, KEEPING}:
            return self._components, self._state
        if name not in self._variants:
            state = copy.copy(self._state)
            state.losses, state.sums, state.sum_items = [], {}, {}
            self._variants[name] = apply_ablations(name, self._components, self._cached), state
        return self._variants[name]

    def _run(
        self, run: Components, state: TrainState, steps: int, variant: str = "", until: float = math.inf
    ) -> list[float]:
        """Train for some steps. Return the time at the end of each."""
        if not steps:
            return []
        parts = variant.split("+")
        triggers: Any = PacedTriggers(run.triggers, state, steps, VALIDATING in parts, until)
        checkpoints: Any = PacedCheckpoints(run.checkpoints, SAVING in parts)
        loop.fit(replace(run, triggers=triggers, checkpoints=checkpoints), state)
        step_ends: list[float] = triggers.step_ends
        return step_ends

    def _allow_more_steps(self, run: Components, state: TrainState) -> None:
        """Let a run that has reached its end continue, with the learning rates of its beginning."""
        total = self._own.triggers.rhythm.total_steps
        if total is not None and state.step >= total:
            state.step = 0
            run.schedule.load_state_dict(copy.deepcopy(self._first_schedule))

    def _rate_range(self, message: RateRange) -> RateLosses:
        sweep: Any = RateSweep(self._components, message)
        run = replace(self._components, step=sweep.step, schedule=sweep)
        self._snapshot.restart()
        try:
            self._run(run, self._state, message.steps)
        except (
            LossDiverged,
            TrainingError,
        ):  # the second: of its own guard against numbers that are not finite
            sweep.found.diverged = True
        finally:
            self._snapshot.restore()
        losses: RateLosses = sweep.found
        return losses

    def _iterate_windows(self) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of the next steps. They are read for measurements and never trained on."""
        state = self._state
        for window in loop.iterate_windows(self._components, state):
            state.batches += len(window)
            if window[-1].last:
                state.epoch, state.batches = state.epoch + 1, 0
            yield window

    def _measure_loading(self, message: Load) -> Turn:
        windows = self._iterate_windows()
        for _ in islice(windows, max(message.warm, num_batches_ahead(self._own))):
            pass  # what was read ahead costs nothing any more
        wait_for_device(self._device)
        began, busy = time.perf_counter(), busy_seconds()
        for _ in islice(windows, message.steps):
            pass
        wait_for_device(self._device)
        seconds = time.perf_counter() - began
        return Turn(seconds, message.steps, 0.0, busy_seconds() - busy)

    def _measure_validation(self) -> Turn:
        assert self._own.val is not None
        few = FirstBatches(self._own.val, VALIDATION_SECONDS)
        turn = self._measure_call(lambda: evaluate(replace(self._own, validation={"val": few}), "val"))
        return replace(turn, seconds=turn.seconds * few.extrapolation_factor())

    def _measure_checkpoint(self) -> Turn:
        self._run(self._components, self._state, 1)  # a step that is saved already is not written again
        checkpoints, state = self._own.checkpoints, copy.copy(self._state)
        state.save_request, state.saved_step = SAVE_NOW, -1
        turn = self._measure_call(lambda: checkpoints.save(self._own, state))
        checkpoints.close()  # a run does not wait for what is written in the background
        return turn

    def _measure_call(self, work: Callable[[], object]) -> Turn:
        wait_for_device(self._device)
        began = time.perf_counter()
        work()
        wait_for_device(self._device)
        return Turn(time.perf_counter() - began, 0, 0.0)


def relative_deviation(times: Sequence[float]) -> float:
    """Return the standard deviation of the differences of successive times, divided by their mean."""
    differences = [end - begin for begin, end in pairwise(times)]
    return stdev(differences) / fmean(differences) if len(differences) > 1 else 0.0


@contextlib.contextmanager
def suspend_workers(workers: list[psutil.Process]) -> Iterator[None]:
    """Stop loader workers inside the block, so that they do not read ahead for the next turn."""
    try:
        for worker in workers:
            with contextlib.suppress(psutil.Error):
                worker.suspend()
        yield
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.Error):
                worker.resume()


def busy_seconds() -> float:
    """Return the seconds in which this process and its loader workers computed, or waited for a free core."""
    me = psutil.Process()
    return sum(read_busy_seconds(process) for process in (me, *me.children(recursive=True)))


def read_busy_seconds(process: psutil.Process, folder: Path = Path("/proc")) -> float:
    """Return the busy seconds of the threads of a process. Waits are missing if the system does not count them."""
    with contextlib.suppress(OSError):  # a thread has just ended
        files = [*(folder / str(process.pid) / "task").glob("*/schedstat")]
        counts = [file.read_text(encoding="ascii").split() for file in files]
        if counts:  # nanoseconds on a core and in the queue for one: Documentation/scheduler/sched-stats.rst
            return sum(int(on_core) + int(in_queue) for on_core, in_queue, _ in counts) / 1e9
    with contextlib.suppress(psutil.Error):
        spent = process.cpu_times()
        return float(spent.user + spent.system)
    return 0.0
