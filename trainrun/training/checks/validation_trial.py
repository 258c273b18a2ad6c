"""A trial of one validation batch before the first step, so that its faults are found before an epoch of training.

what: the first batch of the first validation set is evaluated without lasting effects. The trial finds metrics that
    settings name and no validation has, metrics with reserved names, data that cannot be read, and code that fails
    without gradients. What a task computes at the end of a validation is not tried: it may not exist for one batch.
when: every run with a validation and a custom model, task or data, or a setting that names a metric. when not:
    compiled models, whose compilation could take longer than the mistake; an iterable source, which would lose its
    first batch if it is a pipe; a trial that takes more than a minute. `trainer.check_task=false` allows a task that
    can validate only after its first training step.
source: Lightning's `num_sanity_val_steps`
gain: no epoch is lost. Cost: one batch.
"""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple

from trainrun.config.schema import RunConfig
from trainrun.config.validate import suggest_closest_name
from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.instantiate import named_nodes
from trainrun.interfaces import StepOutput
from trainrun.runtime.child_process import ChildError
from trainrun.sums import ReservedName, compute_metrics
from trainrun.training.components import Components
from trainrun.training.evaluate import compute_sums
from trainrun.training.recovery.oom import describe_out_of_memory
from trainrun.training.without_trace import TrialNotPossible, run_trial
from trainrun.user_code import format_error_with_line, is_users_class

LIMIT_SECONDS: Final = 60.0
OF_USERS = (ConfigError, DataError, PluginError)  # what the first validation would end with


class BatchTrial(NamedTuple):
    """The metric names of one batch, and why it could not be evaluated."""

    names: list[str]
    fault: str


def try_validation(run: Components) -> None:
    """Raise the error with which the first validation would end, and ConfigError for metrics that it lacks."""
    metrics = list_named_metrics(run.config)
    compiles = run.config.trainer.compile.scope in ("model", "regional")
    if run.val is None or compiles or not (metrics or has_users_code(run)):
        return
    if not getattr(run.val, "may_be_read_before", True):
        return
    trial = BatchTrial([], "")
    owners = (run.model, run.task, run.optimizer, *run.hooks.by_key.values())
    with contextlib.suppress(TrialNotPossible, ChildError):  # the validation is made when it is due
        trial = run_trial(
            lambda: try_one_batch(run), run.parallel.device, *owners, limit_seconds=LIMIT_SECONDS
        )
    # a rank may have no share of the first batch, and a trial may not be possible on one of them
    trials = [BatchTrial(*answer) for answer in run.parallel.gather(tuple(trial))]
    fault = next((trial.fault for trial in trials if trial.fault), "")
    if fault and run.config.trainer.check_task:
        raise PluginError(
            f"task: a validation fails: {fault}. If it works after a training step, use "
            "trainer.check_task=false"
        )
    names = next((trial.names for trial in trials if trial.names), [])
    for key, metric in metrics.items():
        if names and metric not in names:
            lacks_size = metric.endswith("/bpb") and "bytes_per_token" in run.config.task
            hint = " It needs task.bytes_per_token=..., that of your text." * lacks_size
            way_out = hint or suggest_closest_name(metric, names)
            raise ConfigError(f"{key}={metric}: no such metric; there are {', '.join(names)}.{way_out}")


def list_named_metrics(config: RunConfig) -> dict[str, str]:
    """Return the metrics that settings name, by the key of the setting."""
    stopping = config.trainer.early_stopping
    named = {
        "checkpoint.monitor": config.checkpoint.monitor,
        "trainer.early_stopping.monitor": stopping.monitor if stopping.enabled else None,
        "scheduler.metric": (config.scheduler or {}).get("metric"),
    }
    for name, node in named_nodes(config.scheduler).items():
        named[f"scheduler.{name}.metric"] = node.get("metric")
    return {key: metric for key, metric in named.items() if metric is not None}


def has_users_code(run: Components) -> bool:
    """Return whether the model, the task or the validation data is the user's code."""
    data = run.config.data
    targets = [str(node.get("_target_")) for node in (data.val, data.train) if isinstance(node, dict)]
    if any(not target.startswith("trainrun.") for target in targets):
        return True
    return any(is_users_class(type(part)) for part in (run.task, *run.model.modules()))


def try_one_batch(run: Components) -> BatchTrial:
    """Evaluate one batch. Raise the errors that name a setting; return others as a text, except out of memory."""
    try:
        return BatchTrial(evaluate_one_batch(run), "")
    except OF_USERS:
        raise
    except Exception as error:
        is_no_output = isinstance(error, AttributeError) and error.name in StepOutput.__slots__
        if is_no_output or describe_out_of_memory(error):  # the first step says what the task must return
            return BatchTrial([], "")
        return BatchTrial([], format_error_with_line(error))


def evaluate_one_batch(run: Components) -> list[str]:
    """Evaluate one batch and return its sorted metric names; [] on a rank without a share of the batch."""
    assert run.val is not None
    split, batches = next(iter(run.validation)), run.val.epoch(0)
    try:
        with run.evaluating() as model:
            batch = next(batches, None)
            if batch is None:
                return []
            run.task_calls.start_evaluation(model, split)
            sums, rows, late = compute_sums(run, model, batch)
            count = float(batch.count_items(run.task) or late)
    finally:
        with contextlib.suppress(AttributeError):  # a stream that is no generator has nothing to close
            batches.close()  # type: ignore[attr-defined]
    try:
        metrics = compute_metrics({name: total.cpu() for name, total in sums.items()}, count, run.task, rows)
    except ReservedName:
        raise
    except Exception:  # a summary of one batch may not exist, as an AUROC of one class
        return []
    return sorted(f"{split}/{name}" for split in run.validation for name in metrics)
