"""The components of a run, assembled once, and the tree of their state that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainrun.checkpoint.manager import CheckpointManager
from trainrun.config.schema import RunConfig
from trainrun.data.stream_options import SourceStates
from trainrun.errors import TrainingError
from trainrun.interfaces import (
    Batches,
    Counting,
    DataFacts,
    Gradients,
    GradReport,
    MicroBatch,
    Parallel,
    Precision,
    StepAgreement,
    StepReport,
    Task,
)
from trainrun.monitor.metric_logger import MetricLogger
from trainrun.optimizer.build_optimizer import named_optimizer_state
from trainrun.precision.closure import step_with_closure
from trainrun.scheduler.schedule import Schedule
from trainrun.seeding import evaluation_mode, read_random_state
from trainrun.timing.phases import OPTIMIZER, RUNNER, PhaseTimer
from trainrun.train_state import OF_THIS_RANK, TrainState
from trainrun.training.named_optimizers import collect_optimizer_states, refuse_single_update
from trainrun.training.recovery.oom import OomRetry
from trainrun.training.task_calls import Hooks, TaskCalls, collect_state
from trainrun.training.trained_parameters import TrainedParameters
from trainrun.training.triggers import Triggers

if TYPE_CHECKING:
    from trainrun.checkpoint.weights import FrozenBase
    from trainrun.optimizer.ema import Ema, OptimizerAverage
    from trainrun.training.named_optimizers import JoinedSchedules, NamedOptimizer
    from trainrun.transform.compile_log import CompileLog


@dataclass(frozen=True)
class Components:
    """The parts of a run, assembled once.

    wrapped: the model as wrapped by the parallel backend. held: the model as this rank holds it, whose parameters
        the optimizer has. validation: `val`, or named sets such as `val/day`.
    step: makes one step: `train_step`, a wrapper of it, or a custom step. accumulate: its forward and backward.
    optimizers: several by name, for a custom step (own_step); else empty.
    order: the settings that determine the order of the training samples in an epoch.
    base: with `checkpoint.adapter_only`, the weights that no checkpoint holds.
    """

    config: RunConfig
    model: nn.Module
    wrapped: nn.Module
    held: nn.Module
    task: Task
    task_calls: TaskCalls
    optimizer: torch.optim.Optimizer
    schedule: Schedule | JoinedSchedules
    precision: Precision
    parallel: Parallel
    ema: Ema | OptimizerAverage | None
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
    trained: TrainedParameters
    places: SourceStates = field(default_factory=SourceStates)
    optimizers: Mapping[str, NamedOptimizer] = field(default_factory=dict)
    own_step: Any = None
    order: Mapping[str, Any] = field(default_factory=dict)
    base: FrozenBase | None = None

    def agree(self, items: int) -> StepAgreement:
        """Exchange between all ranks the mean number of items in this step, and their stop, save and validation
        requests.
        """
        triggers = self.triggers
        wishes = 2 * triggers.stop_request() + triggers.validation_request()
        mean, wishes, save, _ = self.parallel.agree(items, wishes, triggers.save_request())
        return StepAgreement(mean, wishes // 2, save, wishes % 2 == 1)

    def update(self, closure: Callable[[], Tensor] | None = None) -> GradReport:
        """Unscale, check, clip, update, and clear the gradients. Then advance the schedule and the averaged weights.

        closure: for an optimizer that computes the loss several times per step; it clears the gradients, computes
            new ones and returns the loss.
        """
        if self.own_step is not None and self.parallel.world_size > 1 and closure is None:
            self.parallel.exchange()
        self.call_gradient_hooks()
        self.phases.open(OPTIMIZER)
        rates = (
            self.schedule.rates if self.triggers.log else None
        )  # of this update: the schedule moves behind it
        if self.optimizers and (self.own_step is not None or self.config.loop):
            refuse_single_update(self.optimizers)
        if closure is None:
            grad = self.precision.optimizer_step(self.optimizer, want_norm=self.triggers.log)
        else:
            grad = step_with_closure(self.precision, self.optimizer, closure, self.parallel)
        if rates is not None:
            grad.learning_rates = rates
        if not grad.skipped:
            self.schedule.step()
            if self.ema is not None:
                self.ema.update()
        self.phases.open(RUNNER)
        return grad

    def call_gradient_hooks(self) -> None:
        """Call the hooks `on_gradients` before each update."""
        for look in self.hooks.on_gradients:
            look(self)
            self.after_user_code()

    def after_user_code(self) -> None:
        """Handle parameters that a hook, a task or a custom step may have changed. Raise PluginError if that is
        impossible.
        """
        self.trained.check()
        self.precision.reload_optimizer_state()

    def splits(self) -> dict[str, Batches]:
        """Return the streams of the validation sets and the test set, by name."""
        return {**self.validation, **({} if self.test is None else {"test": self.test})}

    @property
    def val(self) -> Batches | None:
        """Return the first validation set; None without validation."""
        return next(iter(self.validation.values()), None)

    def checkpoint_tree(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that all ranks share and the state of this rank, as plain values and tensors.

        Raise TrainingError if an earlier gradient was not finite, because the run could not continue from such a
        state.
        """
        if failure := self.precision.failure(wait=True):
            raise TrainingError(f"step {state.step}: {failure}")
        self.trained.check()
        with nullcontext(False) if self.ema is None else self.ema.swap.swap_weights_out() as in_evaluation:
            shared, rank_tree = self._build_trees(state)
            if in_evaluation:  # the model is about to hold the averages again
                model = shared["model"].items()
                shared["model"] = {
                    name: value.detach().clone() if isinstance(value, Tensor) else value
                    for name, value in model
                }
        if self.base is not None:
            shared = self.base.drop_frozen_tensors(shared)
        return self.parallel.state_dict(shared), rank_tree

    def _build_trees(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
        saved = state.state_dict()
        rank_state = {name: saved.pop(name) for name in OF_THIS_RANK}
        shared = {
            "model": self.held.state_dict(),
            "ema": {} if self.ema is None else self.ema.state_dict(),
            "optimizer": self._collect_optimizer_state(),
            "trained": self.trained.state_dict(),
            "schedule": self.schedule.state_dict(),
            "precision": self.precision.state_dict(),
            "retry": self.retry.state_dict(),
            "train": saved,
            "stream": self.stream(),
        }
        rank_tree: dict[str, Any] = {"random": read_random_state(), "train": rank_state}
        if task_state := self.task_calls.state_dict():
            (rank_tree if self.parallel.rank else shared)["task"] = task_state
        if states := self.hooks.state_dict():
            (rank_tree if self.parallel.rank else shared)["hooks"] = states
        if task_state := collect_state(self.own_step, self.parallel.device):
            (rank_tree if self.parallel.rank else shared)["step"] = task_state
        if stands := self.places.find_position(state.epoch, state.batches):
            rank_tree["source"] = {"stands": stands}
        return shared, rank_tree

    def _collect_optimizer_state(self) -> dict[str, Any]:
        if self.optimizers:
            return collect_optimizer_states(self.optimizers, self.held)
        return named_optimizer_state(self.optimizer, self.held)

    def stream(self) -> dict[str, Any]:
        """Return the facts that a position in the data depends on: sizes of micro-batch and epoch, order, classes,
        inputs.
        """
        ranks, size = self.parallel.world_size, self.config.data.batch_size
        return {"samples_per_batch": size * ranks, "num_samples": self.train.num_samples,
                "ranks": ranks, "parts": self.places.parts, "by": dict(self.order),
                "classes": list(self.data_facts.class_names), "inputs": dict(self.data_facts.inputs)}  # fmt: skip

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode without gradients, with averaged weights if there are any. Restore it
        afterwards.
        """
        averaged = nullcontext() if self.ema is None else self.ema.swap_weights_in()
        with averaged, evaluation_mode(self.model):
            yield self.model


Step = Callable[[Components, list[MicroBatch]], StepReport]
Accumulate = Callable[[Components, list[MicroBatch]], Gradients]
