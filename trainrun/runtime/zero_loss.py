"""A loss of 0 that reaches every parameter: for a batch of which nothing is to be learned."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding


def zero_loss(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return a 0-d zero whose backward adds zeros to the gradients of the parameters, from the last to the first."""
    total = torch.zeros((), device=next(model.parameters()).device, requires_grad=True)
    tables = [layer for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    sparse = {table.weight for table in tables if table.sparse}
    for parameter in parameters:
        if parameter in sparse:  # of an embedding, whose gradient is sparse
            some = embedding(torch.zeros(1, dtype=torch.long, device=total.device), parameter, sparse=True)
        else:
            some = parameter
        total = total + some.sum().real.to(total) * 0.0
    return total
