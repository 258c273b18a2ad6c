"""Layers that learn their sizes from their first input, as `nn.LazyLinear`: they get them before anything asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

WAY_OUT = "call it once at the end of its constructor"


def give_sizes(model: nn.Module, shape: Sequence[int] | None) -> None:
    """Send one sample of zeros through the model, in evaluation mode; the new weights are drawn from the global seed.

    shape: of one input, without the batch. ValueError: it is not known, or zeros do not go through.
    """
    if shape is None:
        raise ValueError(
            f"model: {type(model).__name__} has lazy layers, and the data does not tell the shape of an "
            f"input; {WAY_OUT}"
        )
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *shape))
    except Exception as error:
        raise ValueError(
            f"model: {type(model).__name__} has lazy layers, and zeros {(1, *shape)} do not go through it ({error}); "
            f"{WAY_OUT}"
        ) from error
    model.train(training)
