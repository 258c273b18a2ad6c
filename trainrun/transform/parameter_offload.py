"""Parameter offload: the weights of the blocks lie in the host's memory, and on the device while they compute.

what: each block (see `blocks`) copies its weights to the device when it begins, in the forward and again in
    the backward, where it is computed again; so neither its weights nor its activations stay. Gradients
    go back to the host, where the optimizer updates. Bit for bit gradient checkpointing.
when: the weights of the blocks do not fit on the GPU; every other way was tried before.
when not: on a CPU; where a GPU is to be busy: every step moves all weights over the bus twice.
source: Rajbhandari et al., 2021, arXiv:2104.07857
gain: not measured
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.transform.blocks import ModelBlock, model_blocks
from trainrun.transform.gradient_checkpointing import recompute_blocks

Fetch = Callable[[Tensor], Tensor]


def parameter_offload(model: nn.Module, device: torch.device) -> int:
    """Change the model in place; how many blocks have their weights on the host now, 0 if it has none.

    Parameters outside of blocks, or shared with what is outside, and all buffers stay on the device.
    """
    blocks = model_blocks(model)
    for param in own_parameters(model, blocks):
        param.data = param.data.cpu().pin_memory()
    fetch_blocks(model, blocks, partial(on_device, device=device))
    return len(blocks)


def fetch_blocks(model: nn.Module, blocks: list[ModelBlock], fetch: Fetch) -> None:
    """Have the blocks compute with what `fetch` makes of their parameters, fetched again in the backward."""
    recompute_blocks(model, blocks, around=lambda forward, modules: Fetching(forward, modules, fetch))


def on_device(param: Tensor, device: torch.device) -> Tensor:
    return param.to(device, non_blocking=True)


def own_parameters(model: nn.Module, blocks: list[ModelBlock]) -> list[nn.Parameter]:
    """Return the parameters that only modules inside blocks use."""
    inside = {
        id(part) for block in blocks for top in block.layers or (block.owner,) for part in top.modules()
    }
    outside = {
        id(param)
        for module in model.modules()
        if id(module) not in inside
        for param in module.parameters(recurse=False)
    }
    return [param for param in model.parameters() if id(param) not in outside]


class Fetching:
    """Called as the forward of a block is."""

    def __init__(self, forward: Callable[..., Any], modules: Sequence[nn.Module], fetch: Fetch) -> None:
        self._forward = forward
        self._modules = modules
        self._fetch = fetch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._fetched():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _fetched(self) -> Iterator[None]:
        """Replace the parameters of the modules by their copies inside the block, as torch.func does."""
        copies: dict[nn.Parameter, Tensor] = {}
        places: list[tuple[dict[str, Any], str, nn.Parameter]] = [
            (module._parameters, name, param)
            for top in self._modules
            for module in top.modules()
            for name, param in module._parameters.items()
            if param is not None
        ]
        try:
            for params, name, param in places:
                if param not in copies:
                    copies[param] = self._fetch(param)
                params[name] = copies[param]
            yield
        finally:
            for params, name, param in places:
                params[name] = param
