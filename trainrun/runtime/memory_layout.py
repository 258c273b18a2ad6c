"""The contract that parameters and buffers are dense, and functions for the memory layout of tensors.

Torch's fused optimizers on a CPU (2.8 to 2.13) read parameter, gradient and state each as one block of memory and
ignore strides. They are right if all of these are dense and have the same strides. Otherwise they write to wrong
elements, or past the end of the memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainrun.errors import PluginError

Dimensions = list[tuple[int, int]]


def sort_dimensions(tensor: Tensor) -> Dimensions:
    """Return (stride, size) of each dimension with more than one value, the smallest stride first."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(pair for pair in pairs if pair[1] != 1)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory without gaps or overlaps, in any order of dimensions."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.layout is torch.strided
    expected = 1
    for stride, size in sort_dimensions(tensor):
        if stride != expected:
            return False
        expected *= size
    return True


def has_overlap(tensor: Tensor) -> bool:
    """Return whether two elements of the tensor share memory, as after `expand`."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    reach, dimensions = 0, sort_dimensions(tensor)
    for stride, size in dimensions:
        if stride == 0:
            return True
        if stride <= reach:
            return _has_equal_offsets(dimensions)
        reach += stride * (size - 1)
    return False


def _has_equal_offsets(dimensions: Dimensions) -> bool:
    offsets = torch.zeros(1, dtype=torch.int64)
    for stride, size in dimensions:
        steps = torch.arange(size) * stride
        offsets = (offsets[:, None] + steps).flatten()
    return len(set(offsets.tolist())) < len(offsets)


def has_same_strides(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have equal strides. Strides of dimensions of size 1 do not matter."""
    if tensor.stride() == other.stride():
        return True
    strides = zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
    return all(size == 1 or first == second for first, second, size in strides)


def copy_in_layout(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a copy of `tensor` with the strides of `other`, which must be dense."""
    copy = torch.empty_like(other, dtype=tensor.dtype, device=tensor.device, requires_grad=False)
    return copy.copy_(tensor.detach())


def lay_out_gradient(param: Tensor) -> Tensor:
    """Return the gradient of a parameter; first give it the strides of the parameter if those differ."""
    grad = param.grad
    assert grad is not None
    is_strided = grad.layout is torch.strided and param.layout is torch.strided
    if is_strided and not has_same_strides(grad, param) and is_dense(param):
        param.grad = grad = copy_in_layout(grad, param)
    return grad


def make_dense(model: nn.Module) -> None:
    """Replace each buffer whose elements share memory by a dense copy, since no checkpoint could be loaded into it.

    Raise PluginError for a parameter whose elements share memory, and for such a buffer that is a view of another
    tensor of the model: an update or a load would change both.
    """
    tensors = dict(iterate_named_tensors(model))
    copies: dict[Tensor, Tensor] = {}  # a buffer may have several names
    for name, tensor in tensors.items():
        if not has_overlap(tensor):
            continue
        if isinstance(tensor, nn.Parameter):
            raise PluginError(
                f"model: several values of the parameter {name} share one memory location (as after expand), so no "
                "optimizer can update it; make the small tensor the parameter and expand it in the forward, or use "
                "nn.Parameter(tensor.expand(...).clone())"
            )
        sharing = [
            other
            for other, other_tensor in tensors.items()
            if other != name and _has_shared_memory(other_tensor, tensor)
        ]
        if sharing:
            raise PluginError(
                f"model: several values of the buffer {name} share one memory location (as after expand), the memory "
                f"of {sharing[0]}, so no checkpoint can be loaded into it; create the view in the forward"
            )
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, copies.setdefault(tensor, tensor.contiguous()))


def iterate_named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over parameters and buffers with all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _has_shared_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or one is other:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
