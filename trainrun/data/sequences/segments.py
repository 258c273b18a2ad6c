"""What a model makes of packed rows: attention inside a segment."""

from __future__ import annotations

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
