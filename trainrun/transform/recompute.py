"""Recompute activations in the backward pass: `torch.utils.checkpoint` with two additions.

A block may change its buffers, such as BatchNorm's running statistics. These changes must happen only once. If an
input or a weight was changed in place before the backward pass, the gradients would be wrong without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
        call = _BlockCall([*iterate_tensors([args, kwargs]), *parameters], self._modules, self._selective)

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
        self._check_unchanged()
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
        self._check_unchanged()
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
        self._products += [(tensor, tensor._version) for tensor in iterate_tensors([result])]
        return CheckpointPolicy.MUST_SAVE

    def _check_unchanged(self) -> None:
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


def iterate_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors inside lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from iterate_tensors(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from iterate_tensors(value)
