"""Causal attention by the name of its kernel.

what: `flash` is torch's scaled_dot_product_attention; `fp32` the same on float32 copies; `plain` two matrix
    products around a softmax; `math` torch's own reference.
when: `auto` takes `plain` on a CPU in 16 bits where heads are narrower than 64, else `flash`.
source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

HALF_TYPES = (torch.float16, torch.bfloat16)
NARROW_HEAD = 64


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drop: float,
                     kernel: str) -> Tensor:  # fmt: skip
    """(B, heads, T, head width) each, and so the result. mask: which key a query may see, (B, 1, T, T) bool,
    causal itself; None lets every position see all before it."""
    if kernel == "auto":
        narrow = query.shape[-1] < NARROW_HEAD and query.dtype in HALF_TYPES
        kernel = "plain" if narrow and query.device.type == "cpu" else "flash"
    if kernel == "plain":
        return plain(query, key, value, mask, drop)
    causal = mask is None
    if kernel == "fp32" and query.dtype in HALF_TYPES:
        with torch.autocast(query.device.type, enabled=False):
            seen = scaled_dot_product_attention(query.float(), key.float(), value.float(), mask, drop, causal)
            return seen.to(query.dtype)
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(query, key, value, mask, drop, causal)
    return scaled_dot_product_attention(query, key, value, mask, drop, causal)


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drop: float) -> Tensor:
    """The softmax is float32 under autocast."""
    if mask is None:
        length = query.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype)
    return (dropout(weights, drop) if drop else weights) @ value
