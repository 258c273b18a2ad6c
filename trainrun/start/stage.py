"""Engines timed with the real step, on copies: nothing of the run takes part, so nothing of it changes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import nn

from trainrun.data.batch import map_leaves
from trainrun.data.contest import Alone, Reading, lead
from trainrun.data.own_random import own_generator
from trainrun.data.undecided import Candidate, Undecided
from trainrun.interfaces import Batches, MicroBatch
from trainrun.parts import Parts
from trainrun.start.trial import copy_obstacle, foreign_loop, stand_ins

LOOKS = 4  # batches of the first look
LOOK_SECONDS = 0.1  # for loading, and the same for the steps
LEAST_STEPS = 3  # however long: the first is far slower than the others, since kernels are chosen and built
LONGEST_STEPS = 0.5  # seconds, however few

Clock = Callable[[], float]


class Heard(NamedTuple):
    """What one rank tells the others. fault: why it cannot measure ("" if it can)."""

    alone: Alone
    elapsed: float
    fault: str


class Stage:
    """The copies that stand in for the model and the task, and the place in the data.

    Every measurement reads batches that none has read before, so that no engine finds them in the
    page cache that another filled. Where the run's stream has nothing to decide, none can be made.
    """

    def __init__(self, parts: Parts, clock: Clock = perf_counter) -> None:
        self.clock = clock
        self._parts, self._device = parts, parts.parallel.device
        self._looks: dict[int, Heard] = {}
        self._model: nn.Module | None = None
        self._task: Any = None
        self._first: Any = None
        self._epoch, self._position = 0, 0

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self._looks.clear()
        self._model = self._task = self._first = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def first_look(self, candidate: Candidate, started: float) -> Heard:
        """Load a few batches with nothing else to do, then train on them with nothing else to do.

        Once for each number of threads of an operation.
        """
        threads = torch.get_num_threads()
        if threads not in self._looks:
            self._looks[threads] = self._look(candidate)
        return self._looks[threads]._replace(elapsed=self.clock() - started)

    def _look(self, candidate: Candidate) -> Heard:
        fault, alone = obstacle(self._parts, self._stream), Alone(0.0, 0.0)
        if not fault:
            try:
                self._model, self._task = stand_ins(self._parts.model, self._parts.task)
                alone = self._alone(candidate)
            # A fault of the user's own, in any of their code: the run meets it again and reports it.
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Heard(alone, 0.0, fault)

    @property
    def _stream(self) -> Undecided:
        assert isinstance(self._parts.train, Undecided)
        return self._parts.train

    def measure(self, started: float, limit: float) -> Callable[[Candidate, int], Reading]:
        """For `contest`; the ranks give it the same answers."""

        def heard(candidate: Candidate, number: int) -> Reading:
            try:
                seconds = self._beside(candidate, number, started + limit)
            # An engine that cannot read this data, or not on this machine, loses: no run depends on it.
            except Exception:
                seconds = math.inf
            stopped = self._parts.cadence.stop_request() > 0
            elapsed = math.inf if stopped else self.clock() - started
            rows = self._parts.parallel.gather((seconds, elapsed))
            slowest = max(row[0] for row in rows)
            left = limit - max(row[1] for row in rows)
            return Reading(slowest if math.isfinite(slowest) else None, left)

        return heard

    def reads_the_same(self, name: str) -> bool:
        """Whether its first batch has the bits of the first that was read at all."""
        self._epoch = self._position = 0
        try:
            batch = next(self._batches(self._stream.stream(name)))
        except Exception:  # as in `measure`
            return False
        finally:
            self._stream.close()
        return same_bits(batch.data, self._first)

    def step_seconds(self) -> float:
        """One more step, on the first batch of the first look."""
        data = map_leaves(self._first, _cloned)
        begin = self.clock()
        self._step(data)
        return self._since(begin)

    def _alone(self, candidate: Candidate) -> Alone:
        stream = self._stream.stream(candidate.name)
        batches = self._batches(stream)
        try:
            begin, busy = self.clock(), process_time()
            kept = [next(batches).data]
            loads, load_busy = [self._since(begin)], process_time() - busy
            if loads[0] < LOOK_SECONDS:  # else the first must do, with all that comes only once
                loads = []
                for _ in range(candidate.number * self._stream.prefetch_factor):
                    next(batches)
                busy = process_time()
            while not loads or (len(loads) < LOOKS and sum(loads) < LOOK_SECONDS):
                begin = self.clock()
                kept.append(next(batches).data)
                loads.append(self._since(begin))
                load_busy = (process_time() - busy) / len(loads)
        finally:
            batches.close()
            stream.close()
        if self._first is None:  # a later look is not at the beginning of the data
            self._first = map_leaves(kept[0], _cloned)  # a model may write into its inputs
        steps, busies = self._steps_alone(kept)
        return Alone(sum(loads) / len(loads), min(steps), load_busy, min(busies))

    def _steps_alone(self, kept: list[Any]) -> tuple[list[float], list[float]]:
        """Seconds of each step, and of all cores in it."""
        steps: list[float] = []
        busies: list[float] = []
        while len(steps) < LEAST_STEPS or (len(steps) <= LOOKS and sum(steps) <= LOOK_SECONDS):
            begin, busy = self.clock(), process_time()
            self._step(kept[len(steps) % len(kept)])
            steps.append(self._since(begin))
            busies.append(process_time() - busy)
            if sum(steps) > LONGEST_STEPS:
                break
        return steps, busies

    def _beside(self, candidate: Candidate, number: int, deadline: float) -> float:
        """Seconds per batch with loading and training as in the run; infinite if time ran out."""
        stream = self._stream.stream(candidate.name)
        batches = self._batches(stream)
        try:
            ahead = self._stream.prefetch_factor
            for _ in range(candidate.number * ahead):  # what was made ready while nobody trained
                next(batches)
            for _ in range(lead(candidate, ahead)):
                self._step(next(batches).data)
            self._since(0.0)
            if self.clock() >= deadline:
                return math.inf
            done, begin = 0, self.clock()
            while done < number and (not done or self.clock() < deadline):
                self._step(next(batches).data)
                done += 1
            return self._since(begin) / done
        finally:
            batches.close()
            stream.close()

    def _batches(self, stream: Batches) -> Generator[MicroBatch, None, None]:
        """Batches without an end, from where the last measurement ended."""
        while True:
            with contextlib.closing(_closable(stream.epoch(self._epoch, self._position))) as inner:
                for batch in inner:
                    self._position += 1
                    if batch.last:
                        self._epoch, self._position = self._epoch + 1, 0
                    yield batch

    def _step(self, data: Any) -> None:
        """Forward and backward, without an update."""
        assert self._model is not None
        with self._parts.precision.autocast():
            out = self._task.step(self._model, data)
        out.loss_sum.backward()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _since(self, begin: float) -> float:
        """Seconds, once the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return self.clock() - begin


def obstacle(parts: Parts, stream: Undecided) -> str:
    """Why a trial could change the run or break it; "" if it cannot."""
    if foreign_loop(parts.config):
        return "loop is your own, so the step is not known"
    where = own_generator(stream.source)
    if where is not None:
        return f"data.train{where} draws random numbers of its own"
    return uncopied(parts)


def uncopied(parts: Parts) -> str:
    """Why model and task cannot have stand-ins; "" if they can."""
    return copy_obstacle(parts.model, parts.parallel.device)


def same_bits(left: Any, right: Any) -> bool:
    """Whether all tensors of two batches are equal, with not-a-number equal to itself."""
    pairs: tuple[list[Any], list[Any]] = [], []
    for data, leaves in zip((left, right), pairs, strict=True):
        map_leaves(data, leaves.append)
    if len(pairs[0]) != len(pairs[1]):
        return False
    tensors = [(a, b) for a, b in zip(*pairs, strict=True) if isinstance(a, torch.Tensor)]
    return all(isinstance(b, torch.Tensor) and _same(a, b) for a, b in tensors)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*bits)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _closable(batches: Iterator[MicroBatch]) -> Any:
    """As it is where it is a generator, else with a `close` that does nothing."""
    return batches if hasattr(batches, "close") else (batch for batch in batches)
