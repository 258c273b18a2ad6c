"""The whole step as one graph: forward, backward, check, clipping and update, compiled together.

what: each shape of a full batch becomes one function without Python or autograd between its kernels; all
    other batches (the ragged last one of an epoch) and the first update, which makes the optimizer's
    state, run plain. Rounding differs from the plain step in the last bits; dropout draws other numbers.
when: long runs of small networks, whose steps are mostly Python; shapes that repeat.
when not: short runs (about 5 s of compiling), shapes that change with every batch, models that ask for a
    value on the host or change Python attributes as they run (refused), several ranks (refused). A graph
    updates in place, so one that runs out of memory ends the run: it cannot run again in smaller pieces.
source: functionalised training steps of JAX; torch.fx.experimental.proxy_tensor.make_fx and
    torch._inductor.compile: a graph without guards, where `torch.compile` checks its inputs in every call.
gain: digits MLP of 9,610 weights, batch 32, one core of a busy machine: the step 0.28x of the plain one (86
    against 304 us of CPU time); with data, validation, logging and checkpoints 0.54x of a hand-written loop
    (median of ten runs of scripts/bench_overhead.py --skip 5 trainer.compile=step: 0.44 to 0.56, not quiet).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainrun.errors import TrainingError
from trainrun.interfaces import GradReport, MicroBatch, StepReport
from trainrun.precision.update import Update
from trainrun.step.body import Body, Flat, Holdings, rates_of
from trainrun.step.graphs import Engine, Function
from trainrun.step.traceability_check import rehearse
from trainrun.step.traceable import is_ready
from trainrun.timing.phases import FORWARD, RUNNER
from trainrun.training.components import Components, Step
from trainrun.transform.compile_log import CompileLog

MAX_SHAPES = 8
MAX_CACHED_SHARES = 64

Kind = tuple[Any, ...]
Flattened = tuple[Kind, Flat, Callable[[Flat], Any]]


class Seen:
    """A kind of batch, whether it is full, and its graphs: of a micro-batch before others, and of the last."""

    __slots__ = ("full", "graphs")

    def __init__(self, full: bool) -> None:
        self.full = full
        self.graphs: list[tuple[Function, Body] | None] = [None, None]


class WholeStep:
    """Fills `Components.step`.

    plain: the step that is equal up to rounding, for whatever is not compiled. batch_size: the rows of a
    full batch; the choice depends on a batch alone, so a resumed run makes the same ones.
    fixed: the engine's graphs work on the very memory they were made with.
    """

    def __init__(
        self,
        plain: Step,
        precision: Update,
        batch_size: int,
        engine: Engine,
        log: CompileLog,
        fixed: bool = False,
    ) -> None:
        self._plain, self._precision, self._engine, self._log = plain, precision, engine, log
        self._batch_size, self._fixed = batch_size, fixed
        self._kinds: dict[Kind, Seen] = {}
        self._held: Holdings | None = None
        self._doubted: Holdings | None = None  # what was held ahead of a plain step
        self._ready = self._asked = self._moves = False
        self._shares: dict[float, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._rates: Flat = []
        self._places: list[int] = []

    def __call__(self, run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        self._ready = self._ready or is_ready(run.optimizer, again=self._asked)
        self._asked = True
        batches = [flattened(batch.data) for batch in micro_batches]
        kinds = [self._kinds.get(kind) or self._new_kind(kind, leaves) for kind, leaves, _ in batches]
        full = all(kind.full for kind in kinds)
        if not (full and self._ready and run.retry.pieces == 1):
            self._held, self._doubted = None, self._held or self._doubted  # it may replace tensors
            return self._plain(run, micro_batches)
        run.retry.unmark()
        if self._held is not None and self._moves and not self._held.are_current():
            self._held = None
        held = self._held = self._held or self._hold(run)
        last = len(micro_batches) - 1
        graphs = [
            kind.graphs[i == last] or self._new_graph(run, held, kind, batches[i], i == last)
            for i, kind in enumerate(kinds)
        ]
        items = sum([batch.counted_by(run.task) for batch in micro_batches])
        agreed = run.parallel.agree(items, run.triggers.stop_request(), run.triggers.save_request())
        share = self._share(1 / (agreed.items or 1), run.parallel.device)
        held.follow()
        losses: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        run.phases.open(FORWARD)  # and all the rest: one graph has no parts
        with torch.no_grad():
            for (graph, body), (_, leaves, _) in zip(graphs, batches, strict=True):
                loss, norm, *totals = graph(*held.flat, share, *leaves)
                losses.append(loss)
                if run.triggers.log:
                    for name, total in zip(body.names, totals, strict=False):  # more may follow
                        sums[name] = sums[name] + total if name in sums else total
        usable = self._precision.accept()
        run.phases.open(RUNNER)
        if usable:
            run.schedule.step()
            run.ema.update()
        return StepReport(
            losses, items, agreed, sums, GradReport(norm if run.triggers.log else None, not usable)
        )

    def _new_kind(self, kind: Kind, leaves: Flat) -> Seen:
        full = all(leaf.shape[0] == self._batch_size for leaf in leaves if leaf.ndim)
        seen = self._kinds[kind] = Seen(full)
        if sum(one.full for one in self._kinds.values()) > MAX_SHAPES:
            raise TrainingError(
                f"trainer.compile.scope=step: the batches have more than {MAX_SHAPES} shapes, and each is a "
                "graph; use data.padding=max, or trainer.compile.scope=model"
            )
        return seen

    def _hold(self, run: Components) -> Holdings:
        if self._doubted is not None and self._doubted.are_current():
            return self._doubted
        if run.config.trainer.accumulate_grad_batches > 1 and not self._sums:
            named = run.model.named_parameters()
            self._sums = {name: torch.zeros_like(p).detach() for name, p in named if p.requires_grad}
        self._rates = self._rates or rates_of(run)
        held = Holdings(run, self._precision, self._sums, self._rates)
        # cuDNN's recurrent layers move their weights to other memory in the first plain forward after a graph was made
        # (a validation); a graph that went on with the old memory would train what nobody reads.
        self._moves = any(isinstance(module, nn.RNNBase) for module in run.model.modules())
        places = [tensor.data_ptr() for tensor in held.flat]
        if self._fixed and places != self._places:
            for seen in self._kinds.values():
                seen.graphs = [None, None]
        self._places = places
        return held

    def _new_graph(
        self, run: Components, held: Holdings, seen: Seen, batch: Flattened, updates: bool
    ) -> tuple[Function, Body]:
        _, leaves, rebuild = batch
        again = any(graph for one in self._kinds.values() for graph in one.graphs)
        self._log.begin()
        rehearse(run, rebuild(leaves))
        body = Body(run, self._precision, held, rebuild, updates)
        share = self._share(1.0, run.parallel.device)
        made = self._engine(body, [*held.flat, share, *leaves], len(held.flat)), body
        seen.graphs[updates] = made
        shapes = " ".join("x".join(map(str, leaf.shape)) for leaf in leaves)
        self._log.end(f"the step of a batch {shapes}", again=again)
        return made

    def _share(self, share: float, device: torch.device) -> Tensor:
        """1 / items, as the gradient of the summed loss."""
        tensor = self._shares.get(share)
        if tensor is None:
            if len(self._shares) >= MAX_CACHED_SHARES:
                self._shares.clear()
            dtype = torch.float32 if device.type == "mps" else torch.float64
            tensor = self._shares[share] = torch.full((), share, dtype=dtype, device=device)
        return tensor


def flattened(data: Any) -> Flattened:
    """A batch's kind (all that a graph is specialised on), its tensors, and the way back."""
    if type(data) is tuple and all(isinstance(leaf, Tensor) for leaf in data):
        return tuple([(leaf.shape, leaf.dtype, leaf.stride()) for leaf in data]), list(data), tuple
    leaves, spec = tree_flatten(data)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def rebuild(flat: Flat) -> Any:
        rest = iter(flat)
        return tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    shapes = tuple([(leaf.shape, leaf.dtype, leaf.stride()) for leaf in tensors])
    return (repr(spec), repr(others), shapes), tensors, rebuild
