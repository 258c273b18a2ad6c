"""Small functions and facts of tensors that models, tasks, data and ranks share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

WHOLE_SHAPE = "_whole_shape"  # the attribute of a parameter that is a part of a larger tensor
HALF_TYPES = (torch.float16, torch.bfloat16)


def segment_mask(segment_ids: Tensor, causal: bool = False) -> Tensor:
    """Return which key a query may see, as `attn_mask` of `scaled_dot_product_attention`: (B, 1, T, T) bool.

    segment_ids: (B, T), 0 at padding; an attention mask (B, T) will do as well, as one segment a row.
    Padding sees padding, so that no row of the softmax is empty, and nothing else sees it.
    """
    ids = segment_ids.long()
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    return mask.tril() if causal else mask


def whole_shape(parameter: Tensor) -> list[int]:
    """Return the shape of a parameter; of one that is a part of a larger tensor the shape of that."""
    return list(getattr(parameter, WHOLE_SHAPE, parameter.shape))


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
