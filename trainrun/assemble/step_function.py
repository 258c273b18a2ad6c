"""What makes a step: `train_step`, or the same in one graph; and what compiling costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError, PluginError
from trainrun.instantiate import bind_faults, build, locate
from trainrun.interfaces import Counting, Parallel, counts_before
from trainrun.monitor.metric_logger import MetricLogger
from trainrun.runtime.collector import freeze_more
from trainrun.timing.phases import COMPILE, PhaseTimer
from trainrun.training.checks.user_state import check_halves
from trainrun.training.components import Accumulate, Step
from trainrun.training.recovery.oom import OomRetry
from trainrun.training.task_calls import TaskCalls
from trainrun.training.train_step import (
    CountedBefore,
    accumulate_gradients,
    accumulate_with_retry,
    train_step,
)
from trainrun.transform.compile_log import CompileLog

if TYPE_CHECKING:
    from trainrun.timing.cuda_events import DeviceTimes


def build_log(monitors: MetricLogger, phases: PhaseTimer) -> CompileLog:
    """Compiling is booked on its own account, and is no training time in the rows."""

    @contextmanager
    def booked() -> Iterator[None]:
        with phases.on(COMPILE), monitors.paused():
            yield
            freeze_more()  # or each validation would look at the compiler's 200,000 objects, 0.1 s and more

    return CompileLog(monitors.note, booked)


def build_counting(
    config: RunConfig, model: nn.Module, task: Any, parallel: Parallel, phases: PhaseTimer
) -> Counting:
    """ConfigError: the count comes with the output, and a setting needs it before."""
    if counts_before(task):
        return CountedBefore(task)
    if config.trainer.optimizer_in_backward:
        raise ConfigError(
            f"trainer.optimizer_in_backward=true: needs the count of a batch before its forward, and "
            f"{type(task).__name__} has no method count(batch); add it, or leave this setting out"
        )
    from trainrun.training.item_count import CountedAfter

    size = config.data.batch_size * config.trainer.accumulate_grad_batches
    return CountedAfter(task, model, parallel, phases, size)


def build_accumulate(retry: OomRetry, counting: Counting) -> Accumulate:
    """Forward and backward of a window, with what this run does about memory that ends and counts that come late."""
    accumulate = accumulate_with_retry if retry.acts else accumulate_gradients
    if isinstance(counting, CountedBefore):
        return accumulate
    from trainrun.training.item_count import divided_late

    return divided_late(accumulate)


def build_step(
    config: RunConfig, own_step: Any, task: Any, calls: TaskCalls, device: torch.device, log: CompileLog
) -> Step:
    """own_step: the user's own, or None."""
    if own_step:
        from trainrun.training.own_step import OwnStep

        return OwnStep(own_step)
    if config.trainer.compile.scope != "step" and not config.trainer.cuda_graphs:
        return train_step
    from trainrun.step.whole import build_whole_step

    return build_whole_step(config, accumulate_gradients, task, calls.informed, device, log)


def build_own_step(config: RunConfig) -> Any:
    """A function, or an object of a class, that the config names in place of `train_step`; None if it names none."""
    node = config.step
    if not node:
        return None
    target = locate(node["_target_"], "step")
    if faults := bind_faults(node, "step", [] if inspect.isclass(target) else ["run", "micro_batches"]):
        raise ConfigError(*faults)
    if inspect.isclass(target):
        own = build(node, "step")
    else:
        own = build(node | {"_partial_": True}, "step") if len(node) > 1 else target
    if not callable(own):
        raise PluginError(
            f"step._target_={node['_target_']}: must be a function (run, micro_batches) -> StepReport, or a class "
            "whose objects are called so"
        )
    check_halves(own, "step")
    return own


def checked_step(step: Step, wanted: bool, task: Any) -> Step:
    """The step, before whose first the task is looked at, if it is the user's own."""
    if not wanted or type(task).__module__.startswith("trainrun."):
        return step
    from trainrun.training.checks.contract import Checked

    return Checked(step)


def seen_step(
    config: RunConfig,
    step: Step,
    device: torch.device,
    times: DeviceTimes | None,
    note: Callable[[str], None],
) -> Step:
    """The step, timed on its device now and then, and watched where that was asked for; on a CPU the step itself."""
    if times is not None:
        from trainrun.timing.cuda_events import sampled

        step = sampled(step, times)
    if not config.monitor.sync_debug:
        return step
    if device.type != "cuda":
        raise ConfigError(
            f"monitor.sync_debug=true: looks for what makes the host wait for a CUDA device, and this run is on "
            f"{device.type}; use monitor.sync_debug=false"
        )
    from trainrun.training.checks.sync_debug import Watched

    return Watched(step, note)
