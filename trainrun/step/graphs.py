"""Turn a function of tensors into one graph: check that tracing is safe, trace, compile, and record CUDA graphs."""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainrun.errors import PluginError, TrainrunError
from trainrun.runtime.held_state import format_attributes, list_changed_names
from trainrun.seeding import restore_random_state
from trainrun.training.checks.unsaved_state import collect_saved_ids
from trainrun.training.components import Components
from trainrun.training.recovery.oom import describe_out_of_memory
from trainrun.training.without_trace import TrialNotPossible, restore_state

Function = Callable[..., list[Tensor]]
Run = Callable[[], list[Tensor]]
Recorder = Callable[[Run], tuple[Callable[[], object], list[Tensor]]]  # how to replay, and its outputs

PLAIN = (bool, int, float, str, type(None))
AHEAD = 4  # recorded steps that the host may be ahead of the device; beyond, batches would fill its memory
WARM_UP = 3  # what cuBLAS and others allocate at their first calls must lie outside the graph


def run_rehearsal(run: Components, batch: Any) -> None:
    """Run forward and loss twice without lasting effects. The first pass also runs the task's checks of its first
    batch.

    A trace keeps only the path of the one pass that it recorded. A counter in an attribute, or a choice by a random
    number of Python or NumPy, would be frozen without notice. Raise PluginError for both.
    """

    def run_forward() -> tuple[Any, Any, dict[str, Any]]:
        with run.precision.autocast():
            run.task.step(run.model, batch)
        numpy = sys.modules.get("numpy.random")
        draws = random.getstate(), repr(numpy.get_state(legacy=False)["state"]) if numpy else None
        attributes = {
            f"{name}.{key}".lstrip("."): value
            for name, module in run.model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, PLAIN)
        }
        return draws, format_attributes(run.task, collect_saved_ids(run.model)), attributes

    try:
        with torch.no_grad(), restore_state((run.model,), run.parallel.device):
            draws, outputs, attributes = run_forward()
            draws_now, kept_now, attributes_now = run_forward()
    except TrialNotPossible as error:
        raise PluginError(
            f"trainer.compile.scope=step: {error}, so two trial steps cannot be taken back; "
            "use trainer.compile.scope=model"
        ) from error
    owner, fault = type(run.model).__name__, ""
    if draws != draws_now:
        fault = "draws from Python's or NumPy's random numbers"
    if moved := [name for name in attributes if attributes_now.get(name) != attributes[name]]:
        fault = f"changes its Python attribute {moved[0]}"
    if moved := list_changed_names(outputs, kept_now):
        owner, fault = type(run.task).__name__, f"changes its attribute {moved[0]}"
    if fault:
        raise PluginError(
            f"trainer.compile.scope=step: {owner} {fault} during training, but a graph keeps the first value; keep it "
            "in a tensor (register_buffer), or use trainer.compile.scope=model"
        )


def compile_graph(function: Function, inputs: list[Tensor], backend: str, mode: str | None) -> Function:
    """Trace and compile one graph for exactly these shapes and strides. Nothing is computed.

    Raise PluginError if the function needs a value on the host, or an operation that no graph can hold.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad():
            graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
            return lower_graph(graph, inputs, backend, mode)
    except TrainrunError:
        raise
    except Exception as error:  # of torch's tracer, or of the user's code under it: there are many
        text = " ".join(str(error).split())[:300]
        raise PluginError(
            f"trainer.compile.scope=step: model and loss do not become one graph "
            f"({type(error).__name__}: {text}); use trainer.compile.scope=model, or off"
        ) from error


def lower_graph(
    graph: torch.fx.GraphModule, inputs: list[Tensor], backend: str, mode: str | None
) -> Function:
    """Return a traced graph as a callable of one of torch's backends."""
    if backend != "inductor":
        import torch._dynamo

        build: Any = torch._dynamo.lookup_backend(backend)
        other: Function = build(graph, inputs)
        return other
    import torch._inductor

    on_cpu = all(tensor.device.type == "cpu" for tensor in inputs)
    options: dict[str, Any] = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    options |= {"size_asserts": False, "alignment_asserts": False}  # shapes and strides choose the graph
    # Inductor's CUDA graphs hold nothing that changes in place; ours do, see `captured`.
    options["triton.cudagraphs"] = False
    if (mode or "").startswith("max-autotune") and on_cpu:
        options["cpp_wrapper"] = True  # what calls the kernels is compiled too, which takes long
    function: Function = torch._inductor.compile(graph, list(inputs), options)
    return function


class CudaGraphRecorder:
    """A recorder of CUDA graphs: it warms up on a side stream, then records.

    All graphs share one memory pool: no result is needed after another graph is replayed. The pool is freed with the
    last.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._given: deque[Any] = deque()  # steps that the device may not have done

    def __call__(self, run: Run) -> tuple[Callable[[], object], list[Tensor]]:
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Threads that pin the next batches meanwhile would break a capture of the usual kind, and it them.
        pool = next((recorded.pool() for recorded in self._graphs), None)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = run()
        self._graphs.add(graph)

        def replay_graph() -> None:
            graph.replay()
            self._given.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._given[-1].record()
            if len(self._given) > AHEAD:
                self._given.popleft().synchronize()  # a busy device has done that one by then

        return replay_graph, outputs


def record_graph(function: Function, inputs: list[Tensor], num_held: int, record: Recorder) -> Function:
    """Record a function as a CUDA graph. The order of operations, and so the rounding, is that of the recorded call.

    inputs: the first `num_held` are changed in place; the others are copied to the memory that the recorded kernels
        read. The warm-up changes buffers and random states, which are restored. Raise PluginError if it cannot be
        recorded.
    """
    held, fed = inputs[:num_held], [tensor.clone() for tensor in inputs[num_held:]]
    if len({tensor.device for tensor in inputs}) > 1:
        raise PluginError(
            "trainer.cuda_graphs=true: the model keeps a tensor on the host, which a recorded step cannot change; "
            "use trainer.cuda_graphs=false"
        )
    copies = [tensor.clone() for tensor in held]

    def run_function() -> list[Tensor]:
        return function(*held, *fed)

    try:
        with torch.no_grad(), restore_random_state():
            replay, outputs = record(run_function)
            for tensor, before in zip(held, copies, strict=True):
                tensor.copy_(before)
    except RuntimeError as error:  # of CUDA, or of the user's code in it: there are many
        if isinstance(error, TrainrunError) or describe_out_of_memory(error):
            raise
        first = error.__context__ or error  # the end of a recording that failed fails too
        text = " ".join(str(first).split())[:300]
        raise PluginError(
            f"trainer.cuda_graphs=true: model and loss cannot be recorded ({text}); use "
            "trainer.cuda_graphs=false"
        ) from error

    def run_recorded_graph(*given: Tensor) -> list[Tensor]:
        for tensor, new in zip(fed, given[num_held:], strict=True):
            tensor.copy_(new, non_blocking=True)
        replay()
        return [output.clone() for output in outputs]  # the next replay writes into the same memory

    return run_recorded_graph
