"""What makes a step: `loop.train_step`, or the same in one graph; and what compiling costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainrun import loop
from trainrun.config import RunConfig
from trainrun.device_times import DeviceTimes
from trainrun.errors import ConfigError
from trainrun.interfaces import Counting, MicroBatch, Parallel, StepReport, counts_before
from trainrun.ledger import COMPILE, Ledger
from trainrun.monitor.board import Board
from trainrun.parts import Parts
from trainrun.precision.guarded import Guarded
from trainrun.process.collector import freeze_more
from trainrun.start.contract import Checked
from trainrun.step.counting import CountedAfter, CountedBefore
from trainrun.step.sampled import sampled
from trainrun.step.watched import Watched
from trainrun.transform.compile_log import CompileLog

Stepper = Callable[[Parts, list[MicroBatch], bool], StepReport]


def build_log(board: Board, ledger: Ledger) -> CompileLog:
    """Compiling is booked on its own account, and is no training time in the rows."""

    @contextmanager
    def booked() -> Iterator[None]:
        with ledger.on(COMPILE), board.paused():
            yield
            freeze_more()  # or each validation would look at the compiler's 200,000 objects, 0.1 s and more

    return CompileLog(board.note, booked)


def build_counting(
    config: RunConfig, model: nn.Module, task: Any, parallel: Parallel, ledger: Ledger
) -> Counting:
    """ConfigError: the count comes with the output, and a setting needs it before."""
    if counts_before(task):
        return CountedBefore(task)
    trainer = config.trainer
    needs = {
        "trainer.compile.scope=step": trainer.compile.scope == "step",
        "trainer.cuda_graphs=true": trainer.cuda_graphs,
        "trainer.optimizer_in_backward=true": trainer.optimizer_in_backward,
    }
    if wanted := [word for word, wants in needs.items() if wants]:
        raise ConfigError(
            f"{wanted[0]}: needs the count of a batch before its forward, and {type(task).__name__} has no method "
            "count(batch); add it, or leave this setting out"
        )
    size = config.data.batch_size * trainer.accumulate_grad_batches
    return CountedAfter(task, model, parallel, ledger, size)


def build_stepper(config: RunConfig, precision: Guarded, device: torch.device, log: CompileLog) -> Stepper:
    wanted, records = config.trainer.compile, config.trainer.cuda_graphs
    if wanted.scope != "step" and not records:
        return loop.train_step
    if records and device.type != "cuda":
        raise ConfigError(
            f"trainer.cuda_graphs=true: only a CUDA device has them, and this run is on {device.type}; "
            "use trainer.cuda_graphs=false"
        )
    from trainrun.step.captured import OnCuda, captured
    from trainrun.step.graphs import Function, compiled
    from trainrun.step.whole import WholeStep
    from trainrun.transform.compile import check_options

    if wanted.scope == "step":
        try:
            check_options(wanted.mode, wanted.backend, on_cpu=device.type == "cpu")
        except RuntimeError as error:
            raise ConfigError(str(error)) from error

    record = OnCuda()

    def engine(function: Function, inputs: list[Tensor], num_held: int) -> Function:
        if wanted.scope == "step":
            function = compiled(function, inputs, wanted.backend, wanted.mode)
        return captured(function, inputs, num_held, record) if records else function

    return WholeStep(loop.train_step, precision, config.data.batch_size, engine, log, fixed=records)


def checked_step(stepper: Stepper, wanted: bool, task: Any) -> Stepper:
    """The step, before whose first the task is looked at, if it is the user's own."""
    own = not type(task).__module__.startswith("trainrun.")
    return Checked(stepper) if wanted and own else stepper


def seen_step(
    config: RunConfig,
    stepper: Stepper,
    device: torch.device,
    times: DeviceTimes | None,
    note: Callable[[str], None],
) -> Stepper:
    """The step, timed on its device now and then, and watched where that was asked for; on a CPU the step itself."""
    if times is not None:
        stepper = sampled(stepper, times)
    if not config.monitor.sync_debug:
        return stepper
    if device.type != "cuda":
        raise ConfigError(
            f"monitor.sync_debug=true: looks for what makes the host wait for a CUDA device, and this run is on "
            f"{device.type}; use monitor.sync_debug=false"
        )
    return Watched(stepper, note)
