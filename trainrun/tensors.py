"""Small facts about tensors that models, tasks and data share."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)


def segment_mask(segment_ids: Tensor, causal: bool = False) -> Tensor:
    """Return which key a query may see, as `attn_mask` of `scaled_dot_product_attention`: (B, 1, T, T) bool.

    segment_ids: (B, T), 0 at padding; an attention mask (B, T) will do as well, as one segment a row.
    Padding sees padding, so that no row of the softmax is empty, and nothing else sees it.
    """
    ids = segment_ids.long()
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    return mask.tril() if causal else mask
