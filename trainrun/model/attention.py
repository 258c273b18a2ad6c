"""Causal attention with a choice of kernels.

what: `flash` is torch's scaled_dot_product_attention, and `fp32` the same on float32 copies. `plain` is two matrix
    products around a softmax. `math` is torch's reference implementation.
when: `auto` chooses `flash`, except for 16-bit sequences shorter than 512 on a CPU, for which it chooses `plain`.
    `trainrun autotune --allow numeric` measures the fastest kernel on your machine. when not: `plain` for long
    sequences. It stores a table of all pairs for the backward pass: in 16 bits 2 bytes per pair, in every head,
    layer and sample.
gain: times relative to the best kernel, in bfloat16 with one thread on an Intel Xeon with AMX, torch 2.13. Of 16
    shapes from 16x64 to 128x256, `plain` was the best on 12 and took at most 1.31x; `flash` took 1.4x to 7x. With
    512 positions (12 shapes): `plain` at most 1.8x, `flash` at most 1.6x. With 768 (8 shapes): 2.4x and 1.4x. With
    1024 (4 shapes): 2.1x and 1.3x. Without AMX (AMD EPYC, not quiet) `flash` took 1.25x to 16x, except for two
    narrow shapes with 1024. In float32 `flash` is the best, or within 1.2x of it. Whole steps with AMX and two
    threads, compared with float32: heads of 64, context 256, 2.0x as fast with `flash` and 2.5x with `plain`; heads
    of 32, context 64, 0.84x and 1.48x.
source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

from trainrun.tensors import HALF_TYPES

LONG = 512


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drop: float,
                     kernel: str) -> Tensor:  # fmt: skip
    """Return causal attention, (B, heads, T, head width), for query, key and value of that shape.

    mask: (B, 1, T, T) bool, True where a query may attend to a key; None for all earlier positions. With a cache
        there are more keys than queries.
    """
    if key.shape[-2] != query.shape[-2]:
        return scaled_dot_product_attention(query, key, value, mask, drop)
    if kernel == "auto":
        kernel = fastest_kernel(query.device.type, query.dtype, query.shape[-2])
    if kernel == "plain":
        return plain_attention(query, key, value, mask, drop)
    causal = mask is None
    if kernel == "fp32" and query.dtype in HALF_TYPES:
        with torch.autocast(query.device.type, enabled=False):
            seen = scaled_dot_product_attention(query.float(), key.float(), value.float(), mask, drop, causal)
            return seen.to(query.dtype)
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(query, key, value, mask, drop, causal)
    return scaled_dot_product_attention(query, key, value, mask, drop, causal)


def fastest_kernel(device: str, dtype: torch.dtype, length: int) -> str:
    """Return the kernel that the rule of `auto` chooses for sequences of this length."""
    return "plain" if device == "cpu" and dtype in HALF_TYPES and length < LONG else "flash"


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drop: float) -> Tensor:
    """Compute attention as two matrix products. The mask and the scale are applied to the first product."""
    batch, heads, length, width = query.shape
    if mask is None:
        unseen = query.new_full((length, length), float("-inf")).triu_(1)
    else:
        unseen = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    query, key, value = (part.reshape(-1, length, width) for part in (query, key, value))
    scale = width**-0.5
    if mask is None:
        scores = torch.baddbmm(unseen, query, key.transpose(1, 2), alpha=scale)
    else:  # other ones for every sample, the same for its heads
        products = torch.bmm(query * scale, key.transpose(1, 2)).view(batch, heads, length, length)
        scores = (products + unseen).view(-1, length, length)
    weights = scores.softmax(-1).to(value.dtype)
    out = torch.bmm(dropout(weights, drop) if drop else weights, value)
    return out.view(batch, heads, length, width)
