"""Compare the validations of the points of a sweep at the same resource (step, epoch, sample, seconds), for pruners.

The unit of the resource is the position of the sweep's first validation. Validations at other positions are compared
at multiples of this unit. The value of a point is the mean over its jobs, which differ only in seed or fold. Optuna's
pruners decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainrun.sweep.jobs import Sweep
from trainrun.sweep.options import SweepOptions
from trainrun.sweep.results import EvaluationRows, objective_sign

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

REDUCTION = 3  # of each rung of asha and hyperband the best third goes on
ROUNDING = 1e-6  # of a unit


class Curves:
    """The validations of the jobs of a sweep, read while they train."""

    def __init__(self, sweep: Sweep, options: SweepOptions) -> None:
        self._sweep, self._options = sweep, options
        self._rows: dict[int, EvaluationRows] = {}
        self._values: dict[int, dict[int, float]] = {}  # of each job, by units
        self._unit = 0.0

    def read_point_values(self, jobs: Sequence[int]) -> dict[int, float]:
        """Return the values of a point by units; smaller is better. Failed jobs are left out of the mean."""
        states = {num: self._sweep.jobs[num].result.state for num in jobs}
        judged = [num for num in jobs if states[num] != "failed"]
        values = [self.read_job_values(num) for num in judged]
        return mean_values(values, [states[num] == "done" for num in judged])

    def read_job_values(self, num: int) -> Mapping[int, float]:
        """Return the values of a job by units; smaller is better. The first validation in each unit counts."""
        rows = self._rows.setdefault(num, self._open_rows(num))
        values = self._values.setdefault(num, {})
        for row in rows.read_new_rows() if self._options.pruner != "none" else ():
            units = self._units(compute_resource(row, rows.start, self._options.resource))
            if units > 0:
                values.setdefault(units, self._value(row, rows.start))
        return values

    def _open_rows(self, num: int) -> EvaluationRows:
        return EvaluationRows(self._sweep.folder / self._sweep.jobs[num].folder)

    def _value(self, row: dict[str, Any], start: dict[str, Any]) -> float:
        """Return the value of a row; NaN if it is not a number. Every pruner stops at NaN."""
        facts = start.get("facts", {})
        objective = self._options.objective
        name = objective[0].removeprefix("-") if objective else facts.get("monitor")
        sign = objective_sign(objective[0]) if objective else -1 if facts.get("mode") == "max" else 1
        value = row.get(name)
        return sign * float(value) if isinstance(value, (int, float)) else math.nan

    def _units(self, resource: float) -> int:
        """Return a resource in units. The first validation of the first job that has one is the unit."""
        for num in sorted(self._sweep.jobs) if not self._unit else ():
            rows = self._open_rows(num)
            if evaluations := rows.read_new_rows():
                self._unit = compute_resource(evaluations[0], rows.start, self._options.resource)
                break
        return math.floor(resource / self._unit + ROUNDING) if self._unit > 0 else 0


def mean_values(values: Sequence[Mapping[int, float]], are_done: Sequence[bool]) -> dict[int, float]:
    """Return the means over jobs by units. values: of each job, by units.

    There is a mean at each unit at which a job has a value and that all jobs have reached; jobs that are done need not
    have reached it. Each job counts with its newest value up to that unit. are_done: whether each job is done.
    """
    reached = [max(own, default=0) for own, is_done in zip(values, are_done, strict=True) if not is_done]
    furthest = min(reached, default=math.inf)
    means = {}
    for units in sorted(set().union(*values)):
        earlier = [[at for at in own if at <= units] for own in values]
        if units <= furthest and all(earlier):
            means[units] = fmean(own[max(ats)] for own, ats in zip(values, earlier, strict=True))
    return means


def compute_resource(row: dict[str, Any], start: dict[str, Any], resource: str) -> float:
    """Return the resource that a run had used at a row. start: the `start` row of its session."""
    facts = start.get("facts", {})
    if resource == "seconds":
        return (
            float(facts.get("seconds_before", 0.0))
            + float(row["time"])
            - float(start.get("time", row["time"]))
        )
    if resource == "step":
        return float(row["step"])
    per_epoch = 1 if resource == "epoch" else facts.get("num_train") or 0
    return float(row["epoch"] or 0.0) * per_epoch


def build_pruner(name: str) -> BasePruner:
    from optuna import pruners

    if name == "median":
        return pruners.MedianPruner()
    if name == "hyperband":
        return pruners.HyperbandPruner(reduction_factor=REDUCTION)
    return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
