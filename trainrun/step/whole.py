"""Forward and backward as one graph, compiled or recorded. The optimizer update is the usual one.

what: each shape of a full batch becomes one function without Python or autograd between its kernels, which returns
    the loss and the gradients. All other batches (the last one of an epoch) run without a graph. Rounding differs
    from the usual step in the last bits; dropout draws other numbers. `trainer.cuda_graphs` records the function,
    compiled or not, and replays it without launching each kernel.
when: long runs of small networks, whose steps are mostly Python; shapes that repeat. when not: short runs (about 5 s
    of compiling), shapes that change with every batch, models that need a value on the host or change Python
    attributes in a forward, several ranks (all refused).
source: functionalised training steps of JAX; make_fx and torch._inductor.compile: a graph without guards, where
    `torch.compile` checks its inputs in every call; https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
gain: digits MLP, batch 32, one core of a busy machine: with data, validation, logging and checkpoints 0.60x of a
    hand-written loop (scripts/bench_overhead.py --skip 5 trainer.compile=step). CUDA graphs on an H100: a step of
    the digits MLP, batch 64, 2.0 -> 0.4 to 0.6 ms, compiled or not; of a CNN of 3 ms 0.9x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.config.schema import RunConfig
from trainrun.data.batch import map_leaves
from trainrun.errors import ConfigError, PluginError, TrainingError
from trainrun.interfaces import (
    Gradients,
    MicroBatch,
    StepOutput,
    StepReport,
    has_count_method,
    read_attached_fields,
)
from trainrun.step.graphs import CudaGraphRecorder, Function, compile_graph, record_graph, run_rehearsal
from trainrun.sums import add_sums, flatten_sums
from trainrun.timing.phases import FORWARD, RANKS
from trainrun.training.checks.unsaved_state import saves_whole_state
from trainrun.training.components import Accumulate, Components, Step
from trainrun.transform.compile import check_compile_options
from trainrun.transform.compile_log import CompileLog

MAX_SHAPES = 8
MAX_CACHED_SHARES = 64

Flat = list[Tensor]
Kind = tuple[Any, ...]
Flattened = tuple[Kind, Flat, Callable[[Flat], Any]]
Engine = Callable[[Function, Flat, int], Function]  # function, arguments, how many of them it changes


def build_whole_step(
    config: RunConfig, plain: Accumulate, task: Any, informed: bool, device: torch.device, log: CompileLog
) -> Step:
    """Return the step of a run as a graph. Raise ConfigError if it cannot be one.

    plain: forward and backward of batches that are not full. informed: whether the task's step takes `info`.
    """
    wanted, records = config.trainer.compile, config.trainer.cuda_graphs
    compiles = wanted.scope == "step"
    key, off = (
        ("trainer.compile.scope=step", "trainer.compile.scope=model")
        if compiles
        else ("trainer.cuda_graphs=true", "trainer.cuda_graphs=false")
    )
    if obstacle := describe_task_obstacle(task, informed, off):
        raise ConfigError(f"{key}: {obstacle}")
    if records and device.type != "cuda":
        raise ConfigError(
            f"trainer.cuda_graphs=true: needs a CUDA device, and this run is on {device.type}; "
            "use trainer.cuda_graphs=false"
        )
    if compiles:
        try:
            check_compile_options(wanted.mode, wanted.backend, on_cpu=device.type == "cpu")
        except RuntimeError as error:
            raise ConfigError(str(error)) from error
    record = CudaGraphRecorder()

    def build_function(function: Function, inputs: Flat, num_held: int) -> Function:
        if compiles:
            function = compile_graph(function, inputs, wanted.backend, wanted.mode)
        return record_graph(function, inputs, num_held, record) if records else function

    return WholeStep(plain, config.data.batch_size, build_function, log, fixed=records)


def describe_task_obstacle(task: Any, informed: bool, off: str = "") -> str:
    """Return why no graph can hold a step of this task, or "". off: the setting that avoids the graph."""
    name = type(task).__name__
    if not has_count_method(task):
        return (
            f"needs the count of a batch before its forward, and {name} has no method count(batch); add the method, "
            "or leave this setting out"
        )
    if informed or saves_whole_state(task):
        reason = "takes info, which changes in every step" if informed else "has its own state"
        return f"{name} {reason}, but a graph keeps the first value; use {off}"
    return ""


class ModelAndTask(nn.Module):
    """Model and task as one module, so that `functional_call` can substitute the weights."""

    def __init__(self, model: nn.Module, task: Any) -> None:
        super().__init__()
        self.model = model
        self.hidden = (task,)  # not a child: its tensors are constants, not weights

    def forward(self, batch: Any) -> StepOutput:
        out: StepOutput = self.hidden[0].step(self.model, batch)
        return out


class StepFunction:
    """Forward and backward for one batch shape, as a function of flat tensors: parameters, buffers, share, batch.

    Returns the loss, the task's sums (`names`) and the gradients of `trained`. `names` and `trained` are known after
    the first call. Buffers are changed in place.
    """

    def __init__(self, run: Components, rebuild: Callable[[Flat], Any]) -> None:
        self._run, self._rebuild = run, rebuild
        self._params = dict(run.model.named_parameters())
        self._buffers = [name for name, _ in run.model.named_buffers()]
        self.names: list[str] = []
        self.trained: list[nn.Parameter] = []

    def __call__(self, *flat: Tensor) -> Flat:
        tensors = iter(flat)
        lent = {f"model.{name}": next(tensors).detach() for name in self._params}
        buffers = {f"model.{name}": next(tensors) for name in self._buffers}
        share, *batch = tensors
        params = [name for name, param in self._params.items() if param.requires_grad]
        leaves = [lent[f"model.{name}"].requires_grad_() for name in params]
        lent |= buffers
        model_and_task = ModelAndTask(self._run.model, self._run.task)
        with torch.enable_grad():
            with self._run.precision.autocast():
                out: StepOutput = torch.func.functional_call(model_and_task, lent, (self._rebuild(batch),))
            if out.loss_sum.dim() != 0 or not out.loss_sum.requires_grad:
                raise PluginError(
                    f"task: the loss has shape {tuple(out.loss_sum.shape)}; step() must return the sum over the "
                    "batch, 0-d, computed from the model's parameters"
                )
            share = share.to(out.loss_sum.dtype)
            grads = torch.autograd.grad(out.loss_sum, leaves, share, allow_unused=True)
        for name, buffer in buffers.items():  # a model may replace one instead of writing into it
            if lent[name] is not buffer:
                buffer.copy_(lent[name].detach())
        sums = flatten_sums(out.sums, self._run.task)
        self.names = list(sums)
        self.trained = [
            self._params[name] for name, grad in zip(params, grads, strict=True) if grad is not None
        ]
        return [out.loss_sum.detach(), *sums.values(), *lay_out_graph_gradients(self.trained, grads, share)]


def lay_out_graph_gradients(params: list[nn.Parameter], grads: Any, share: Tensor) -> Flat:
    """Return the gradients in the layout of their parameters, each in its own memory, as fused optimizers need them."""
    copied: Flat = []
    seen_ids = {id(share)}
    for param, gradient in zip(params, [gradient for gradient in grads if gradient is not None], strict=True):
        if gradient.layout is torch.strided and (
            id(gradient) in seen_ids or gradient.stride() != param.stride()
        ):
            gradient = torch.empty_like(param).copy_(gradient)
        seen_ids.add(id(gradient))
        copied.append(gradient)
    return copied


class BatchKind:
    """One kind of batch: whether the batch is full, and the graph for its shape."""

    __slots__ = ("full", "graph")

    def __init__(self, full: bool) -> None:
        self.full = full
        self.graph: tuple[Function, StepFunction] | None = None


class WholeStep:
    """The step as one graph.

    plain: forward and backward of a window that is not full. batch_size: the samples of a full batch. The choice
        depends on the batch alone, so a resumed run makes the same ones. fixed: the engine's graphs use fixed memory
        addresses.
    """

    def __init__(
        self, plain: Accumulate, batch_size: int, engine: Engine, log: CompileLog, fixed: bool = False
    ) -> None:
        self._plain, self._batch_size, self._engine, self._log = plain, batch_size, engine, log
        self._fixed = fixed
        self._kinds: dict[Kind, BatchKind] = {}
        self._held: Flat = []  # parameters and buffers of the model
        self._places: list[int] = []
        self._shares: dict[float, Tensor] = {}

    def __call__(self, run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        gradients = run.retry.run(micro_batches, lambda batches: self._accumulate(run, batches))
        return StepReport(*gradients, run.update())

    def _accumulate(self, run: Components, micro_batches: list[MicroBatch]) -> Gradients:
        """Run forward and backward of a window in the graph of its batch kind."""
        batches = [flatten_batch(batch.data) for batch in micro_batches]
        kinds = [self._kinds.get(kind) or self._add_kind(kind, leaves) for kind, leaves, _ in batches]
        if not all(kind.full for kind in kinds):
            self._held = []  # it may replace some
            return self._plain(run, micro_batches)
        held = self._held or self._collect_tensors(run)
        graphs = [
            kind.graph or self._build_graph(run, kind, batch)
            for kind, batch in zip(kinds, batches, strict=True)
        ]
        items = sum([batch.count_items(run.task) for batch in micro_batches])
        run.phases.open(RANKS)
        agreed = run.agree(items)
        share = self._share_tensor(1 / (agreed.items or 1), run.parallel.device)
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        run.phases.open(FORWARD)  # and the backward: one graph has no parts
        with torch.no_grad():
            for (graph, body), (_, leaves, _) in zip(graphs, batches, strict=True):
                loss, *outputs = graph(*held, share, *leaves)
                losses.append(loss)
                number = len(body.names)
                if run.triggers.sums:
                    add_sums(sums, dict(zip(body.names, outputs[:number], strict=True)), run.task)
                for param, grad in zip(body.trained, outputs[number:], strict=True):
                    param.grad = grad if param.grad is None else param.grad.add_(grad)
        return Gradients(losses, items, agreed, sums)

    def _add_kind(self, kind: Kind, leaves: Flat) -> BatchKind:
        full = all(leaf.shape[0] == self._batch_size for leaf in leaves if leaf.ndim)
        batch_kind = self._kinds[kind] = BatchKind(full)
        if sum(other_kind.full for other_kind in self._kinds.values()) > MAX_SHAPES:
            raise TrainingError(
                f"trainer.compile.scope=step: the batches have more than {MAX_SHAPES} shapes, and each shape needs "
                "its own graph; use data.padding=max, or trainer.compile.scope=model"
            )
        return batch_kind

    def _collect_tensors(self, run: Components) -> Flat:
        held = [tensor.detach() for tensor in (*run.model.parameters(), *run.model.buffers())]
        places = [tensor.data_ptr() for tensor in held]
        if self._fixed and places != self._places:
            for batch_kind in self._kinds.values():
                batch_kind.graph = None
        self._places = places
        # A validation may put another tensor in the place of a buffer, and cuDNN's recurrent layers move their weights
        # to other memory in it; a graph that went on with the old memory would train what nobody reads.
        moves = any(isinstance(module, nn.RNNBase) for module in run.model.modules())
        if not moves and len(held) == len(list(run.model.parameters())):
            self._held = held
        return held

    def _build_graph(
        self, run: Components, batch_kind: BatchKind, batch: Flattened
    ) -> tuple[Function, StepFunction]:
        _, leaves, rebuild = batch
        again = any(kind_of_batch.graph for kind_of_batch in self._kinds.values())
        self._log.begin()
        run_rehearsal(run, rebuild(leaves))
        held, body = self._collect_tensors(run), StepFunction(run, rebuild)
        share = self._share_tensor(1.0, run.parallel.device)
        batch_kind.graph = self._engine(body, [*held, share, *leaves], len(held)), body
        shapes = " ".join("x".join(map(str, leaf.shape)) for leaf in leaves)
        self._log.end(f"the step of a batch {shapes}", again=again)
        return batch_kind.graph

    def _share_tensor(self, share: float, device: torch.device) -> Tensor:
        """Return 1 / items as a 0-d tensor on the device: the gradient of the summed loss."""
        tensor = self._shares.get(share)
        if tensor is None:
            if len(self._shares) >= MAX_CACHED_SHARES:
                self._shares.clear()
            dtype = torch.float32 if device.type == "mps" else torch.float64
            tensor = self._shares[share] = torch.full((), share, dtype=dtype, device=device)
        return tensor


def flatten_batch(data: Any) -> Flattened:
    """Return the kind of a batch (all that a graph is specialised on), its tensors, and a function that rebuilds it."""
    is_plain_tuple = type(data) is tuple and all(isinstance(leaf, Tensor) for leaf in data)
    if is_plain_tuple and not read_attached_fields(data):
        return tuple([(leaf.shape, leaf.dtype, leaf.stride()) for leaf in data]), list(data), tuple
    tensors: list[Tensor] = []

    def store_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return Tensor  # the class stands where a tensor stood

    form = map_leaves(data, store_leaf)

    def rebuild_batch(flat: Flat) -> Any:
        rest = iter(flat)
        return map_leaves(form, lambda leaf: next(rest) if leaf is Tensor else leaf)

    shapes = tuple([(leaf.shape, leaf.dtype, leaf.stride()) for leaf in tensors])
    return (repr(form), shapes), tensors, rebuild_batch
