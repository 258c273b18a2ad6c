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

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainrun.transform.blocks import model_blocks, wrap_blocks

# Attention consists of products. If it draws random numbers it is not saved, see `is_saved_product`.
# Operations that a version of torch lacks are left out.
NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
PRODUCTS = frozenset(
    packet.default for name in NAMES if (packet := getattr(torch.ops.aten, name, None)) is not None
)


class Recompute:
    """The forward of a block that is recomputed in the backward pass.

    The second pass uses the random numbers, autocast and buffers of the first, and its changes of buffers are
    undone. Raises RuntimeError if an input or weight was changed in place. modules: the modules whose parameters and
    buffers the forward uses. selective: keep the results of matrix products.
    """

    def __init__(
        self, forward: Callable[..., Any], modules: Sequence[nn.Module], selective: bool = False
    ) -> None:
        self._forward = forward
        self._modules = modules
        self._selective = selective
        self.used = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.used = True
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        call = _BlockCall(
            [*iterate_tree_tensors([args, kwargs]), *parameters], self._modules, self._selective
        )

        def forward(args: Any, kwargs: Any, _device: Any) -> Any:
            return self._forward(*args, **kwargs)

        # one parameter more: torch keeps the random states of the devices of what it is given
        return checkpoint(
            forward, args, kwargs, parameters[:1], use_reentrant=False, context_fn=call.contexts
        )


class _BlockCall:
    """One call of a block, with the state that its second pass needs."""

    def __init__(self, needed: list[Tensor], modules: Sequence[nn.Module], selective: bool) -> None:
        self._needed = [(tensor, tensor._version) for tensor in needed]
        self._products: list[tuple[Tensor, int]] = []
        self._selective = selective
        self._buffers = [
            (module, name, buffer, buffer._version, buffer.detach().clone())
            for outer in modules
            for module in outer.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the forward pass and of its recomputation in the backward pass."""
        if not self._selective:
            return self._first_run(), _ContextsPerEntry(self._second_run)
        first, second = create_selective_checkpoint_contexts(self._policy)  # type: ignore[no-untyped-call]
        return _ContextsPerEntry(self._first_run, lambda: first), _ContextsPerEntry(
            self._second_run, lambda: second
        )

    @contextlib.contextmanager
    def _first_run(self) -> Iterator[None]:
        yield
        self._check_unchanged_tensors()
        if any(tensor._version != version for tensor, version in self._products):
            raise RuntimeError(
                "trainer.gradient_checkpointing=selective: a block writes into the result of a matrix product (as "
                "nn.ReLU(inplace=True) does), which was to be kept; change it out of place, or use "
                "trainer.gradient_checkpointing=full"
            )
        self._products.clear()
        # Those that are still the same need no copy: a mask may be large. Batch norm's kernels count no version.
        self._buffers = [
            row for row in self._buffers
            if hasattr(row[0], "running_mean") or getattr(row[0], row[1]) is not row[2] or row[2]._version != row[3]
        ]  # fmt: skip

    @contextlib.contextmanager
    def _second_run(self) -> Iterator[None]:
        """Give the second forward pass copies of the buffers as they were before the first one."""
        self._check_unchanged_tensors()
        now = [getattr(module, name) for module, name, *_ in self._buffers]
        try:
            for module, name, _, _, old in self._buffers:
                setattr(module, name, old.clone())
            yield
        finally:
            for (module, name, *_), buffer in zip(self._buffers, now, strict=True):
                setattr(module, name, buffer)

    def _policy(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not is_saved_product(function, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        result = getattr(context, "op_output", None)  # of later versions of torch
        self._products += [(tensor, tensor._version) for tensor in iterate_tree_tensors([result])]
        return CheckpointPolicy.MUST_SAVE

    def _check_unchanged_tensors(self) -> None:
        if any(tensor._version != version for tensor, version in self._needed):
            raise RuntimeError(
                "trainer.gradient_checkpointing: an input or a weight of a block was changed in place (as by "
                "nn.ReLU(inplace=True), or by +=), and the backward computes the block again from it; change "
                "it out of place, or use trainer.gradient_checkpointing=none"
            )


class _ContextsPerEntry:
    """Contexts that are built again at each entry, because a retained graph has several backward passes."""

    def __init__(self, *builders: Callable[[], AbstractContextManager[Any]]) -> None:
        self._builders = builders
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for build in self._builders:
                stack.enter_context(build())
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


def is_saved_product(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call is a matrix product whose result is saved.

    Attention with dropout draws random numbers inside its kernel. If its result were saved, the second pass would
    not draw them, and later random numbers of the block would differ from the first pass. So such attention is
    recomputed.
    """
    if function not in PRODUCTS:
        return False
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return True
    names = [argument.name for argument in function._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" in names and not arguments.get("dropout_p", 0.0)


def iterate_tree_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors inside lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from iterate_tree_tensors(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from iterate_tree_tensors(value)


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
