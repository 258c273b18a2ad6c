"""Metric sums of a task: they are added in float64 over batches and ranks, and divided once, at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trainrun.errors import PluginError
from trainrun.interfaces import Parallel, Sums

LOSS = "loss"  # the name of the sum that is the loss itself
OWN = "\0"  # before a name: the count of a sum that is over other items than the loss
ITEMS = "\1"  # before a name: the items of the training steps that the sum is over
LOSSES = "\2"  # the sum of the loss over all training steps, whose other sums may be of fewer


class ReservedName(PluginError):
    """The error that a metric of a task has a reserved name."""


def flatten_sums(sums: Sums, task: Any) -> dict[str, Tensor]:
    """Return a float64 tensor for each sum and for the count of each pair. Sums given as functions are
    called.

    Raise PluginError if a value is not a number, a tensor, or a pair of these.
    """
    flat: dict[str, Tensor] = {}
    for name, value in sums.items():
        if callable(value):
            value = value()
        if isinstance(value, tuple) and len(value) == 2:
            flat[OWN + name] = _convert_to_float64(value[1], name, task)
            value = value[0]
        flat[name] = _convert_to_float64(value, name, task)
    return flat


def check_metric_names(names: Iterable[str], task: Any) -> None:
    """Raise ReservedName if a task names a metric like the loss, whose value it would replace."""
    if LOSS in names:
        raise ReservedName(
            f'task: {type(task).__name__} has a metric "{LOSS}", but this name is used for the loss; choose '
            "another name"
        )


def _convert_to_float64(value: Any, name: str, task: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.requires_grad:
            value = value.detach()
        dtype = torch.float64 if value.device.type != "mps" else torch.float32
        # a copy, since the task may write its next sum into the same tensor; `to(copy=True)` takes 10 us in place of 6
        wide: Tensor = value.clone() if value.dtype is dtype else value.to(dtype)
        return wide
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PluginError(
            f'task: {type(task).__name__}.step() gave sums["{name}"] as a {type(value).__name__}; it must be a number, '
            "a tensor, a pair (sum, count), or a function that makes one of these"
        ) from error


def add_sums(sums: dict[str, Tensor], new: Sums, task: Any, counts: bool = True) -> None:
    """Add the sums `new` to `sums` in place. Raise PluginError if a shape differs from before.

    counts: False adds zeros of the same names and shapes.
    """
    add_flat_sums(sums, flatten_sums(new, task), task, counts)


def add_flat_sums(sums: dict[str, Tensor], new: Mapping[str, Tensor], task: Any, counts: bool = True) -> None:
    """Add sums that `flatten_sums` returned to `sums` in place. counts: False adds zeros."""
    for name, value in new.items():
        before, value = sums.get(name), value if counts else torch.zeros_like(value)
        if before is not None and before.shape != value.shape:
            raise PluginError(describe_changed_shape(task, name, value, before))
        sums[name] = value if before is None else before + value


def describe_changed_shape(task: Any, name: str, value: Tensor, before: Tensor) -> str:
    """Return the message about a sum whose shape differs from before."""
    return (
        f'task: {type(task).__name__}.step() gave sums["{name.removeprefix(OWN)}"] of shape '
        f"{tuple(value.shape)}, and {tuple(before.shape)} before; a sum must have the same shape in every batch"
    )


def add_by_name(sums: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of both mappings added by name."""
    return {**sums, **{name: sums[name] + value if name in sums else value for name, value in more.items()}}


def sum_all_ranks(
    parallel: Parallel, sums: Mapping[str, Tensor], numbers: list[float]
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the sums and numbers, each added over all ranks. The host waits for the device.

    A sum that only some ranks have counts as zero on the others. Raise PluginError if its shapes differ.
    """
    if parallel.world_size == 1:
        return {name: sums[name].to("cpu", torch.float64) for name in sorted(sums)}, numbers
    shapes = {name: tuple(sums[name].shape) for name in sorted(sums)}
    shapes = _merge_shapes(parallel.gather(shapes))
    rows = [
        sums[name].reshape(-1).tolist() if name in sums else [0.0] * math.prod(shape)
        for name, shape in shapes.items()
    ]
    totals = parallel.sum_over_ranks([*chain.from_iterable(rows), *numbers])
    totals_of, first = {}, 0
    for (name, shape), row in zip(shapes.items(), rows, strict=True):
        flat = torch.tensor(totals[first : first + len(row)], dtype=torch.float64)
        totals_of[name], first = flat.reshape(shape), first + len(row)
    return totals_of, totals[first:]


def _merge_shapes(ranks: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in chain.from_iterable(rank.items() for rank in ranks):
        if shapes.setdefault(name, shape) != shape:
            raise PluginError(
                f'task: sums["{name.removeprefix(OWN)}"] has shape {shape} on one rank, and {shapes[name]} on another; '
                "a sum must have the same shape in every batch"
            )
    return dict(sorted(shapes.items()))


def gather_rank_rows(
    parallel: Parallel, rows: Mapping[str, list[Tensor]], names: list[str]
) -> dict[str, Tensor]:
    """Return the rows of all ranks, in the order of the ranks. names: the same on every rank; some may lack rows."""
    joined = {}
    for name in names:
        parts = parallel.gather(torch.cat(rows[name]) if name in rows else None)
        joined[name] = torch.cat([part for part in parts if part is not None])
    return joined


def compute_metrics(
    sums: Mapping[str, Tensor], count: float, task: Any, rows: Mapping[str, Tensor] = MappingProxyType({}),
    items: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:  # fmt: skip
    """Return the metrics: sums divided by their counts, and the results of the task's `summarize`.

    items: counts of single sums that differ from `count`. Raise PluginError if a sum with several numbers has no
        `summarize`, or if `summarize` returns anything but numbers by new names.
    """
    names = [name for name in sums if not name.startswith(OWN)]
    metrics = {
        name: _divide_or_nan(float(sums[name]), float(sums.get(OWN + name, items.get(name, count))))
        for name in names
        if sums[name].numel() == 1
    }
    summarize = getattr(task, "summarize", None)
    if summarize is None:
        if several := [name for name in names if name not in metrics]:
            raise PluginError(
                f'task: {type(task).__name__}.step() gave sums["{several[0]}"] of shape '
                f"{tuple(sums[several[0]].shape)}; only its method summarize(sums, count) -> {{name: value}} can make "
                "a metric of several numbers: add one, or give their sum"
            )
        return _check_result_names(metrics, task)
    pairs = {name: (sums[name], sums[OWN + name]) if OWN + name in sums else sums[name] for name in names}
    summary = _convert_to_numbers(summarize({**pairs, **rows}, count), task)
    check_metric_names(summary, task)
    return _check_result_names(metrics | summary, task)


def compute_train_metrics(sums: Mapping[str, Tensor], task: Any) -> dict[str, float]:
    """Return the metrics of training steps: each sum divided by the items of the steps that computed it.

    `loss` covers all steps. sums: the sums of the task, and `LOSSES`, each with its `ITEMS`.
    """
    items = {name.removeprefix(ITEMS): float(sums[name]) for name in sums if name.startswith(ITEMS)}
    loss = {"loss": float(sums[LOSSES]) / items[LOSSES]} if items.get(LOSSES) else {}
    own_sums = {name: value for name, value in sums.items() if not name.startswith((ITEMS, LOSSES))}
    measured = {name: items.get(name, 0.0) for name in own_sums}
    if not any(measured.values()):
        return loss
    metrics = compute_metrics(own_sums, max(measured.values()), task, items=measured)
    return loss | {name: value for name, value in metrics.items() if name != "loss"}


def _check_result_names(metrics: dict[str, float], task: Any) -> dict[str, float]:
    if reserved := [name for name in metrics if name.rpartition("/")[2] == "seconds"]:
        raise PluginError(
            f'task: {type(task).__name__} has a metric "{reserved[0]}", but this name is used for the validation time; '
            "choose another name"
        )
    return metrics


def _convert_to_numbers(values: Any, task: Any) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in dict(values).items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise PluginError(
            f"task: {type(task).__name__}.summarize() must return {{name: number}}: {str(error).partition(chr(10))[0]}"
        ) from error


def _divide_or_nan(total: float, count: float) -> float:
    return total / count if count else math.nan
