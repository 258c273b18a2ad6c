"""Which results of a block are kept when the block is computed again: those of matrix products.

Two modes that see every operation below autograd: the first notes the products of one call in their order,
the second hands each out instead of computing it. `torch.utils.checkpoint.create_selective_checkpoint_contexts`
does the same; it loads torch's compiler.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Attention is made of products; one that draws is not kept, see `is_kept`. What a version of torch lacks is left out.
NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
PRODUCTS = frozenset(
    packet.default for name in NAMES if (packet := getattr(torch.ops.aten, name, None)) is not None
)


def is_kept(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is a product whose result is kept.

    Attention that drops draws inside of its kernel. Handing its result out would leave the random generator where it
    was, and every later draw of the block would be another one than in the first run: it is computed again.
    """
    if function not in PRODUCTS:
        return False
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return True
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" in names and not given.get("dropout_p", 0.0)


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the first and the second run of one call."""
    kept: list[Kept | None] = []
    return Noting(kept), HandingOut(kept)


class Kept:
    """The result of one product: a tensor, or a tuple with tensors in it."""

    def __init__(self, function: Any, result: Any) -> None:
        self.function = function
        self._result = tuple(map(_alias, result)) if isinstance(result, tuple) else _alias(result)
        tensors = self._result if isinstance(result, tuple) else (self._result,)
        self._versions = [(tensor, tensor._version) for tensor in tensors if isinstance(tensor, Tensor)]

    def result(self) -> Any:
        """None where something was written into it since."""
        same = all(tensor._version == version for tensor, version in self._versions)
        return self._result if same else None


def _alias(value: Any) -> Any:
    """The same memory without the graph that will hang on `value`, and with its count of changes in place."""
    if not isinstance(value, Tensor):
        return value
    # Below autograd, a detached tensor would begin a count of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: list[Kept | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def dispatch(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if is_kept(function, args, kwargs or {}):
            self._kept.append(Kept(function, result))
        return result


class HandingOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each once, so that its memory goes when it was used; in a third run the products are computed."""

    def __init__(self, kept: list[Kept | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._position = 0

    def __enter__(self) -> Any:
        self._position = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def dispatch(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_kept(function, args, kwargs or {}):
            position, self._position = self._position, self._position + 1
            kept, self._kept[position] = self._kept[position], None
            if kept is not None and kept.function is not function:
                raise RuntimeError(
                    f"trainer.gradient_checkpointing=selective: a block computed {function} where it computed "
                    f"{kept.function} before; it must do the same both times"
                )
            if kept is not None and (result := kept.result()) is not None:
                return result
        return function(*args, **(kwargs or {}))


# Not in the class bodies: torch wraps what it finds there, to ask its compiler, which the first call loads.
Noting.__torch_dispatch__ = Noting.dispatch  # type: ignore[method-assign,assignment]
HandingOut.__torch_dispatch__ = HandingOut.dispatch  # type: ignore[method-assign,assignment]
