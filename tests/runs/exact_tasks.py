"""Tasks over the tokens of `exact_parts`: one loss and its metrics, written in every way that the contract allows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.interfaces import StepOutput

CLASSES = 3


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, logits and targets of all tokens."""
    x, y = batch
    logits, y = model(x).flatten(0, -2), y.flatten()
    return cross_entropy(logits, y, ignore_index=-100, reduction="sum"), logits, y


class Named:
    def __init__(self, class_dim: int = -1) -> None: ...


class Before(Named):
    def count(self, batch: Any) -> int:
        return int((batch[1] != -100).sum())

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(summed(model, batch)[0])


class After(Named):
    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(summed(model, batch)[0], count=int((batch[1] != -100).sum()))


class Mean(Named):
    """A mean, over a number that lies on the device."""

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        loss, _, y = summed(model, batch)
        count = (y != -100).sum()
        return StepOutput(loss_mean=loss / count, count=count)  # NaN where a batch has none


class Rich(After):
    """Right tokens and right samples, perplexity, and the F1 score of every class from a matrix of counts."""

    monitor = "f1"

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        loss, logits, y = summed(model, batch)
        real, right = y != -100, logits.argmax(1) == y
        whole = (right | ~real).view(batch[1].shape).all(1)
        places = (y * CLASSES + logits.argmax(1))[real]
        sums = {
            "acc": right.sum(),
            "sample_acc": (whole.sum(), len(whole)),
            "samples": float(len(whole)),
            "matrix": lambda: torch.bincount(places, minlength=CLASSES**2).view(CLASSES, CLASSES),
        }
        return StepOutput(loss, sums, count=int(real.sum()))

    def summarize(self, sums: dict[str, Any], count: float) -> dict[str, Any]:
        matrix = sums["matrix"]
        right, wrong = matrix.diagonal(), matrix.sum(0) + matrix.sum(1)
        assert sums["sample_acc"][1] == sums["samples"]
        return {"f1": (2 * right / wrong.clamp(min=1)).mean(), "perplexity": math.exp(sums["loss"] / count)}
