"""Fields that the runner adds to a batch: noise for models that sample, and the numbers of the samples.

In a dict they are further entries. To any other batch they are attached (`trainrun.interfaces.batch_fields`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainrun.data.augment.draws import Draws
from trainrun.data.batch import attach_fields
from trainrun.data.split_batch import list_tensors
from trainrun.errors import DataError
from trainrun.limits import Count, Fraction


class LatentNoise:
    """The batch gets a field `noise` (B, size), standard normal, for a `forward` that names it.

    A model that draws from torch's generator itself draws other numbers when a batch is divided into
    micro-batches or among ranks; these stay. In evaluation a sample has the same noise every time.
    size: null, the default for a model without `latent_dim`, leaves the batch as it is.
    """

    random = False  # a bound that is validated needs its noise too

    def __init__(self, size: Count | None) -> None:
        self.size = size

    def __call__(self, batch: Any, draws: Draws) -> Any:
        if self.size is None:
            return batch
        return attach_fields(batch, {"noise": draws.normal("noise", self.size)})


class SampleNumbers:
    """The batch gets a field `index` (B,) int64: which samples of the data set it holds."""

    random = False

    def __call__(self, batch: Any, draws: Draws) -> Any:
        return attach_fields(batch, {"index": draws.numbers()})


class WordDropout:
    """The batch gets a field `word_dropout` (B, T + 1) bool: which tokens a decoder does not see in training.

    Tokens are (B, T). One column more than tokens, because a last target may follow them.
    """

    def __init__(self, rate: Fraction = 0.0) -> None:
        self.rate, self.random = rate, rate > 0

    def __call__(self, batch: Any, draws: Draws) -> Any:
        if not self.rate:
            return batch
        tokens = next(filter(is_token_batch, list_tensors(batch)), None)
        if tokens is None:
            raise DataError("drops tokens, and this batch has no whole numbers (B, T)")
        dropped = draws.uniform("words", tokens.shape[1] + 1) < self.rate
        return attach_fields(batch, {"word_dropout": dropped})


def is_token_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)
