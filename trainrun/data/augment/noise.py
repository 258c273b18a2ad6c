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
    """Add a field `noise` (B, size) to the batch, standard normal, for a `forward` with an argument `noise`.

    If a model uses torch's generator itself, its random numbers change when a batch is divided into micro-batches
    or among ranks. The numbers of this field do not change. In evaluation a sample has the same noise every time.
    size: null, the default for a model without `latent_dim`, adds no field.
    """

    random = False  # a bound that is validated needs its noise too

    def __init__(self, size: Count | None) -> None:
        self.size = size

    def __call__(self, batch: Any, draws: Draws) -> Any:
        if self.size is None:
            return batch
        return attach_fields(batch, {"noise": draws.normal("noise", self.size)})


class SampleNumbers:
    """Add a field `index` (B,) int64 to the batch: the numbers of its samples in the data set."""

    random = False

    def __call__(self, batch: Any, draws: Draws) -> Any:
        return attach_fields(batch, {"index": draws.numbers()})


class WordDropout:
    """Add a field `word_dropout` (B, T + 1) bool to the batch: the tokens that a decoder does not see in training.

    Tokens are (B, T). There is one more column, because a last target may follow them.
    """

    def __init__(self, rate: Fraction = 0.0) -> None:
        self.rate, self.random = rate, rate > 0

    def __call__(self, batch: Any, draws: Draws) -> Any:
        if not self.rate:
            return batch
        tokens = next(filter(is_token_batch, list_tensors(batch)), None)
        if tokens is None:
            raise DataError("needs tokens (B, T) as whole numbers, and this batch has none")
        dropped = draws.uniform("words", tokens.shape[1] + 1) < self.rate
        return attach_fields(batch, {"word_dropout": dropped})


def is_token_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)
