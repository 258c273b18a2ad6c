"""Causal attention by the name of its kernel.

what: `flash` is torch's scaled_dot_product_attention; `fp32` the same on float32 copies; `plain` two matrix
    products around a softmax; `math` torch's own reference.
when: `auto` is what a runner measured (`trainrun.start.attention_kernel`) and put in its place; until then, and
    without one, a rule: `flash`, but on a CPU in 16 bits `plain` where heads are narrower than 64, or where it
    multiplies without AMX and a sequence is shorter than 1024.
when not: longer sequences in `plain`, whose table of all pairs costs memory by the square of the length.
gain: bfloat16 without AMX (AMD EPYC, 1 thread, torch 2.13; `python scripts/bench_attention.py`, on a machine that was
    not quiet): of 20 shapes from 16x64 to 128x1024 `plain` was the best on 14 and took at most 1.53x, `flash` took
    1.25x to 16x on all but two (narrow, 1024); in float32 `flash` was the best on 19 and took 1.23x on one.
    With AMX (Intel Xeon, 2 threads), against float32: a small GPT with heads of 32 is 0.77x as fast with `flash` and
    1.40x with `plain` (1 thread 0.84x, 1.58x), with heads of 64 it is 2.2x with `flash`.
source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

HALF_TYPES = (torch.float16, torch.bfloat16)
NARROW_HEAD = 64
LONG = 1024


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drop: float,
                     kernel: str, tiles: bool = True) -> Tensor:  # fmt: skip
    """(B, heads, T, head width) each, and so the result. mask: which key a query may see, (B, 1, T, T) bool,
    causal itself; None lets every position see all before it. tiles: what `has_tiles` says, asked once."""
    if kernel == "auto":
        length, width = query.shape[-2:]
        kernel = fastest_kernel(query.device.type, query.dtype, length, width, tiles)
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


def has_tiles() -> bool:
    """Whether this CPU has AMX, without which torch's fused kernel is slow in 16 bits."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    probe = getattr(torch.cpu, "_is_amx_tile_supported", bool)  # torch before 2.11
    return bool(capabilities.get("amx_tile") or probe())


def fastest_kernel(device: str, dtype: torch.dtype, length: int, width: int, tiles: bool) -> str:
    """The rule. length, width: of sequences and heads."""
    if device != "cpu" or dtype not in HALF_TYPES:
        return "flash"
    if tiles:
        return "plain" if width < NARROW_HEAD else "flash"
    return "plain" if length < LONG else "flash"


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, drop: float) -> Tensor:
    """Scale and mask come with the first product."""
    batch, heads, length, width = query.shape
    if mask is None:
        order = torch.arange(length, device=query.device)
        hidden = order > order[:, None]
    else:
        hidden = ~mask.expand(batch, heads, length, length).reshape(-1, length, length)
    unseen = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    query, key, value = (part.reshape(-1, length, width) for part in (query, key, value))
    scores = torch.baddbmm(unseen, query, key.transpose(1, 2), alpha=width**-0.5)
    weights = scores.softmax(-1).to(value.dtype)
    out = torch.bmm(dropout(weights, drop) if drop else weights, value)
    return out.view(batch, heads, length, width)
