"""What comes to a batch besides inputs and targets: noise that a model draws with, and the numbers of the samples."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from trainrun.data.augment.draws import Draws
from trainrun.errors import DataError
from trainrun.limits import Count, Fraction


class LatentNoise:
    """The batch becomes a dict with `noise` (B, size), standard normal, for a `forward` that names it.

    A model that draws from torch's generator itself draws other numbers when a batch is divided into
    micro-batches or among ranks; these stay. In evaluation a sample has the same noise every time.
    size: null, the default for a model without `latent_dim`, leaves the batch as it is.
    """

    random = False  # a bound that is validated needs its noise too

    def __init__(self, size: Count | None) -> None:
        self.size = size

    def __call__(self, batch: Any, draws: Draws) -> Any:
        return batch if self.size is None else with_field(batch, "noise", draws.normal("noise", self.size))


class SampleNumbers:
    """The batch becomes a dict with `index` (B,) int64: which samples of the data set it holds."""

    random = False

    def __call__(self, batch: Any, draws: Draws) -> Any:
        return with_field(batch, "index", draws.numbers())


class WordDropout:
    """The batch gets `word_dropout` (B, T + 1) bool: tokens of (B, T) that a decoder does not get to see in training.

    One column more than tokens, because a last target may follow them.
    """

    def __init__(self, rate: Fraction = 0.0) -> None:
        self.rate, self.random = rate, rate > 0

    def __call__(self, batch: Any, draws: Draws) -> Any:
        if not self.rate:
            return batch
        named = by_name(batch)
        tokens = next((value for value in named.values() if is_tokens(value)), None)
        if tokens is None:
            raise DataError("drops tokens, and this batch has no whole numbers (B, T)")
        return with_field(batch, "word_dropout", draws.uniform("words", tokens.shape[1] + 1) < self.rate)


def is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)


def with_field(batch: Any, name: str, value: Tensor) -> Any:
    """A mapping of the same kind with one more field; the batch itself is not changed."""
    named = copy.copy(by_name(batch))
    named[name] = value
    return named


def by_name(batch: Any) -> MutableMapping[str, Any]:
    """DataError: the batch has another form."""
    if isinstance(batch, MutableMapping):
        return batch
    if isinstance(batch, Tensor):
        return {"input": batch}
    if isinstance(batch, tuple | list) and len(batch) in (1, 2):
        return dict(zip(("input", "target"), batch, strict=False))
    raise DataError(f"needs inputs, (inputs, target) or a dict, and this batch is a {type(batch).__name__}")
