"""Build the function that makes a step: `train_step`, a compiled or recorded step, or a custom one.

The time of compilation is recorded separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trainrun.config.schema import RunConfig
from trainrun.interfaces import Batches, Counting, Parallel, Precision, has_count_method
from trainrun.monitor.metric_logger import MetricLogger
from trainrun.runtime.collector import freeze_new_objects
from trainrun.timing.phases import COMPILE, PhaseTimer
from trainrun.training.components import Accumulate, Step
from trainrun.training.item_count import CountAfterForward, divide_by_output_counts
from trainrun.training.own_step import OwnStep, build_own_step
from trainrun.training.recovery.oom import OomRetry
from trainrun.training.task_calls import TaskCalls
from trainrun.training.train_step import (
    CountBeforeForward,
    accumulate_gradients,
    accumulate_with_retry,
    train_step,
)
from trainrun.training.without_trace import read_first_batches
from trainrun.transform.compile_log import CompileLog
from trainrun.user_code import is_built_in


def build_compile_log(config: RunConfig, monitors: MetricLogger, phases: PhaseTimer) -> CompileLog | None:
    """Return the log of compilations, whose time does not count as training; None if nothing is compiled."""
    if config.trainer.compile.scope == "off" and not config.trainer.cuda_graphs:
        return None

    @contextmanager
    def time_as_compilation() -> Iterator[None]:
        with phases.measure(COMPILE), monitors.exclude_time():
            yield
            freeze_new_objects()  # or each validation would look at the compiler's 200,000 objects, 0.1 s and more

    return CompileLog(monitors.note, time_as_compilation)


def choose_item_counting(
    config: RunConfig, model: nn.Module, task: Any, parallel: Parallel, phases: PhaseTimer
) -> Counting:
    """Return how the items of a step are counted: by the task before the forward, or from its outputs."""
    if has_count_method(task):
        return CountBeforeForward(task)
    size = config.data.batch_size * config.trainer.accumulate_grad_batches
    return CountAfterForward(task, model, parallel, phases, size)


def choose_accumulation_function(retry: OomRetry, counting: Counting) -> Accumulate:
    """Return the function that runs forward and backward of a step's micro-batches.

    It repeats them if memory runs out, and counts items from outputs, if the run needs that.
    """
    accumulate = accumulate_with_retry if retry.acts else accumulate_gradients
    if isinstance(counting, CountBeforeForward):
        return accumulate
    return divide_by_output_counts(accumulate)


def build_step(
    config: RunConfig, task: Any, calls: TaskCalls, device: torch.device, log: CompileLog | None
) -> tuple[Step, Any]:
    """Return the function that makes a step, and the custom step object or None."""
    if config.step:
        own_step = build_own_step(config.step)
        return OwnStep(own_step), own_step
    if config.trainer.compile.scope != "step" and not config.trainer.cuda_graphs:
        return train_step, None
    from trainrun.step.whole import build_whole_step

    assert log is not None
    return build_whole_step(config, accumulate_gradients, task, calls.informed, device, log), None


def add_first_step_check(step: Step, wanted: bool, *parts: Any) -> Step:
    """Return the step, with a check before its first call if the task or the model is the user's."""
    if not wanted or all(map(is_built_in, parts)):
        return step
    from trainrun.training.checks.first_step import FirstStepCheck

    return FirstStepCheck(step)


def check_task_before_sharding(
    task: Any, model: nn.Module, train: Batches, parallel: Parallel, precision: Precision, counting: Counting,
    note: Callable[[str], None],
) -> None:  # fmt: skip
    """Make the checks of the first step on the first batch, while each rank still has the whole model."""
    if all(map(is_built_in, (task, model))) or not getattr(train, "may_be_read_before", True):
        return
    from trainrun.training.checks.contract import check_task
    from trainrun.training.checks.padding import check_padding

    run: Any = SimpleNamespace(
        model=model, task=task, optimizer=None, hooks=SimpleNamespace(by_key={}), parallel=parallel,
        precision=precision, counting=counting, own_step=None, monitors=SimpleNamespace(note=note),
    )  # fmt: skip
    data = read_first_batches(train)[0]
    if not is_built_in(task):
        check_task(run, data)
    check_padding(run, data)


def add_layer_table(config: RunConfig, step: Step) -> Step:
    """Return the step. If `monitor.summary` is set, it reports the table of layers after its first call."""
    if not config.monitor.summary:
        return step
    from trainrun.training.checks.layer_table import LayerTableStep

    is_eager = config.trainer.compile.scope == "off" and not config.trainer.cuda_graphs
    return LayerTableStep(step, is_eager)
