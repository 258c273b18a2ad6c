"""What a run is made of: `Components`, assembled once, and how it becomes the tree that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainrun.checkpoint.manager import CheckpointManager
from trainrun.config.schema import RunConfig
from trainrun.data.order.sampler import LISTED, ORDER
from trainrun.data.stream_options import SourceStates
from trainrun.errors import CheckpointError, TrainingError
from trainrun.interfaces import (
    Agreed,
    Batches,
    Counting,
    DataFacts,
    Gradients,
    GradReport,
    KeepsState,
    MicroBatch,
    Parallel,
    Precision,
    StepReport,
    Task,
)
from trainrun.monitor.metric_logger import MetricLogger
from trainrun.optimizer.ema import Ema
from trainrun.optimizer.named_state import named_optimizer_state
from trainrun.scheduler.schedule import Schedule
from trainrun.seeding import random_state, set_random_state
from trainrun.timing.phases import OPTIMIZER, RUNNER, PhaseTimer
from trainrun.training.checks.user_state import load_state, saved_state
from trainrun.training.hooks import Hooks
from trainrun.training.recovery.oom import OomRetry, no_memory
from trainrun.training.state import TrainState
from trainrun.training.task_calls import TaskCalls
from trainrun.training.triggers import Triggers

if TYPE_CHECKING:
    from trainrun.checkpoint.weights import FrozenBase
    from trainrun.training.named_optimizers import JoinedSchedules, NamedOptimizer
    from trainrun.transform.compile_log import CompileLog

ODD_TREE = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


@dataclass(frozen=True)
class Components:
    """Everything that is assembled once.

    wrapped: the model as the backend wants it called. validation: `val`, or `val/day` and `val/night` of named sets.
    step: makes one step: `train_step`, what wraps it, or what is in its place. accumulate: its forward and backward.
    positions: of a micro-batch of one rank, padding included, by `data.padding`; empty if it is not known.
    optimizers: several by name, for a step of the user's own, which is own_step; else empty.
    order: what decides which training sample comes when in an epoch.
    base: with `checkpoint.adapter_only`, the weights that no checkpoint holds.
    """

    config: RunConfig
    model: nn.Module
    wrapped: nn.Module
    task: Task
    task_calls: TaskCalls
    optimizer: torch.optim.Optimizer
    schedule: Schedule | JoinedSchedules
    precision: Precision
    parallel: Parallel
    ema: Ema
    retry: OomRetry
    train: Batches
    validation: Mapping[str, Batches]
    test: Batches | None
    triggers: Triggers
    checkpoints: CheckpointManager
    monitors: MetricLogger
    data_facts: DataFacts
    phases: PhaseTimer
    step: Step
    accumulate: Accumulate
    compile_log: CompileLog | None
    counting: Counting
    hooks: Hooks
    positions: Mapping[str, float] = field(default_factory=dict)
    places: SourceStates = field(default_factory=SourceStates)
    optimizers: Mapping[str, NamedOptimizer] = field(default_factory=dict)
    own_step: Any = None
    order: Mapping[str, Any] = field(default_factory=dict)
    base: FrozenBase | None = None

    def agree(self, items: int) -> Agreed:
        """One exchange between the ranks: the mean of their items in this step, and what they ask for."""
        ours = self.triggers
        found = self.parallel.agree(
            items, 2 * ours.stop_request() + ours.validation_request(), ours.save_request()
        )
        return found._replace(stop=found.stop // 2, validate=found.stop % 2 == 1)

    def update(self, closure: Callable[[], Tensor] | None = None) -> GradReport:
        """Unscale, check, clip, update, and clear the gradients; then the schedule and the average take a step.

        closure: of an optimizer that computes the loss several times in a step; it clears the gradients, adds up new
        ones and returns the loss.
        """
        for look in self.hooks.on_gradients:
            look(self)
        self.phases.open(OPTIMIZER)
        if self.optimizers:
            from trainrun.training.named_optimizers import refuse

            refuse(self.optimizers)
        if closure is None:
            grad = self.precision.optimizer_step(self.optimizer, want_norm=self.triggers.log)
        else:
            from trainrun.precision.closure import step_with_closure

            grad = step_with_closure(self.precision, self.optimizer, closure)
        if not grad.skipped:
            self.schedule.step()
            if self.ema.enabled:
                self.ema.update()
        self.phases.open(RUNNER)
        return grad

    def splits(self) -> dict[str, Batches]:
        """The streams that can be evaluated, by name."""
        return {**self.validation, **({} if self.test is None else {"test": self.test})}

    @property
    def val(self) -> Batches | None:
        """The first validation set."""
        return next(iter(self.validation.values()), None)

    def checkpoint_tree(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that changes, as plain values and tensors: what the ranks share, and what is this rank's own.

        Raises TrainingError: a step before was not finite, so this is no state to go on from.
        """
        if failure := self.precision.failure(wait=True):
            raise TrainingError(f"step {state.step}: {failure}")
        saved = state.state_dict()
        own = {name: saved.pop(name) for name in ("losses", "logged_items")}
        shared = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self._optimizer_state(),
            "schedule": self.schedule.state_dict(),
            "precision": self.precision.state_dict(),
            "retry": self.retry.state_dict(),
            "train": saved,
            "stream": self.stream(),
        }
        ours: dict[str, Any] = {"random": random_state(), "train": own}
        if kept := self.task_calls.state_dict():
            (ours if self.parallel.rank else shared)["task"] = kept
        if states := self.hooks.state_dict():
            (ours if self.parallel.rank else shared)["hooks"] = states
        if kept := saved_state(self.own_step, self.parallel.device):
            (ours if self.parallel.rank else shared)["step"] = kept
        if stands := self.places.at(state.epoch, state.batches):
            ours["source"] = {"stands": stands}
        if self.base is not None:
            shared = self.base.left_out(shared)
        return self.parallel.state_dict(shared), ours

    def _optimizer_state(self) -> dict[str, Any]:
        if self.optimizers:
            from trainrun.training.named_optimizers import optimizer_states

            return optimizer_states(self.optimizers, self.model)
        return named_optimizer_state(self.optimizer, self.model)

    def stream(self) -> dict[str, Any]:
        """What a position in the data means: samples in a micro-batch of all ranks, and in an epoch."""
        ranks, size = self.parallel.world_size, self.config.data.batch_size
        return {"samples_per_batch": size * ranks, "num_samples": self.train.num_samples, "order": ORDER,
                "ranks": ranks, "parts": self.places.parts, "by": dict(self.order)}  # fmt: skip

    def load_tree(self, place: str, shared: dict[str, Any], own: dict[str, Any] | None) -> TrainState:
        """Copy a saved tree into the components, random states last. own: None if the ranks changed.

        Raises CheckpointError, before anything is copied, where model or data are others.
        """
        try:
            return self._load_tree(place, shared, own)
        except ODD_TREE as error:  # its bytes are those that were written, but not by this program
            if no_memory(error):
                raise
            text = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"checkpoint {place}: not the state of such a run ({type(error).__name__}: {text})"
            ) from error

    def _load_tree(self, place: str, shared: dict[str, Any], own: dict[str, Any] | None) -> TrainState:
        from trainrun.checkpoint.weights import check_tensors, put_back, tensor_kinds

        live = self.model.state_dict()
        if self.base is not None:
            self.base.check(place, shared)
        shared = put_back(place, self.parallel.load_state_dict(shared, live), live)
        check_tensors(place, "this model", tensor_kinds(live), tensor_kinds(shared["model"]))
        kept = {**shared, **(own or {})}.get("task", {})
        self.task_calls.check_state(place, kept)
        kept_step = {**shared, **(own or {})}.get("step", {})
        if kept_step and not isinstance(self.own_step, KeepsState):
            raise CheckpointError(f"checkpoint {place}: holds the state of a step; name the step of before")
        shared["train"]["batches"] = self._position(place, shared)
        per_rank = shared["stream"].get("ranks", self.parallel.world_size) / self.parallel.world_size
        for name in ("items", "step_items"):  # a mean over ranks
            shared["train"][name] = shared["train"].get(name, 0.0) * per_rank
        self.model.load_state_dict(shared["model"])
        self.ema.load_state_dict(shared["ema"])
        self._load_optimizers(place, shared["optimizer"])
        self.schedule.load_state_dict(shared["schedule"])
        self.precision.load_state_dict(shared["precision"])
        if "retry" in shared:  # else the checkpoint is older than this
            self.retry.load_state_dict(shared["retry"])
        if told := self.task_calls.load_state_dict(place, kept):
            self.monitors.note(told)
        self.hooks.load_state_dict(place, {**shared, **(own or {})}.get("hooks", {}))
        if kept_step:
            load_state(place, self.own_step, kept_step, self.parallel.device)
        state = TrainState()
        device = self.parallel.device
        if own is None:
            state.load_state_dict(shared["train"] | {"losses": None, "logged_items": 0})
            return state
        if "source" in own and shared["stream"]["samples_per_batch"] == self.stream()["samples_per_batch"]:
            self.places.keep(shared["train"]["epoch"], shared["train"]["batches"], own["source"]["stands"])
        losses = own["train"]["losses"]
        moved = None if losses is None else losses.to(device)
        state.load_state_dict(shared["train"] | own["train"] | {"losses": moved})
        set_random_state(own["random"])
        return state

    def _load_optimizers(self, place: str, tree: dict[str, Any]) -> None:
        if self.optimizers:
            from trainrun.training.named_optimizers import load_optimizer_states

            load_optimizer_states(self.optimizers, self.model, place, tree, self.config.optimizer)
            return
        from trainrun.optimizer.load_named_state import configured_fields, load_named_optimizer_state

        configured = configured_fields(self.config.optimizer)
        host = torch.device("cpu") if self.config.trainer.cpu_offload == "optimizer" else None
        load_named_optimizer_state(self.optimizer, self.model, tree, configured, host)

    def _position(self, place: str, shared: dict[str, Any]) -> int:
        """Micro-batches done in the epoch, converted where their size changed: no sample twice, none lost."""
        then, now = shared["stream"], self.stream()
        size = then["samples_per_batch"]
        if type(size) is not int or size < 1 or type(then["num_samples"]) not in (int, type(None)):
            raise CheckpointError(f"checkpoint {place}: no place in the data")
        if shared["train"]["batches"] and then["num_samples"] != now["num_samples"]:
            raise CheckpointError(
                f"checkpoint {place}: saved in the middle of an epoch of {then['num_samples']} samples, and data.train "
                f"has {now['num_samples']} now; use the same data, or its weights alone: init_from=RUN_DIR"
            )
        number = now["num_samples"] or 0  # of a limited epoch: of how many, nobody knows here
        large = number > LISTED or (number and self.config.trainer.limit_train_batches != 1.0)
        if shared["train"]["batches"] and large and then.get("order") != ORDER:
            raise CheckpointError(
                f"checkpoint {place}: saved in the middle of an epoch by a version of trainrun that put more than "
                f"{LISTED:,} samples in another order; go on with that version, or begin with these weights alone: "
                "init_from=..."
            )
        before, by = then.get("by", {}), now["by"]
        other = [f"{key}={before[key]} (now {by[key]})" for key in by if before.get(key, by[key]) != by[key]]
        if shared["train"]["batches"] and other:
            told = ", ".join(other).replace("'", "")
            raise CheckpointError(
                f"checkpoint {place}: saved in the middle of an epoch with {told}: samples of it would come again or "
                "never; go on as before, or begin with these weights alone: init_from=RUN_DIR"
            )
        parts = then.get("parts", 1)
        if shared["train"]["batches"] and parts != now["parts"]:
            raise CheckpointError(
                f"checkpoint {place}: saved in the middle of an epoch whose source was divided among {parts} readers, "
                f"and now there are {now['parts']}; use parallel.devices and data.num_workers as before"
            )
        samples = shared["train"]["batches"] * then["samples_per_batch"]
        if samples % now["samples_per_batch"]:
            raise CheckpointError(
                f"checkpoint {place}: saved after {samples} samples of the epoch, which is no multiple of "
                f"batch_size x ranks = {now['samples_per_batch']}; use {then['samples_per_batch']} as before"
            )
        return int(samples // now["samples_per_batch"])

    @property
    def averaged(self) -> nn.Module:
        """The module that is validated and predicts: the running average where there is one."""
        return self.ema.module


Step = Callable[[Components, list[MicroBatch]], StepReport]
Accumulate = Callable[[Components, list[MicroBatch]], Gradients]
