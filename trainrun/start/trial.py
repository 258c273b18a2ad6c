"""Forward and backward of copies of model and task, timed before the run: nothing of the run takes part.

A step that takes long is timed on a few samples of the batch: what is compared there (number types, kernels)
grows with the samples.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from trainrun.config import RunConfig
from trainrun.data.batch import map_leaves
from trainrun.data.choice import free_bytes
from trainrun.data.pieces import num_rows, rows_of, tensors_in
from trainrun.mishaps.retry import batch_norm_in, no_memory
from trainrun.precision.guarded import build_context

LONG_STEP_FLOP = 5e10  # of the fewest samples: a second on a core
LARGE_MODEL = 2**31  # bytes; a host takes half a second to copy them
LEAST_ROUNDS = 2  # after one that warms up, or there is no time to measure
ROUNDS = 6  # wanted: a busy machine disturbs some
MOST_ROUNDS = 20
SAME = 1.1  # of the fastest: the usual choice stays
AGAIN = 2  # further steps, where too long a one decides that few samples are timed
DISTURBED = 4.0  # times as long as wanted: one that is longer is long by itself

Clock = Callable[[], float]
Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Size:
    """few: the fewest samples that can be timed. rows: how many are, of `count`, and their seconds."""

    few: int
    rows: int
    count: int
    seconds: float

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of a step with the whole batch."""
        return self.seconds * self.count / self.rows


class Trial:
    """dtype, everywhere: what autocast computes in; None is the type of the weights."""

    def __init__(self, model: nn.Module, task: Any, data: Any, device: torch.device,
                 clock: Clock = perf_counter) -> None:  # fmt: skip
        self.model, self._task = stand_ins(model, task)
        self._data, self._device, self._clock = data, device, clock
        self._count = num_rows(data)

    def size(self, most_seconds: float, dtype: torch.dtype | None) -> Size | None:
        """As many samples as take so long, or the fewest; None if even those take too long to be timed at all."""
        few = min(2 if batch_norm_in(self.model) else 1, self._count)
        if (
            self._device.type == "cuda"
        ):  # every other number of samples would cost cuDNN's search for kernels again
            few = self._count
        if self._flop(few) > LONG_STEP_FLOP and self._device.type == "cpu":
            return None
        rows, seconds = few, self._again(few, dtype, most_seconds if few < self._count else 0.0)
        while rows < self._count and 2 * seconds <= most_seconds:  # more than once: short steps hardly grow
            rows = min(self._count, int(rows * most_seconds / seconds))
            seconds = self._again(rows, dtype, most_seconds if rows < self._count else 0.0)
        return Size(few, rows, self._count, seconds)

    def step(self, rows: int, dtype: torch.dtype | None) -> float:
        """Seconds of forward and backward."""
        data = map_leaves(rows_of(self._data, 0, rows, self._count), _cloned)  # a model may write into it
        began = self._now()
        try:
            with build_context(dtype, self._device):
                out = self._task.step(self.model, data)
            out.loss_sum.backward()
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None
        return self._now() - began

    def timed(self, work: Callable[[], None]) -> float:
        began = self._now()
        work()
        return self._now() - began

    def _again(self, rows: int, dtype: torch.dtype | None, most_seconds: float) -> float:
        """Time a second step, since kernels are chosen and built in the first.

        It is timed again if it took more than half of `most_seconds` and may only have been disturbed.
        """
        self.step(rows, dtype)
        found = self.step(rows, dtype)
        for _ in range(AGAIN):
            if not 0.5 * most_seconds < found < DISTURBED * most_seconds:
                break
            found = min(found, self.step(rows, dtype))
        return found

    def _flop(self, rows: int) -> float:
        """At least, of dense layers: of samples, or of tokens where the inputs are some."""
        inputs = tensors_in(self._data)[0]
        tokens = 1 if inputs.is_floating_point() else math.prod(inputs.shape[1:2])
        return 6.0 * sum(parameter.numel() for parameter in self.model.parameters()) * rows * tokens

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return self._clock()


def foreign_loop(config: RunConfig) -> bool:
    """Whether a loop of the user's own decides what a step is; that of a run under test takes the usual ones."""
    return bool(config.loop) and not str(config.loop.get("_target_")).startswith("trainrun.lab.")


def share_of(limit: float, number: int, rounds: int = ROUNDS) -> float:
    """How long each of so many works may take, for so many rounds in all."""
    return limit / (number * (rounds + 1))


def too_long(seconds: float, limit: float, number: int) -> bool:
    """Whether so many works of so many seconds cannot be compared within the limit."""
    return seconds > share_of(limit, number, LEAST_ROUNDS)


def heard_times(works: dict[str, Callable[[], float]], limit: float, gather: Gather) -> dict[str, float]:
    """What all ranks measured, as `fastest_times`."""
    return agreed_times(fastest_times(works, limit), gather)


def fastest_times(works: dict[str, Callable[[], float]], limit: float) -> dict[str, float]:
    """Each one's fastest time, taken in turns after one that warms up; empty if `limit` seconds are too few.

    One that memory does not suffice for is infinitely slow.
    """
    found = {name: [seconds_of(work)] for name, work in works.items()}
    fitting = {name for name, (first,) in found.items() if first < math.inf}
    if not fitting or sum(found[name].pop() for name in fitting) > limit:
        return {}
    spent, rounds = 0.0, 0
    while fitting and (rounds < LEAST_ROUNDS or (spent < limit and rounds < MOST_ROUNDS)):
        for name in [name for name in works if name in fitting]:
            seconds = seconds_of(works[name])
            if seconds == math.inf:
                fitting.remove(name)
                found[name] = [seconds]
            else:
                found[name].append(seconds)
                spent += seconds
        rounds += 1
    return {name: min(found[name]) for name in works} if fitting else {}


def seconds_of(work: Callable[[], float]) -> float:
    """Infinite if memory does not suffice; what the work held of it is free again, then."""
    try:
        return work()
    except (MemoryError, RuntimeError) as error:
        if not no_memory(error):
            raise
    gc.collect()
    torch.cuda.empty_cache()  # nothing happens where no GPU is in use
    return math.inf


def agreed_times(times: dict[str, float], gather: Gather) -> dict[str, float]:
    """Return the times of the slowest rank for each; empty if a rank has none, or nothing fits on all ranks."""
    rows = gather(times)
    if not all(rows):
        return {}
    slowest = {name: max(row[name] for row in rows) for name in times}
    return slowest if min(slowest.values()) < math.inf else {}


def best_of(times: dict[str, float], usual: str) -> str:
    """The fastest; the usual one where it is nearly as fast."""
    best = min(times.values())
    return usual if times.get(usual, math.inf) <= SAME * best else min(times, key=lambda name: times[name])


def verdict(times: dict[str, float], usual: str) -> tuple[str, str, str]:
    """What `best_of` says, `1.23 ms` of that one, and `flash: 2.5 ms, math: 3 ms` of the others."""
    chosen = best_of(times, usual)
    shown = {
        name: f"{1e3 * seconds:.3g} ms" if seconds < math.inf else "does not fit into memory"
        for name, seconds in times.items()
    }
    return (
        chosen,
        shown[chosen],
        ", ".join(f"{name}: {text}" for name, text in shown.items() if name != chosen),
    )


def copy_obstacle(model: nn.Module, device: torch.device) -> str:
    """Why the model cannot be copied for a trial; "" if it can."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        return "the model has layers whose shape is not known yet"
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > LARGE_MODEL and device.type == "cpu":
        return "copying the model would take too long"
    return "the model fills the memory" if 4 * size > free_bytes(device) else ""


def stand_ins(model: nn.Module, task: Any) -> tuple[nn.Module, Any]:
    """Copies of model and task, sharing what those share. A compiled model's copy is not compiled."""
    model, task = copy.deepcopy((model, task))
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.eval()  # or it would wait for the other ranks in every forward
    return model, task


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
