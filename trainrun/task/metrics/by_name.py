"""Metrics by name (`task.metrics`), each computed once from all items of an evaluation.

what: the required sums are added over batches and ranks (`StepOutput.sums`), so a metric is exact however an
    evaluation is split. AUROC and average precision need all scores at once: these are collected
    (`StepOutput.rows`).
when: evaluations; training steps compute none of it. when not: AUROC of millions of items with many classes: 8 bytes
    x items x classes on the host of every rank.
source: the definitions of scikit-learn; a macro mean is over the classes that occur in targets or predictions.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainrun.errors import ConfigError
from trainrun.task.metrics.torch_metrics import TorchMetrics, split_metrics

GIVEN = "probabilities (N, C) and classes (N,)"  # of classes
OF_CLASSES = ("f1", "precision", "recall", "balanced_accuracy", "iou", "auroc", "average_precision", "top5")
OF_LABELS = (
    "f1", "f1_macro", "precision", "precision_macro", "recall", "recall_macro", "exact_match", "auroc",
    "average_precision",
)  # fmt: skip
OF_NUMBERS = ("mae", "mse", "rmse", "r2")
MICRO = ("precision", "recall")
RANKED = ("auroc", "average_precision")
PER_CLASS, ERRORS, SCORES, LABELS = "per_class", "errors", "scores", "labels"  # among sums and rows
CONSTANT = 1e-13  # variance of a target below this share of its mean square is rounding

Measured = tuple[dict[str, Tensor], dict[str, Tensor]]  # sums and rows


def split_metric_names(
    metrics: Any, known: Sequence[str], task: str, given: str
) -> tuple[tuple[str, ...], TorchMetrics | None]:
    """Split metrics into a tuple of names and the objects with a `_target_`. If `top5` is known, `topK` is for any
    K.

    given: the arguments of the objects' `update`, for messages. Raise ConfigError for an unknown name.
    """
    names, own_metrics = [metrics] if isinstance(metrics, str) else metrics, None
    if not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        names, objects = split_metrics(metrics)
        own_metrics = TorchMetrics(objects, f"{given}, as task={task} passes them")
    for name in names:
        is_top = "top5" in known and isinstance(name, str) and re.fullmatch(r"top[1-9]\d*", name)
        if name not in known and not is_top:
            near = difflib.get_close_matches(str(name), known, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"task.metrics={format_names(names)}: no metric {name} of task={task}; there are {', '.join(known)}"
                f"{' (or another number)' if 'top5' in known else ''}, or any class of torchmetrics by "
                f"_target_.{guess}"
            )
    return tuple(names), own_metrics


def format_names(names: Iterable[object]) -> str:
    return f"[{','.join(map(str, names))}]"


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics for one class per item. names: validated names. own: metric objects. per_class: also per class, as
    `f1/3`.
    """

    names: tuple[str, ...]
    own: TorchMetrics | None
    per_class: bool

    def check(self, logits: Tensor, target: Tensor) -> None:
        """Raise ConfigError for a topK that is always right, or for a metric object that fails on these tensors."""
        num_classes = logits.shape[1]
        if self.own is not None:
            self.own.check(logits.detach().double().softmax(1), target)
        for name in self.names:
            if name.startswith("top") and int(name[3:]) >= num_classes:
                raise ConfigError(
                    f"task.metrics={format_names(self.names)}: {name} of {num_classes} classes is always right; "
                    "choose a smaller number"
                )

    def measure(self, logits: Tensor, target: Tensor) -> Measured:
        """Return the sums and rows of a batch. logits: (N, C); target: (N,) classes."""
        classes, sums, rows = logits.shape[1], {}, {}
        for name in self.names:
            if name.startswith("top"):
                sums[name] = count_in_top(logits, target, int(name[3:]))
        if set(self.names) & {"f1", "precision", "recall", "balanced_accuracy", "iou"}:
            predicted = logits.argmax(1)
            right = target[predicted == target]
            counts = [torch.bincount(which, minlength=classes) for which in (right, predicted, target)]
            sums[PER_CLASS] = torch.stack(counts)
        if set(self.names) & set(RANKED):
            wide = logits.cpu().double()
            # of two classes one number, which no softmax rounds
            rows = {
                SCORES: wide[:, 1:] - wide[:, :1] if classes == 2 else wide.softmax(1),
                LABELS: target.cpu(),
            }
        if self.own is not None:
            more_sums, more_rows = self.own.measure(logits.double().softmax(1), target)
            sums, rows = sums | more_sums, rows | more_rows
        return sums, rows

    def summarize(self, sums: dict[str, Tensor], count: float) -> dict[str, float]:
        """Return the metrics from the sums of an evaluation; {} for the sums of a training step."""
        own_values = {} if self.own is None else self.own.summarize(sums)
        each: dict[str, Tensor] = {}
        if PER_CLASS in sums:
            each = compute_ratios(sums[PER_CLASS])
        if SCORES in sums:
            scores, labels = sums[SCORES], sums[LABELS]
            if scores.shape[1] == 1:
                scores = torch.cat([-scores, scores], 1)
            hot = labels[:, None] == torch.arange(scores.shape[1])
            each |= compute_ranking_scores(scores, hot, self.names)
        each = {name: each[name] for name in self.names if name in each}
        return (
            average_over_classes(each) | (format_class_metrics(each) if self.per_class else {}) | own_values
        )


@dataclass(frozen=True)
class LabelMetrics:
    """Metrics for several labels per item. names: validated names. own: metric objects. per_class: also of each
    label.
    """

    names: tuple[str, ...]
    own: TorchMetrics | None
    per_class: bool

    def check(self, logits: Tensor, labels: Tensor) -> None:
        """Raise ConfigError for a metric object that fails on these tensors."""
        if self.own is not None:
            self.own.check(logits.detach().double().sigmoid(), labels.long())

    def measure(self, logits: Tensor, labels: Tensor) -> Measured:
        """Return the sums and rows of a batch. logits: (B, C); labels: (B, C) bool."""
        predicted, sums, rows = logits > 0, {}, {}
        if "exact_match" in self.names:
            sums["exact_match"] = (predicted == labels).all(1).sum()
        sums[PER_CLASS] = torch.stack([(predicted & labels).sum(0), predicted.sum(0), labels.sum(0)])
        if set(self.names) & set(RANKED):
            rows = {SCORES: logits.cpu().double(), LABELS: labels.cpu()}
        if self.own is not None:
            more_sums, more_rows = self.own.measure(logits.double().sigmoid(), labels.long())
            sums, rows = sums | more_sums, rows | more_rows
        return sums, rows

    def summarize(self, sums: dict[str, Tensor], count: float) -> dict[str, float]:
        """Return the metrics from the sums of an evaluation; {} for the sums of a training step."""
        if PER_CLASS not in sums:
            return {}
        micro = compute_ratios(sums[PER_CLASS].sum(1, keepdim=True))
        results: dict[str, float] = {name: float(micro[name]) for name in MICRO if name in self.names}
        parts = compute_ratios(sums[PER_CLASS])
        each = {name: parts[name.removesuffix("_macro")] for name in self.names if name.endswith("_macro")}
        if SCORES in sums:
            each |= compute_ranking_scores(sums[SCORES], sums[LABELS], self.names)
        results |= average_over_classes(each)
        if self.per_class:
            each |= {name: parts[name] for name in ("f1", "precision", "recall") if name in self.names}
            results |= format_class_metrics(
                {name.removesuffix("_macro"): values for name, values in each.items()}
            )
        return results if self.own is None else results | self.own.summarize(sums)


@dataclass(frozen=True)
class NumberMetrics:
    """Metrics for real numbers. names: validated names. own: metric objects."""

    names: tuple[str, ...]
    own: TorchMetrics | None

    def check(self, output: Tensor, target: Tensor, padded: bool) -> None:
        """Raise ConfigError for a metric that fails on these tensors. padded: whether they are sequences of several
        lengths.
        """
        if padded and ("r2" in self.names or self.own is not None):
            raise ConfigError(
                f"task.metrics={format_names(self.names)}: r2 and metrics with _target_ are not defined for sequences "
                "of several lengths; use rmse"
            )
        if self.own is not None:
            self.own.check(*flatten_output(output.detach(), target))

    def measure(self, output: Tensor, target: Tensor, squares: Tensor | None = None) -> Measured:
        """Return the sums and rows of a batch; output and target: (B, ...).

        squares: 0-d, the sum over samples of mean squared errors, for padded sequences.
        """
        sums: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        if self.own is not None:
            sums, rows = self.own.measure(*flatten_output(output, target))
        if not {"mse", "rmse", "r2"} & set(self.names):
            return sums, rows
        if squares is not None:
            return {ERRORS: torch.nn.functional.pad(squares.reshape(1, 1), (0, 0, 0, 2))}, rows
        predicted, wanted = (item.cpu().double().reshape(len(item), -1) for item in (output, target))
        errors = (predicted - wanted).square()
        return sums | {ERRORS: torch.stack([errors.sum(0), wanted.sum(0), wanted.square().sum(0)])}, rows

    def summarize(self, sums: dict[str, Tensor], count: float) -> dict[str, float]:
        """Return the metrics from the sums of an evaluation; {} for a training step. r2 is the mean over the outputs
        of a sample.
        """
        own_values = {} if self.own is None else self.own.summarize(sums)
        if ERRORS not in sums:
            return own_values
        errors, total, squares = sums[ERRORS]
        mse = float(errors.mean()) / count if count else math.nan
        values = {"mse": mse, "rmse": math.sqrt(mse), "r2": math.nan}
        if count:
            spread = squares - total.square() / count
            varies = spread > CONSTANT * squares
            explained = 1 - errors / torch.where(varies, spread, 1.0)
            values["r2"] = float(torch.where(varies, explained, (errors == 0).double()).mean())
        return {name: values[name] for name in self.names if name in values} | own_values


def flatten_output(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as float64 (N, ...); (N,) for (N, 1), which `torchmetrics.KendallRankCorrCoef` 1.9 takes for one
    item.
    """
    if output.ndim == 2 and output.shape[1] == 1:
        output, target = output[:, 0], target[:, 0]
    return output.double(), target.double()


def count_in_top(logits: Tensor, target: Tensor, size: int) -> Tensor:
    """Return the number of targets among the `size` largest logits. Among equal logits the first class counts as
    larger.
    """
    target_logits = logits.gather(1, target[:, None])
    after = torch.arange(logits.shape[1], device=logits.device) > target[:, None]
    below = (logits < target_logits) | (
        (logits == target_logits) & after
    )  # not for NaN, which is never right
    return (below.sum(1) >= logits.shape[1] - size).sum()


def compute_ratios(counts: Tensor) -> dict[str, Tensor]:
    """Return the class metrics (C,) by name; NaN for a class that does not occur. counts: (3, C): right, predicted,
    present.
    """
    right, predicted, there = counts.double()
    occurs = predicted + there > 0

    def divide_where(part: Tensor, whole: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, part / whole.clamp(min=1), math.nan)

    return {
        "f1": divide_where(2 * right, predicted + there, occurs),
        "precision": divide_where(right, predicted, occurs),
        "recall": divide_where(right, there, occurs),
        "balanced_accuracy": divide_where(right, there, there > 0),
        "iou": divide_where(right, predicted + there - right, occurs),
    }


def compute_ranking_scores(scores: Tensor, hot: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Return AUROC and average precision (C,) of each class. scores: (N, C) float64; hot: (N, C) bool."""
    pairs = [compute_ranking(scores[:, i], hot[:, i]) for i in range(scores.shape[1])]
    columns = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    scores_of = {name: columns[:, i] for i, name in enumerate(RANKED) if name in names}
    return {name: values * math.nan if scores.isnan().any() else values for name, values in scores_of.items()}


def compute_ranking(scores: Tensor, positive: Tensor) -> tuple[float, float]:
    """Return AUROC and average precision of one class; NaN if undefined.

    Equal scores count half for AUROC, and are one threshold for precision. source: Mann and Whitney, 1947;
    scikit-learn's `average_precision_score`.
    """
    order = scores.argsort(descending=True)
    ends = torch.unique_consecutive(scores[order], return_counts=True)[1].cumsum(0) - 1
    hits = positive[order].double().cumsum(0)[ends]  # at each threshold
    misses = (ends + 1) - hits
    if not len(hits) or not hits[-1]:
        return math.nan, math.nan
    new_hits = hits.diff(prepend=hits.new_zeros(1))
    precision = float((new_hits * hits / (ends + 1)).sum() / hits[-1])
    if not misses[-1]:
        return math.nan, precision
    new_misses = misses.diff(prepend=misses.new_zeros(1))
    area = (new_misses * (hits - new_hits / 2)).sum() / (hits[-1] * misses[-1])
    return float(area), precision


def average_over_classes(each: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean of each metric over the classes that have a value."""
    return {name: float(values.nanmean()) for name, values in each.items()}


def format_class_metrics(each: dict[str, Tensor]) -> dict[str, float]:
    per_class_values = {name: values for name, values in each.items() if name != "balanced_accuracy"}
    return {
        f"{name}/{i}": value
        for name, values in per_class_values.items()
        for i, value in enumerate(values.tolist())
    }
