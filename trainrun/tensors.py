"""Small functions of tensors that models, tasks, data and ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

WHOLE_SHAPE = "_whole_shape"  # the attribute of a parameter that is a part of a larger tensor
HALF_TYPES = (torch.float16, torch.bfloat16)


class StoredTensor(Tensor):
    """A tensor whose values are in files. An operation on it reads all of them, `read` a range of rows.

    read_rows: a function (start, stop) -> rows on the host. A change of the type of numbers is made when they are read.
    """

    _read_rows: Callable[[int, int], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, read_rows: Callable[[int, int], Tensor]
    ) -> StoredTensor:
        tensor: StoredTensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        tensor._read_rows = read_rows
        return tensor

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the rows from `start` to `stop`, or all of them; a tensor without dimensions is one row."""
        num_rows = self.shape[0] if self.dim() else 1
        return self._read_rows(start, num_rows if stop is None else stop).to(self.dtype)

    def narrow_rows(self, start: int, stop: int) -> StoredTensor:
        """Return some of the rows, which stay in the files."""
        return StoredTensor(
            (stop - start, *self.shape[1:]),
            self.dtype,
            lambda first, last: self.read(start + first, start + last),
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if str(function) == "aten._to_copy.default" and {*(kwargs or {})} == {"dtype"}:
            return cls(args[0].shape, kwargs["dtype"], args[0]._read_rows)
        if function is torch.ops.aten.detach.default:
            return cls(args[0].shape, args[0].dtype, args[0]._read_rows)
        return function(*read_stored_tensors(args), **read_stored_tensors(kwargs or {}))


def read_stored_tensors(tree: Any) -> Any:
    """Return a tree of state with the values of its stored tensors."""
    return map_tree_leaves(tree, lambda leaf: leaf.read() if isinstance(leaf, StoredTensor) else leaf)


def map_tree_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tree with every value in its lists, tuples and dicts changed."""
    if type(tree) in (list, tuple):
        return type(tree)([map_tree_leaves(item, change) for item in tree])
    if type(tree) is dict:
        return {name: map_tree_leaves(item, change) for name, item in tree.items()}
    return change(tree)


def segment_mask(segment_ids: Tensor, causal: bool = False) -> Tensor:
    """Return the mask for `attn_mask` of `scaled_dot_product_attention`: (B, 1, T, T) bool, True where a query sees
    a key.

    segment_ids: (B, T), 0 at padding. An attention mask (B, T) also works, as one segment per row. Padding sees only
        padding, so that no row of the softmax is empty.
    """
    ids = segment_ids.long()
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    return mask.tril() if causal else mask


def read_whole_shape(parameter: Tensor) -> list[int]:
    """Return the shape of a parameter; for a part of a larger tensor, the shape of that tensor."""
    return list(getattr(parameter, WHOLE_SHAPE, parameter.shape))


def zero_loss(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return a 0-d zero whose backward adds zeros to the gradients of the parameters, from the last to the first."""
    total = torch.zeros((), device=next(model.parameters()).device, requires_grad=True)
    tables = [layer for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    sparse = {table.weight for table in tables if table.sparse}
    for parameter in parameters:
        if parameter in sparse:  # of an embedding, whose gradient is sparse
            some = embedding(torch.zeros(1, dtype=torch.long, device=total.device), parameter, sparse=True)
        else:
            some = parameter
        total = total + some.sum().real.to(total) * 0.0
    return total
