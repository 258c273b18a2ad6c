"""Gradients as lists of tensors, one list per device and dtype, for batched kernels; and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.autograd.graph
from torch import Tensor, nn

from trainrun.runtime.memory_layout import lay_out_gradient

Groups = list[list[Tensor]]

# The kernel of `torch.amp.GradScaler`, which is private; None where a version has it no more.
NOT_FINITE: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)

# What `Tensor.backward` ends in (2.4 to 2.13); None where a version has it no more.
RUN_BACKWARD = getattr(torch.autograd.graph, "_engine_run_backward", None)

STRIDES = Tensor.stride
LARGE_GRADIENT = 1 << 15  # values; below, one kernel over all tensors is faster than a sum of each


class GradientLists:
    """The gradients of some parameters, each with the strides of its parameter, as batched kernels need them.

    Autograd makes them so, but code that replaces a gradient may give it other strides, which fused optimizers
    ignore. So the strides are compared in every step (0.3 us for four tensors). with_gradient: the parameters that
    had a gradient in the last step.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.with_gradient: list[nn.Parameter] = []
        self.sparse: list[nn.Parameter] = []  # with a sparse gradient
        self._without: list[nn.Parameter] = list(params)
        self._strides: list[tuple[int, ...]] = []
        self._uniform = False

    def groups(self) -> Groups:
        """Return the existing gradients, one list per device and dtype.

        Sparse gradients are coalesced in place and represented by their values. Complex ones are viewed as real
        numbers (..., 2), because the kernels do not support complex numbers.
        """
        grads = [grad for param in self.with_gradient if (grad := param.grad) is not None]
        same = len(grads) == len(self.with_gradient) and self._have_known_strides(grads)
        if not same or (self._without and any(param.grad is not None for param in self._without)):
            return self._update_layout()
        if self._uniform:
            return [grads] if grads else []
        return group_by_kind(self.with_gradient)

    def _have_known_strides(self, grads: list[Tensor]) -> bool:
        try:
            return list(map(STRIDES, grads)) == self._strides
        except RuntimeError:  # sparse gradients have none
            return False

    def _update_layout(self) -> Groups:
        """Fix the layout of gradients that need it, and store which parameters have gradients for the next steps."""
        self.with_gradient = [param for param in self.params if param.grad is not None]
        self._without = [param for param in self.params if param.grad is None]
        grads = [lay_out_gradient(param) for param in self.with_gradient]
        pairs = zip(self.with_gradient, grads, strict=True)
        self.sparse = [param for param, grad in pairs if grad.is_sparse]
        is_strided = all(grad.layout is torch.strided for grad in grads)
        self._strides = [grad.stride() for grad in grads] if is_strided else []
        self._uniform = is_strided and is_uniform(self.with_gradient)
        if self._uniform:
            return [grads] if grads else []
        return group_by_kind(self.with_gradient)


def is_uniform(params: Iterable[nn.Parameter]) -> bool:
    """Return whether the gradients of these parameters form one list: one device and one real dtype."""
    kinds = {(param.device, param.dtype) for param in params}
    return len(kinds) <= 1 and not any(dtype.is_complex for _, dtype in kinds)


def compute_total_norm(groups: Groups, device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients as one vector, 0-d on `device`. The host does not wait for it.

    It is computed in float32 or more, even for 16-bit gradients, unlike torch.nn.utils.get_total_norm. On a CPU a
    loop takes half the time of that function (10 and 19 us for four small tensors).
    """
    norms: list[Tensor] = []
    for grads in groups:
        dtype = torch.float64 if grads[0].dtype is torch.float64 else torch.float32
        if grads[0].device.type == "cpu" or grads[0].dtype is not dtype:
            norms += [torch.linalg.vector_norm(grad, dtype=dtype) for grad in grads]
        else:  # one kernel for many small tensors
            norms.append(torch.nn.utils.get_total_norm(grads))
    if not norms:
        return torch.zeros((), device=device)
    if len(groups) > 1:
        norms = [norm.to(device, torch.float64) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def mark_nonfinite(groups: Groups, found: Tensor, one: Tensor) -> None:
    """Set `found` (0-d float32) to 1 if any gradient is not finite; never back to 0. The host does not wait.

    One pass: 2.5 us for four small tensors on a CPU, where their norms or sums take 6. The kernel is that of loss
    scaling; `one` is the scale 1 on the device of `found`.
    """
    for grads in groups:
        device = grads[0].device
        if NOT_FINITE is None or (device.type == "cuda" and grads[0].dtype is torch.bfloat16):
            # The kernel has no bfloat16 there (torch 2.13, pytorch issue 127176).
            mark_nonfinite_by_largest(grads, found)
            continue
        if device.type == "cpu":
            grads = [grad for grad in grads if grad.numel() < LARGE_GRADIENT or not has_finite_sum(grad)]
            if not grads:
                continue
        if device == found.device:
            NOT_FINITE(grads, found, one)
        else:
            there = found.to(device)
            NOT_FINITE(grads, there, one.to(device))
            found.copy_(there)


def has_finite_sum(tensor: Tensor) -> bool:
    """Return True only if all values are finite. It is also False if the sum of finite values overflows.

    It only reads, while the kernel of `mark_nonfinite` writes the values back: at most half the time for tensors
    larger than the caches. The host reads the result.
    """
    return math.isfinite(tensor.sum().item())


def run_backward(loss: Tensor, gradient: Tensor, params: Sequence[Tensor] = ()) -> None:
    """Run `loss.backward(gradient, inputs=params)` for a 0-d loss and a gradient of the same dtype and device.

    If a gradient is given, torch checks its shape with symbols and imports sympy for that: 0.3 s at the first step,
    and 15 us of 85 in all others (digits MLP, batch 32).
    """
    if RUN_BACKWARD is None or type(loss) is not Tensor:
        loss.backward(gradient, inputs=list(params) or None)  # type: ignore[no-untyped-call]
    else:
        RUN_BACKWARD(
            (loss,), (gradient,), False, False, tuple(params), allow_unreachable=True, accumulate_grad=True
        )


def group_by_kind(params: Iterable[nn.Parameter]) -> Groups:
    """Return the existing gradients grouped by device and dtype; see `GradientLists.groups`."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        if (grad := param.grad) is not None:
            dense_grad = _coalesce_gradient(param) if grad.is_sparse else grad
            groups.setdefault((dense_grad.device, dense_grad.dtype), []).append(dense_grad)
    return [
        [_view_as_real(grad) for grad in dense_grad] if dtype.is_complex else dense_grad
        for (_, dtype), dense_grad in groups.items()
    ]


def _view_as_real(grad: Tensor) -> Tensor:
    """View a complex gradient as real numbers, sharing its memory. A conjugate is viewed without conjugation."""
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


def _coalesce_gradient(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    param.grad = param.grad.coalesce()  # repeated indices are added up: the sum must be finite, not the parts
    return param.grad._values()


def mark_nonfinite_by_largest(grads: list[Tensor], found: Tensor) -> None:
    """Set `found` if the largest absolute gradient is not finite (NaN included).

    Works for any dtype and does not change the gradients.
    """
    if filled := [grad for grad in grads if grad.numel()]:
        bad = ~torch.nn.utils.get_total_norm(filled, math.inf).isfinite()
        found.copy_(torch.maximum(found, bad.to(found.device, found.dtype)))


def clip_norm_(params: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients by min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""
    if norm.device.type != "cpu":  # one kernel for many small tensors
        torch.nn.utils.clip_grads_with_norm_(params, limit, norm)
        return
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(coefficient)


def clip_value_(groups: Groups, limit: float) -> None:
    """Clamp every value to [-limit, limit]."""
    for grads in groups:
        for grad in grads:
            grad.clamp_(-limit, limit)
