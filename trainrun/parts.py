"""What a run is made of: `Parts`, assembled once, and how it becomes the tree that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainrun.cadence import Cadence
from trainrun.checkpoint.keep import Checkpoints
from trainrun.checkpoint.match import check_tensors, tensor_kinds
from trainrun.config import RunConfig
from trainrun.data.order import LISTED, ORDER
from trainrun.errors import CheckpointError, TrainingError
from trainrun.interfaces import (
    Batches,
    Counting,
    DataFacts,
    MicroBatch,
    Parallel,
    Precision,
    StepReport,
    Task,
)
from trainrun.ledger import Ledger
from trainrun.mishaps.retry import Retry, no_memory
from trainrun.monitor.board import Board
from trainrun.optimizer.ema import Ema
from trainrun.optimizer.names import load_named_optimizer_state, named_optimizer_state
from trainrun.randomness import random_state, set_random_state
from trainrun.scheduler.schedule import Schedule
from trainrun.state import TrainState
from trainrun.task_calls import TaskCalls
from trainrun.transform.compile_log import CompileLog

ODD_TREE = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


@dataclass(frozen=True)
class Parts:
    """Everything that is assembled once.

    wrapped: the model as the backend wants it called. stepper: what makes a step, in place of `train_step`.
    positions: of a micro-batch of one rank, padding included, by `data.padding`; empty if it is not known.
    """

    config: RunConfig
    model: nn.Module
    wrapped: nn.Module
    task: Task
    task_calls: TaskCalls
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    parallel: Parallel
    ema: Ema
    retry: Retry
    train: Batches
    val: Batches | None
    test: Batches | None
    cadence: Cadence
    checkpoints: Checkpoints
    board: Board
    data_facts: DataFacts
    ledger: Ledger
    stepper: Callable[[Parts, list[MicroBatch], bool], StepReport]
    compile_log: CompileLog
    counting: Counting
    positions: Mapping[str, float] = field(default_factory=dict)

    def splits(self) -> dict[str, Batches]:
        """The streams that can be evaluated, by name."""
        return {name: split for name, split in (("val", self.val), ("test", self.test)) if split is not None}

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
            "optimizer": named_optimizer_state(self.optimizer, self.model),
            "schedule": self.schedule.state_dict(),
            "precision": self.precision.state_dict(),
            "retry": self.retry.state_dict(),
            "train": saved,
            "stream": self.stream(),
        }
        ours: dict[str, Any] = {"random": random_state(), "train": own}
        if kept := self.task_calls.state_dict():
            (ours if self.parallel.rank else shared)["task"] = kept
        return shared, ours

    def stream(self) -> dict[str, Any]:
        """What a position in the data means: samples in a micro-batch of all ranks, and in an epoch."""
        samples = self.config.data.batch_size * self.parallel.world_size
        return {"samples_per_batch": samples, "num_samples": self.train.num_samples, "order": ORDER}

    def load_tree(self, place: str, shared: dict[str, Any], own: dict[str, Any] | None) -> TrainState:
        """Copy a saved tree into the parts, random states last. own: None if the ranks changed.

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
        check_tensors(
            place, "this model", tensor_kinds(self.model.state_dict()), tensor_kinds(shared["model"])
        )
        kept = {**shared, **(own or {})}.get("task", {})
        self.task_calls.check_state(place, kept)
        shared["train"]["batches"] = self._position(place, shared)
        self.model.load_state_dict(shared["model"])
        self.ema.load_state_dict(shared["ema"])
        configured = {name for name in self.config.optimizer if name not in ("_target_", "lr")}
        host = torch.device("cpu") if self.config.trainer.cpu_offload == "optimizer" else None
        load_named_optimizer_state(self.optimizer, self.model, shared["optimizer"], configured, host)
        self.schedule.load_state_dict(shared["schedule"])
        self.precision.load_state_dict(shared["precision"])
        if "retry" in shared:  # else the checkpoint is older than this
            self.retry.load_state_dict(shared["retry"])
        if told := self.task_calls.load_state_dict(place, kept):
            self.board.note(told)
        state = TrainState()
        device = self.parallel.device
        if own is None:
            state.load_state_dict(shared["train"] | {"losses": None, "logged_items": 0})
            return state
        losses = own["train"]["losses"]
        moved = None if losses is None else losses.to(device)
        state.load_state_dict(shared["train"] | own["train"] | {"losses": moved})
        set_random_state(own["random"])
        return state

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
