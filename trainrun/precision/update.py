"""The guarded update: autocast, loss scaling, clipping, and gradients that are not finite.

The order is fixed: unscale, check, clip, update, clear. On a CPU, reading the flag costs 0.2 us, so it is read at
once. On a GPU the read makes the host wait for all earlier kernels. There it is read only if a skipped step is a
normal event (float16, nan_policy=skip, rollback). With nan_policy=stop the fused optimizers read it on the device
and leave the weights unchanged from the first bad step on; `failure` reads it when the host waits anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from trainrun.errors import PluginError
from trainrun.interfaces import GradReport, Parallel
from trainrun.optimizer.build_optimizer import start_momentum_at_zero
from trainrun.optimizer.other_optimizers import check_sparse_gradients
from trainrun.optimizer.plain_step import (
    FusedAdam,
    JointStep,
    build_plain_step,
    fit_state_layout,
    joined_optimizers,
)
from trainrun.precision.gradients import (
    GradientLists,
    Groups,
    clip_norm_,
    clip_value_,
    compute_total_norm,
    mark_nonfinite,
    run_backward,
)
from trainrun.timing.phases import CHECK, CLIP, OPTIMIZER, RANKS, PhaseTimer

AUTOCAST_TYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
FULL, MIXED = "32-true", "bf16-mixed"
MAX_SKIPS_IN_A_ROW = 100
MAX_OVERFLOWS_IN_A_ROW = 25
MAX_CACHED_SHARES = 64


class Update:
    """The precision and guarded update of a run.

    autocast_dtype: None computes in the dtype of the weights; float16 also scales the loss.
    clip_value: None or 0 for no clipping. clip_algorithm: norm or value. nan_policy: stop, skip, rollback or ignore.
    lazy: keep the flag on the device if the optimizer can read it there. phases: the timer of the phases.
    parallel: combines the flags of all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        autocast_dtype: torch.dtype | None = None,
        clip_value: float | None = None,
        clip_algorithm: str = "norm",
        nan_policy: str = "stop",
        lazy: bool = False,
        phases: PhaseTimer | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self._parallel = parallel
        self._model = model
        self._device = device
        self._book = (phases or PhaseTimer()).open
        self._grad_norm: Callable[[Tensor], Tensor] = return_unchanged
        self._reduce_any: Callable[[Tensor], Tensor] = return_unchanged
        if parallel is not None and parallel.world_size > 1:
            self._grad_norm = book_exchange(parallel.grad_norm, self._book)
            self._reduce_any = book_exchange(parallel.reduce_any, self._book)
        self._context = build_autocast_context(autocast_dtype, device)
        self._scaler: torch.amp.GradScaler | None = None
        if autocast_dtype is torch.float16:
            self._scaler, self._overflowed = build_scaler(device), has_overflowed
        self._limit = clip_value or None
        self._clips_norm = self._limit is not None and clip_algorithm == "norm"
        self._nan_policy = nan_policy
        self._checks = self._scaler is None and nan_policy != "ignore"
        self._lazy = lazy and self._scaler is None and nan_policy == "stop"
        self._shares: dict[tuple[float, torch.dtype], Tensor] = {}
        # 1 from the first bad step on, with nan_policy=stop
        self._found = torch.zeros((), device=self._device)
        self._one = torch.ones((), device=self._device)
        self._stopped = False  # the same as far as the host knows
        self._scaled = False  # the gradients of this step
        self._skipped_in_a_row = 0
        self._optimizer: Optimizer | None = None
        self._num_groups = -1
        self._step: Callable[[], Any] = _drop_step
        self._params: list[nn.Parameter] = []  # of the optimizer
        self._strides: list[tuple[int, ...]] = []
        self._cleared: list[nn.Parameter] = []  # those, and the model's others
        self._gradients = GradientLists([])
        self._with_gradient: list[nn.Parameter] = []  # in the last step
        self.params_with_gradient: set[Tensor] = set()
        self._flag_on_device = False
        self._updated_once = False

    def autocast(self) -> AbstractContextManager[Any]:
        context = self._context
        if isinstance(context, torch.autocast) and torch.is_autocast_enabled(context.device):
            return nullcontext()  # one object entered inside itself would stay on when it is left
        return context

    def backward(self, loss_sum: Tensor, share: float, params: Sequence[Tensor] = ()) -> None:
        """Compute gradients of `share * loss_sum`. params: the only parameters that get one; empty for all."""
        # The share goes in as the gradient of the loss: no product, and none to differentiate.
        gradient = self._shares.get((share, loss_sum.dtype))
        if gradient is None:
            gradient = self._build_share(loss_sum, share)
        if self._scaler is not None:
            gradient = self._scaler.scale(gradient).to(loss_sum.dtype)
        run_backward(loss_sum, gradient, params)

    def _build_share(self, loss_sum: Tensor, share: float) -> Tensor:
        if loss_sum.dim() != 0 or not loss_sum.requires_grad:
            raise PluginError(
                f"task: the loss has shape {tuple(loss_sum.shape)}, requires_grad={loss_sum.requires_grad}; "
                "step() must return the sum over the batch, 0-d, computed from the model's parameters"
            )
        if len(self._shares) >= MAX_CACHED_SHARES:
            self._shares.clear()
        dtype = loss_sum.dtype
        if self._scaler is not None:
            dtype = torch.promote_types(dtype, torch.float32)  # a small share is below float16, unscaled
        gradient = torch.full((), share, dtype=dtype, device=loss_sum.device)
        self._shares[share, loss_sum.dtype] = gradient
        return gradient

    def optimizer_step(self, optimizer: Optimizer, want_norm: bool) -> GradReport:
        usable, norm = self.check_and_clip(optimizer, want_norm)
        if usable:
            self._book(OPTIMIZER)
            self._step()
        self.end_step(usable)
        return GradReport(norm, not usable)

    def check_and_clip(self, optimizer: Optimizer, want_norm: bool) -> tuple[bool, Tensor | None]:
        """Unscale, check and clip the gradients. Return whether they can be used, and their norm before clipping."""
        if optimizer is not self._optimizer or len(optimizer.param_groups) != self._num_groups:
            self._read_parameters(optimizer)
        self._book(CHECK)
        groups = self._gradients.groups()
        if self._gradients.with_gradient is not self._with_gradient:
            self._handle_new_gradients(optimizer)
        self._scaled = self._scaler is not None and bool(groups)
        if self._scaler is not None and self._scaled:
            self._scaler.unscale_(optimizer)
        norm = None
        if want_norm or self._clips_norm:
            norm = self._grad_norm(compute_total_norm(groups, self._device))
        usable = self._is_usable(optimizer, groups, norm)
        if usable:
            self._clip_gradients(groups, norm)
        return usable, norm

    def end_step(self, usable: bool) -> None:
        """Count a skipped step, update the loss scale, and clear the gradients."""
        self._skipped_in_a_row = 0 if usable else self._skipped_in_a_row + 1
        self._updated_once = self._updated_once or usable
        if self._scaler is not None and self._scaled:
            self._scaler.update()
        for param in self._cleared:  # Optimizer.zero_grad takes 10 us more, for its profiler mark
            param.grad = None

    def reload_optimizer_state(self) -> None:
        self._num_groups = -1
        if self._parallel is not None:
            self._parallel.adopt_trained(self._model)

    def _handle_new_gradients(self, optimizer: Optimizer) -> None:
        """Handle that other parameters have gradients than in the previous step."""
        self._with_gradient = self._gradients.with_gradient
        self.params_with_gradient |= set(self._with_gradient)
        parts = joined_optimizers(optimizer) or [optimizer]
        for part in parts:
            start_momentum_at_zero(part)
        if self._gradients.sparse or any(type(part) is SparseAdam for part in parts):
            sparse = set(self._gradients.sparse)
            check_sparse_gradients(optimizer, self._model, sparse, set(self._with_gradient) - sparse)
        if self._parallel is not None and self._parallel.adopt_trained(self._model):
            self._parallel.exchange()  # the forward itself made a parameter trained, after the ranks agreed on them

    def _read_parameters(self, optimizer: Optimizer) -> None:
        """Read the optimizer's parameters when they change, not in every step."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        alike = optimizer is self._optimizer and len(params) == len(self._params)
        self._num_groups = len(optimizer.param_groups)
        alike = alike and all(map(is_, params, self._params))
        strides = [param.stride() for param in params]
        is_prepared = isinstance(self._step, FusedAdam | JointStep) and self._step.reload_optimizer_state()
        if alike and is_prepared and strides == self._strides:
            return
        lost_kernel = fit_state_layout(optimizer)
        self._gradients = GradientLists(params)  # which may have other strides now
        self._strides = strides
        if alike and not lost_kernel:
            return
        self._optimizer, self._params, self._step = optimizer, params, build_plain_step(optimizer)
        self._cleared = list(dict.fromkeys([*self._params, *self._model.parameters()]))
        self._flag_on_device = self._lazy and skips_on_device(optimizer)
        if self._flag_on_device or lost_kernel:
            optimizer.found_inf = self._found if self._flag_on_device else None  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]

    def _is_usable(self, optimizer: Optimizer, groups: Groups, norm: Tensor | None) -> bool:
        """Return whether to call `optimizer.step()`. True also if the optimizer checks the gradients on the device."""
        if self._scaler is not None:
            return not (groups and self._overflowed(self._scaler, optimizer, self._reduce_any))
        if not self._checks:
            return True
        if self._stopped:
            return False
        # The norm is that of all ranks, and not finite if a gradient is not.
        if norm is not None and (self._clips_norm or (norm.is_cpu and bool(norm.isfinite()))):
            mark_nonfinite([[norm]], self._found, self._one)
        else:
            mark_nonfinite(groups, self._found, self._one)
            self._reduce_any(self._found)
        if self._flag_on_device and self._updated_once:
            # Not in the first step: fused SGD would keep an uninitialised momentum (torch 2.13).
            return True
        if self._found.item() == 0:
            return True
        self._stopped = self._nan_policy == "stop"
        if not self._stopped:
            self._found.zero_()
        return False

    def _clip_gradients(self, groups: Groups, norm: Tensor | None) -> None:
        if self._limit is None:
            return
        self._book(CLIP)
        if norm is None or not self._clips_norm:
            clip_value_(groups, self._limit)
        elif self._device.type != "cpu" or not norm.item() + 1e-6 <= self._limit:  # else it multiplies by 1
            clip_norm_(self._params, norm, self._limit)

    @property
    def scales(self) -> bool:
        """Return whether the loss is scaled, as float16 needs it."""
        return self._scaler is not None

    def failure(self, wait: bool) -> str:
        if wait:
            self._read_flag()
        most = MAX_SKIPS_IN_A_ROW if self._scaler is None else MAX_OVERFLOWS_IN_A_ROW
        if not self._stopped and self._skipped_in_a_row <= most:
            return ""
        return describe_end_of_run(self._stopped, self._scaler is not None, most)

    def _read_flag(self) -> None:
        """Read the flag from the device. The host waits for it."""
        if self._lazy and not self._stopped:
            self._stopped = self._found.item() != 0

    def state_dict(self) -> dict[str, Any]:
        self._read_flag()
        return {
            "stopped": self._stopped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stopped = state["stopped"]
        self._found.fill_(float(state["stopped"]))
        self._skipped_in_a_row = state["skipped_in_a_row"]
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])


def build_autocast_context(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Build the autocast context, which is entered for every micro-batch."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def return_unchanged(tensor: Tensor) -> Tensor:
    return tensor


def book_exchange(
    exchange: Callable[[Tensor], Tensor], book: Callable[[int], int]
) -> Callable[[Tensor], Tensor]:
    """Return an exchange of the check whose time counts as waiting for other ranks."""

    def booked_exchange(tensor: Tensor) -> Tensor:
        book(RANKS)
        combined = exchange(tensor)
        book(CHECK)
        return combined

    return booked_exchange


def _drop_step() -> None:
    """Do nothing. Used before the first optimizer is known."""


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step()` itself skips the update if `found_inf` is set on the device.

    True for torch's fused optimizers and trainrun's Muon.
    """
    is_known_class = type(optimizer).__module__.startswith(("torch.optim.", "trainrun.optimizer."))
    return is_known_class and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def build_scaler(device: torch.device) -> torch.amp.GradScaler:
    """Return a GradScaler whose scale is on the device already; torch creates it at the first loss."""
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def has_overflowed(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, reduce_any: Callable[[Tensor], Tensor]
) -> bool:
    """Return whether `unscale_` saw a value that is not finite. The host waits for the device.

    It is checked before the step, so that `optimizer.step()` is not called: GradScaler.step would call a fused
    optimizer, and SGD would start from an uninitialised momentum.
    """
    flags = scaler._found_inf_per_device(optimizer)
    return math.fsum(reduce_any(flag).item() for flag in flags.values()) != 0


def describe_end_of_run(stopped: bool, scales: bool, most: int) -> str:
    """Return why the run ends. stopped: nan_policy=stop; otherwise more than `most` steps in a row were skipped."""
    if stopped:
        return (
            "a gradient was NaN or infinite (trainer.nan_policy=stop). The weights are those before this step. "
            "Lower optimizer.lr, set trainer.gradient_clip_val=1, or skip such steps with trainer.nan_policy=skip. "
            "trainer.detect_anomaly=true names the operation"
        )
    if scales:
        return (
            f"the loss scale was reduced more than {most} times in a row, and a gradient was still NaN or infinite. "
            "Lower optimizer.lr, or use precision=bf16-mixed or 32-true"
        )
    return (
        f"a gradient was NaN or infinite in more than {most} steps in a row (trainer.nan_policy=skip). "
        "Lower optimizer.lr or set trainer.gradient_clip_val=1"
    )
