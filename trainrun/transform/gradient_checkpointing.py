"""Gradient checkpointing: activations inside blocks are dropped and recomputed in the backward pass.

what: `full` keeps only the input of each block. `selective` also keeps the results of matrix products and attention,
    so that only cheap operations are repeated. A number such as 0.5 leaves that share of the blocks, the last ones,
    unchanged. Results are equal bit for bit, also with dropout, autocast and BatchNorm.
when: activations do not fit into memory, or a larger batch is worthwhile. when not: weights and optimizer use most
    of the memory, or time matters more.
source: Chen et al., 2016, arXiv:1604.06174; https://docs.pytorch.org/docs/stable/checkpoint.html
gain: GPT of 3M parameters, 8,192 tokens, float32, one of 2 busy Xeon cores, with trainer.cpu_allocator=return. Peak
    memory without the imports: 667 MB without, 238 with full, 486 with selective, 381 with 0.5. A step takes 1.2x as
    long with full. Without cpu_allocator=return: 850 and 511 MB, because freed memory stays with the process. The
    first use imports torch's compiler: about 1 s and 80 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainrun.transform.blocks import model_blocks, wrap_blocks
from trainrun.transform.recompute import Recompute


def gradient_checkpointing(model: nn.Module, mode: str | float) -> int:
    """Wrap the blocks of a model in place. Return how many will be recomputed, or 0 if the model has no blocks.

    mode: full, selective, or the share of the blocks that is left unchanged, above 0 and below 1. These are the last
        blocks, whose activations the backward pass frees first.
    """
    blocks = model_blocks(model)
    if not isinstance(mode, str):
        blocks = blocks[: len(blocks) - int(mode * len(blocks))]
    calls: list[Recompute] = []

    def wrap(forward: Callable[..., Any], modules: Sequence[nn.Module]) -> Recompute:
        calls.append(Recompute(forward, modules, selective=mode == "selective"))
        return calls[-1]

    wrap_blocks(blocks, wrap)
    if calls:
        model.register_forward_hook(BlockUseCheck(calls))
    return len(blocks)


class BlockUseCheck:
    """A forward hook that raises RuntimeError if the model calls the layers of a block one by one."""

    def __init__(self, calls: list[Recompute]) -> None:
        self._calls = calls

    def __call__(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not any(call.used for call in self._calls):
            raise RuntimeError(
                "trainer.gradient_checkpointing: the model calls none of its blocks as a whole (it goes through "
                "the layers of a torch.nn.Sequential by itself), so nothing would be computed again; call the "
                "container, or use trainer.gradient_checkpointing=none"
            )
