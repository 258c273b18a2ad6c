"""Gradient checkpointing: activations inside blocks are dropped and recomputed in the backward.

what: of every block only its input is kept; `selective` also keeps the results of matrix products and attention, so
    that only cheap operations are repeated; a share such as 0.5 leaves the last half of the blocks unchanged.
    Results are equal bit for bit, with dropout, autocast and BatchNorm.
when: activations do not fit; a larger batch is worthwhile. when not: memory is used by weights and optimizer; time
    matters more.
source: Chen et al., 2016, arXiv:1604.06174; https://docs.pytorch.org/docs/stable/checkpoint.html
gain: GPT of 3M parameters, 8,192 tokens, float32, one of 2 busy Xeon cores: peak above the imports 667 MB, full 238,
    selective 486, 0.5 381, with trainer.cpu_allocator=return; a step 1.2x as long with full. Without it 850 and 511:
    freed memory stays with the process. Torch imports its compiler for it, once: about 1 s and 80 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainrun.transform.blocks import model_blocks, wrap_blocks
from trainrun.transform.recompute import Recompute


def gradient_checkpointing(model: nn.Module, mode: str | float) -> int:
    """Wrap the blocks of a model in place. Return how many will be recomputed, 0 if it has none.

    mode: full, selective, or the share of the blocks that is left unchanged, above 0 and below 1: the last ones,
        whose activations the backward frees first.
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
    """A forward hook of the model. It raises RuntimeError if the model calls the layers of its blocks one by one."""

    def __init__(self, calls: list[Recompute]) -> None:
        self._calls = calls

    def __call__(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not any(call.used for call in self._calls):
            raise RuntimeError(
                "trainer.gradient_checkpointing: the model calls none of its blocks as a whole (it goes through "
                "the layers of a torch.nn.Sequential by itself), so nothing would be computed again; call the "
                "container, or use trainer.gradient_checkpointing=none"
            )
