"""A decoder-only transformer: from tokens to logits of the next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from trainrun.limits import BelowOne, Count
from trainrun.model.attention import causal_attention
from trainrun.model.choices import GptSize, Kernel, Positions
from trainrun.tensors import segment_mask

# layers, width, heads; the numbers are parameters with 256 tokens, the last one's with 50,257
SIZES: dict[str, tuple[int, int, int]] = {
    "0.8M": (4, 128, 2),
    "3M": (4, 256, 4),
    "11M": (6, 384, 6),
    "25M": (8, 512, 8),
    "124M": (12, 768, 12),
}
ROTARY_BASE = 10_000.0
Cache = dict[Any, Any]  # keys and values so far, (B, heads, T, head width), of each layer


class Attention(nn.Module):
    """Causal self-attention over (B, T, width)."""

    def __init__(self, width: int, heads: int, dropout: float, kernel: str) -> None:
        super().__init__()
        self.heads, self.dropout, self.kernel = heads, dropout, kernel
        self.into = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor | None, turn: tuple[Tensor, Tensor] | None, cache: Cache | None = None
    ) -> Tensor:
        batch, length, width = x.shape
        parts = self.into(x).view(batch, length, 3, self.heads, width // self.heads)
        pair, value = parts.permute(2, 0, 3, 1, 4).split((2, 1))
        if turn is not None:
            pair = rotate_pairs(
                pair.contiguous(), *turn
            )  # it is read three times: gathering it first is faster
        (query, key), value = pair.unbind(), value.squeeze(0)
        if cache is not None:
            if self in cache:
                key, value = (torch.cat(both, 2) for both in zip(cache[self], (key, value), strict=True))
            cache[self] = key, value
        drop = self.dropout if self.training else 0.0
        seen = causal_attention(query, key, value, mask, drop, self.kernel)
        return self.out(seen.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer block: attention and a two-layer network. Each reads its normalised input and adds its result to
    it.
    """

    def __init__(self, width: int, heads: int, dropout: float, kernel: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, dropout, kernel)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.act = nn.GELU()
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, turn: tuple[Tensor, Tensor] | None, cache: Cache | None = None
    ) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), mask, turn, cache))
        return x + self.drop(self.narrow(self.act(self.widen(self.norm2(x)))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A network from tokens (B, T) to logits (B, T, vocab_size). Position t depends only on the tokens up to t.

    size: a name that stands for layers, width and heads; each of them can be set instead. context: the largest T.
    positions: rotary (Su et al., 2021, arXiv:2104.09864) or learned. tied: the last layer shares the weights of the
        embedding. attention: see `trainrun.model.attention`. Padding must come after the tokens: then no token sees
        it, and no mask is needed. Raises ValueError if the sizes do not fit together.
    """

    def __init__(
        self,
        vocab_size: Count,
        context: Count = 256,
        size: GptSize = "0.8M",
        layers: Count | None = None,
        width: Count | None = None,
        heads: Count | None = None,
        dropout: BelowOne = 0.0,
        positions: Positions = "rotary",
        tied: bool = True,
        attention: Kernel = "auto",
    ) -> None:
        super().__init__()
        layers, width, heads = (
            typed or usual for typed, usual in zip((layers, width, heads), SIZES[size], strict=True)
        )
        if width % heads or (width // heads) % 2:
            raise ValueError(f"width={width} must be an even multiple of heads={heads}")
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width) if positions == "learned" else None
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("turns", rotary_table(context, width // heads), persistent=False)
        initialize_gpt(self, layers)

    def forward(
        self,
        tokens: Tensor,
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        return_states: bool = False,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the logits (B, T, vocab_size).

        segment_ids, position_ids: (B, T), if each row holds several sequences; segment 0 is padding.
        return_states: return the inputs of `head` instead, (B, T, width).
        cache: a dictionary, empty at the first call. In later calls `tokens` continues the tokens of the earlier
            calls, which are not computed again.
        """
        length = tokens.shape[1]
        before = next(iter(cache.values()))[0].shape[2] if cache else 0
        if before + length > self.context:
            raise ValueError(
                f"context={self.context}: a sequence of the data has {before + length} tokens; increase it, or cut a "
                "text "
                f"into blocks of data.train.block_size={self.context} (data.max_sequence_length drops the rest of a "
                "sequence)"
            )
        x = self.tokens(tokens)
        turn: tuple[Tensor, Tensor] | None = None
        if self.positions is not None:
            where = position_ids
            if where is None:
                where = torch.arange(before, before + length, device=tokens.device)
            x = x + self.positions(where)
        else:
            turn = self._rotary_factors(before, length, position_ids)
        mask = None if segment_ids is None else segment_mask(segment_ids, causal=True)
        if before:
            mask = torch.ones(length, before + length, dtype=torch.bool, device=tokens.device).tril(before)
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, mask, turn, cache)
        x = self.norm(x)
        return x if return_states else self.head(x)  # type: ignore[no-any-return]

    def _rotary_factors(self, before: int, length: int, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the rows of `rotary_table` for these positions: (T, head width) or (B, 1, T, head width) each."""
        table: Any = self.turns
        if position_ids is None:
            return table[0, before : before + length], table[1, before : before + length]
        return embedding(position_ids, table[0])[:, None], embedding(position_ids, table[1])[:, None]


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of the last dimension by the angle of its position."""
    others = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    return torch.addcmul(x * cos.to(x.dtype), others, sin.to(x.dtype))


def rotary_table(context: int, head_width: int) -> Tensor:
    """Return the factors of rotary positions, (2, context, head_width): the cosines, and the signed sines."""
    speeds = ROTARY_BASE ** -(torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), speeds)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).float()


def initialize_gpt(model: Gpt, layers: int) -> None:
    """Initialize weights from a normal distribution with standard deviation 0.02.

    Layers whose output is added to the residual stream get a smaller deviation, as in GPT-2.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            added = name.endswith(("out.weight", "narrow.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)
