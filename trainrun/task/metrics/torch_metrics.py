"""Metrics of `torchmetrics`, or classes with the same methods, by `_target_` in `task.metrics`.

what: if the states of a metric are sums of fixed shape, those of all batches are added in float64
    (`StepOutput.sums`). Any other metric gets all items at once, which the evaluation collects (`StepOutput.rows`).
    Both are exact however an evaluation is split.
when: metrics that `by_name.py` lacks. They get probabilities, not logits: torchmetrics would guess by their range,
    batch by batch. when not: millions of items with a metric that is not a sum: 8 bytes per score on the host of
    every rank.
source: torchmetrics 1.9 (https://lightning.ai/docs/torchmetrics); tested against one update with all items
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from trainrun.errors import ConfigError, PluginError

STATES, SCORES, TARGETS = "states of ", "all scores", "all targets"  # among sums and rows
TAKEN = ("loss", "acc", "seconds")


def split_metrics(metrics: Any) -> tuple[list[Any], dict[str, Any]]:
    """Split metrics such as `[f1, {kappa: OBJECT}, OBJECT]` into names and a dict of objects. Raise ConfigError."""
    names: list[Any] = []
    objects: dict[str, Any] = {}
    for item in metrics if isinstance(metrics, list | tuple) else [metrics]:
        if not isinstance(item, Mapping) and not is_metric(item):
            names.append(item)
            continue
        for name, metric in item.items() if isinstance(item, Mapping) else [(format_metric_name(item), item)]:
            if not is_metric(metric):
                raise ConfigError(
                    f"task.metrics.{name}: must be a metric with update, compute and reset, as "
                    f"task.metrics.{name}._target_=torchmetrics.classification.MulticlassCohenKappa"
                )
            if name in objects or name in TAKEN or not re.fullmatch(r"\w+", name):
                raise ConfigError(f"task.metrics.{name}: cannot be used as a name; choose another")
            objects[name] = metric
    if twice := [name for name in names if name in objects]:
        raise ConfigError(
            f"task.metrics: two metrics are named {twice[0]}; name one, as task.metrics='[{{mine: {{_target_: ...}}}}]'"
        )
    return names, objects


def is_metric(value: Any) -> bool:
    return all(
        callable(getattr(value, name, None)) for name in ("update", "compute", "reset")
    ) and not isinstance(value, Mapping)


def format_metric_name(metric: Any) -> str:
    """Return the name of a metric object: `MulticlassCohenKappa` becomes `cohen_kappa`."""
    name = re.sub(r"^(Binary|Multiclass|Multilabel)(?=[A-Z])", "", type(metric).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class TorchMetrics:
    """Metric objects by name. given: a description of the arguments of `update`, for messages."""

    def __init__(self, metrics: Mapping[str, Any], given: str) -> None:
        self._metrics, self._given = metrics, given
        self._summed = {name for name, metric in metrics.items() if has_additive_states(metric)}
        for metric in metrics.values():
            for part in metric.modules() if callable(getattr(metric, "modules", None)) else ():
                part.distributed_available_fn = is_distributed  # the runner adds up over ranks itself
            if callable(getattr(metric, "set_dtype", None)):
                metric.set_dtype(torch.float64)

    def check(self, scores: Tensor, target: Tensor) -> None:
        """Raise ConfigError for a metric that fails on these tensors, PluginError for one whose result is not a
        number.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few items
            for name, metric in self._metrics.items():
                try:
                    self._update_metric(metric, scores, target)
                except Exception as error:  # of somebody else's code
                    raise ConfigError(
                        f"task.metrics.{name}: {type(metric).__name__} does not take {self._given}: "
                        f"{read_first_line(error)}; "
                        "choose another metric"
                    ) from error
                with suppress(
                    ArithmeticError, IndexError, RuntimeError, ValueError
                ):  # too few for it, perhaps
                    flatten_metric(name, metric.compute())
                if name in self._summed and has_growing_states(metric):
                    self._summed.remove(name)

    def measure(self, scores: Tensor, target: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sums and rows of a batch."""
        sums = {}
        for name in sorted(self._summed):
            self._update_metric(self._metrics[name], scores, target)
            states = [value.double().flatten() for value in self._metrics[name].metric_state.values()]
            sums[STATES + name] = torch.cat([*states, states[0].new_zeros(2)])  # one number would be a metric
        if len(self._summed) == len(self._metrics):
            return sums, {}
        return sums, {SCORES: scores.cpu(), TARGETS: target.cpu()}

    def summarize(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics from the sums of an evaluation; {} for the sums of a training step."""
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            if STATES + name in sums:
                set_states(metric, sums[STATES + name])
            elif SCORES in sums:
                self._update_metric(metric, sums[SCORES], sums[TARGETS])
            else:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
                    values |= flatten_metric(name, metric.compute())
            except PluginError:
                raise
            except Exception as error:  # of somebody else's code
                raise PluginError(
                    f"task.metrics.{name}: {type(metric).__name__}.compute() failed: {read_first_line(error)}"
                ) from error
            metric.reset()
        return values

    @staticmethod
    def _update_metric(metric: Any, scores: Tensor, target: Tensor) -> None:
        """Reset a metric and update it with these items alone.

        A binary metric gets the probabilities of the second class.
        """
        if (
            scores.ndim == 2
            and scores.shape[1] == 2
            and target.ndim == 1
            and has_base_named(metric, "Binary")
        ):
            scores = scores[:, 1]
        metric.reset()
        if callable(getattr(metric, "to", None)):
            metric.to(scores.device)
        with torch.autocast(scores.device.type, enabled=False):
            metric.update(scores, target)


def is_distributed() -> bool:
    return False


def has_additive_states(metric: Any) -> bool:
    """Return whether all states of a metric are tensors that are summed over ranks, according to torchmetrics."""
    reductions = getattr(metric, "_reductions", None)
    if not reductions or next(metric.children(), None) is not None:
        return False
    sums = all(getattr(reduction, "__name__", "") == "dim_zero_sum" for reduction in reductions.values())
    return sums and all(isinstance(value, Tensor) for value in metric.metric_state.values())


def has_growing_states(metric: Any) -> bool:
    """Return whether an update changes the shapes of the states, as in R2Score of several outputs."""
    shapes = [value.shape for value in metric.metric_state.values()]
    metric.reset()
    return shapes != [value.shape for value in metric.metric_state.values()]


def set_states(metric: Any, flat: Tensor) -> None:
    """Set the states of a metric from the flat vector that `measure` made."""
    metric.reset()
    first = 0
    for name, value in metric.metric_state.items():
        part = flat[first : first + value.numel()].reshape(value.shape)
        setattr(metric, name, part.to(value))
        first += value.numel()


def read_first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def has_base_named(metric: Any, word: str) -> bool:
    return any(kind.__name__.startswith(word) for kind in type(metric).__mro__)


def flatten_metric(name: str, value: Any) -> dict[str, float]:
    """Return `{kappa: x}`, or `{kappa/3: x, ...}` for several numbers. Raise PluginError for other results."""
    if isinstance(value, Mapping):
        inner_numbers = [flatten_metric(f"{name}/{key}", item) for key, item in value.items()]
        return {key: number for item in inner_numbers for key, number in item.items()}
    is_numeric = isinstance(value, float | int) or hasattr(value, "__array__")  # a tensor, or of NumPy
    if is_numeric and (tensor := torch.as_tensor(value)).ndim < 2:
        return (
            {f"{name}/{i}": float(item_value) for i, item_value in enumerate(tensor)}
            if tensor.ndim
            else {name: float(value)}
        )
    raise PluginError(
        f"task.metrics.{name}: returns a {type(value).__name__} (a curve, a matrix), but a metric must be one number, "
        "or one per class; choose another"
    )
