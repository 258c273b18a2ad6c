"""What a run is made of: `Parts`, assembled once, and `TrainState`, all that changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trainrun.interfaces import Batches, MicroBatch, Parallel, Precision, StepReport, Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trainrun.cadence import Cadence
    from trainrun.checkpoint.keep import Checkpoints
    from trainrun.config import RunConfig
    from trainrun.monitor.board import Board
    from trainrun.optimizer.ema import Ema
    from trainrun.scheduler.schedule import Schedule


@dataclass
class TrainState:
    """All that changes besides the tensors: saved with every checkpoint, so that a resume is exact.

    step: optimizer updates tried; epoch: finished epochs; batches: micro-batches done in this epoch.
    items: what the loss was averaged over so far, over all ranks; samples likewise.
    seconds: training time of all sessions of the run.
    losses, logged_items: of this rank, since the last log point (0-d tensors, and their items).
    """

    step: int = 0
    epoch: int = 0
    batches: int = 0
    items: float = 0.0
    seconds: float = 0.0
    validated_step: int = -1
    saved_step: int = -1
    best_metric: float | None = None
    best_step: int = -1
    bad_validations: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    stop_reason: str = ""
    stop_request: int = 0
    save_request: int = 0
    losses: list[Tensor] = field(default_factory=list)
    logged_items: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)

    def advance(self, window: list[MicroBatch], report: StepReport) -> None:
        """Counts a step after its effect."""
        self.step += 1
        self.batches += len(window)
        if window[-1].last:
            self.epoch, self.batches = self.epoch + 1, 0
        if report.grad.skipped:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
        self.items += report.agreed.items
        self.stop_request, self.save_request = report.agreed.stop, report.agreed.save
        self.losses += report.losses
        self.logged_items += report.items

    def state_dict(self) -> dict[str, Any]:
        import torch

        state = asdict(self) | {"losses": torch.stack(self.losses) if self.losses else None}
        for request in ("stop_request", "save_request", "stop_reason"):  # of this session only
            del state[request]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.losses = [] if state["losses"] is None else list(state["losses"].unbind())


@dataclass(frozen=True)
class Parts:
    """Everything that is assembled once. `wrapped` is the model as the backend wants it called."""

    config: RunConfig
    model: nn.Module
    wrapped: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    parallel: Parallel
    ema: Ema
    train: Batches
    val: Batches | None
    test: Batches | None
    cadence: Cadence
    checkpoints: Checkpoints
    board: Board

    @property
    def averaged(self) -> nn.Module:
        """The module that is validated and predicts: the running average where there is one."""
        return self.ema.module
