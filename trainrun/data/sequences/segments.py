"""What a model makes of packed rows: attention inside a segment, and targets that stay inside it."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100  # what torch's losses ignore


def segment_mask(segment_ids: Tensor, causal: bool = False) -> Tensor:
    """Which key a query may see, as `attn_mask` of `scaled_dot_product_attention`: (B, 1, T, T) bool.

    segment_ids: (B, T), 0 at padding; an attention mask (B, T) will do as well, as one segment a row.
    Padding sees padding, so that no row of the softmax is empty, and nothing else sees it.
    """
    ids = segment_ids.long()
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    return mask.tril() if causal else mask


def next_token_target(tokens: Tensor, segment_ids: Tensor) -> Tensor:
    """The token after each one, (B, T) int64; `IGNORED` at padding and where a segment ends.

    segment_ids: (B, T) as in `segment_mask`. For models that are given bare tokens and no targets.
    """
    ids = segment_ids.long()
    target = torch.full_like(tokens, IGNORED, dtype=torch.int64)
    inside = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
    target[:, :-1] = torch.where(inside, tokens[:, 1:].long(), IGNORED)
    return target
