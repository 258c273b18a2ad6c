"""CUDA graphs: the whole step is recorded once and replayed, without a launch of each of its kernels.

what: of each shape of full batch; batches are copied to where the recorded kernels read. The order of the
    operations, and so their rounding, is that of the step that was recorded.
when: on a GPU, small networks, whose steps wait for the host to launch kernels.
when not: a CPU (refused), steps of large kernels, models that ask for a value on the host.
source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
gain: not measured, and not yet run on a GPU; on a CPU its buffers are tested with a stand-in for the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainrun.randomness import kept_random_state
from trainrun.step.body import compiling
from trainrun.step.graphs import Function

WARM_UP = 3  # what cuBLAS and others allocate at their first calls must lie outside the graph

Run = Callable[[], list[Tensor]]
Recorder = Callable[[Run], tuple[Callable[[], object], list[Tensor]]]  # how to replay, and its outputs


def on_cuda(run: Run) -> tuple[Callable[[], object], list[Tensor]]:
    """Warms up on a side stream, then records."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph.replay, outputs


def captured(function: Function, inputs: list[Tensor], num_held: int, record: Recorder = on_cuda) -> Function:
    """The recorded function. inputs: the first `num_held` are changed in place, the others read.

    The warm-up really trains, so weights and random numbers are put back after it.
    """
    held, fed = inputs[:num_held], [tensor.clone() for tensor in inputs[num_held:]]
    places = [tensor.data_ptr() for tensor in held]
    kept = [tensor.clone() for tensor in held]

    def run() -> list[Tensor]:
        with compiling():
            return function(*held, *fed)

    with torch.no_grad(), kept_random_state():
        replay, outputs = record(run)
        for tensor, before in zip(held, kept, strict=True):
            tensor.copy_(before)

    def call(*given: Tensor) -> list[Tensor]:
        now = [tensor.data_ptr() for tensor in given[:num_held]]
        assert now == places, "a tensor that a recorded step changes lies elsewhere now"
        for tensor, new in zip(fed, given[num_held:], strict=True):
            tensor.copy_(new, non_blocking=True)
        replay()
        return [output.clone() for output in outputs]  # the next replay writes into the same memory

    return call
