"""CUDA graphs: the whole step is recorded once and replayed, without a launch of each of its kernels.

what: of each shape of full batch; batches are copied to where the recorded kernels read. The order of the
    operations, and so their rounding, is that of the step that was recorded.
when: on a GPU, small networks, whose steps wait for the host to launch kernels.
when not: a CPU (refused), steps of large kernels; models that ask for a value on the host, and optimizers that
    count on the host (refused: what the host does is not recorded).
source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
gain: not measured, and not yet run on a real GPU; tests/pretended_gpu records and replays it on a CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from trainrun.errors import PluginError, TrainrunError
from trainrun.seeding import kept_random_state
from trainrun.step.body import compiling
from trainrun.step.graphs import Function
from trainrun.training.recovery.oom import no_memory

AHEAD = 4  # recorded steps that the host may be ahead of the device; beyond, batches would fill its memory
WARM_UP = 3  # what cuBLAS and others allocate at their first calls must lie outside the graph

Run = Callable[[], list[Tensor]]
Recorder = Callable[[Run], tuple[Callable[[], object], list[Tensor]]]  # how to replay, and its outputs


class OnCuda:
    """Warms up on a side stream, then records.

    All graphs share one pool of memory: none has anything in it that is wanted once another is replayed.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._queue = Queue(torch.cuda.Event)

    def __call__(self, run: Run) -> tuple[Callable[[], object], list[Tensor]]:
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Threads that pin the next batches meanwhile would break a capture of the usual kind, and it them.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        self._pool = graph.pool()

        def replay() -> None:
            graph.replay()
            self._queue.note()

        return replay, outputs


class Queue:
    """The steps that the device was given and may not have done. event: makes one as `torch.cuda.Event`."""

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event, self._waiting = event, deque[Any]()

    def note(self) -> None:
        """One step more; waits for the one AHEAD steps before it, which a busy device has done by then."""
        self._waiting.append(self._event())
        self._waiting[-1].record()
        if len(self._waiting) > AHEAD:
            self._waiting.popleft().synchronize()


def captured(function: Function, inputs: list[Tensor], num_held: int, record: Recorder) -> Function:
    """The recorded function. inputs: the first `num_held` are changed in place, the others read.

    The warm-up really trains, so weights and random numbers are put back after it.
    PluginError: it cannot be recorded.
    """
    held, fed = inputs[:num_held], [tensor.clone() for tensor in inputs[num_held:]]
    if len({tensor.device for tensor in inputs}) > 1:
        raise PluginError(
            "trainer.cuda_graphs=true: the model or the optimizer keeps a tensor on the host (a count of steps, for "
            "instance), which a recorded step would never change; use trainer.cuda_graphs=false"
        )
    places = [tensor.data_ptr() for tensor in held]
    kept = [tensor.clone() for tensor in held]

    def run() -> list[Tensor]:
        with compiling():
            return function(*held, *fed)

    with torch.no_grad(), kept_random_state():
        replay, outputs = recorded(record, run)
        for tensor, before in zip(held, kept, strict=True):
            tensor.copy_(before)
    known = tuple(held)

    def call(*given: Tensor) -> list[Tensor]:
        nonlocal known
        if not all(map(is_, known, given)):  # made again, over the same memory
            known = given[:num_held]
            now = [tensor.data_ptr() for tensor in known]
            assert now == places, "a tensor that a recorded step changes lies elsewhere now"
        for tensor, new in zip(fed, given[num_held:], strict=True):
            tensor.copy_(new, non_blocking=True)
        replay()
        return [output.clone() for output in outputs]  # the next replay writes into the same memory

    return call


def recorded(record: Recorder, run: Run) -> tuple[Callable[[], object], list[Tensor]]:
    try:
        return record(run)
    except TrainrunError:
        raise
    except RuntimeError as error:  # of CUDA, or of the user's code in it: there are many
        if no_memory(error):
            raise
        first = error.__context__ or error  # the end of a recording that failed fails too
        text = " ".join(str(first).split())[:300]
        raise PluginError(
            f"trainer.cuda_graphs=true: model, loss and optimizer cannot be recorded ({text}); use "
            "trainer.cuda_graphs=false"
        ) from error
