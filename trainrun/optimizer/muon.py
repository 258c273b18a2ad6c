"""Muon for hidden matrices and AdamW for all other parameters, in one optimizer.

what: the momentum of a matrix is replaced by the nearest matrix with orthogonal rows or columns (five steps of a
    Newton-Schulz iteration), so that all directions change equally fast. Embeddings, the last linear layer and
    parameters that are not matrices are updated by torch's AdamW. Filters of convolutions count as matrices (out, in
    x height x width).
when: transformers and other networks with mostly matrices. They need fewer steps for the same loss. when not:
    networks without a hidden matrix (refused), and fine-tuning of networks that AdamW has trained. It changes the
    mathematics, so it is never chosen automatically. On a CPU the matrix products are a visible part of a small
    step.
source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; one learning rate for both parts as in Liu et al.
    2025, arXiv 2502.16982 (`adjust_lr_fn=match_rms_adamw`).
gain: modded-nanogpt reached its target loss in 24.9 instead of 31.4 minutes with it (8 H100). `torch.optim.Muon`
    rounds to bfloat16 on every device and does not support filters. On a CPU without bfloat16 units its step took
    4.2 times as long as this one (512 x 512: 145 ms, 34 ms; one Xeon core, torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import is_
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trainrun.errors import PluginError
from trainrun.limits import BelowOne, Limits, NotNegative
from trainrun.optimizer.plain_step import build_plain_step
from trainrun.output import format_count

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a steep quintic: singular values end between 0.7 and 1.2
EPS = 1e-7
LR_RULES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


class Muon(Optimizer):
    """An optimizer whose groups with `muon: True` are updated by Muon, and all others by AdamW.

    params: the groups; `parameter_groups` builds them from a model. momentum, nesterov, ns_steps, adjust_lr_fn are
        of Muon; betas, eps, fused, foreach are of AdamW. weight_decay applies to both, and so does lr if adamw_lr is
        None.
    """

    def __init__(
        self,
        params: Any,
        lr: NotNegative = 1e-3,
        weight_decay: NotNegative = 0.01,
        momentum: BelowOne = 0.95,
        nesterov: bool = True,
        ns_steps: Annotated[int, Limits(at_least=1, at_most=99)] = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adamw_lr: NotNegative | None = None,
        betas: tuple[BelowOne, BelowOne] = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        muon_options = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "betas": betas,
                "eps": eps,
                "muon": False,
                **muon_options,
            },
        )
        others = self._groups(False)
        for group in others:
            group["lr"] = lr if adamw_lr is None else adamw_lr
        self._kernel = {"fused": fused, "foreach": foreach}
        self._adamw = _build_inner(AdamW, others, **self._kernel) if others else None
        self._update_others: Callable[[], Any] = _do_nothing
        # as torch's fused optimizers: with `found_inf`, a 0-d tensor, set to 1 a step changes nothing
        inner = self._adamw
        self._step_supports_amp_scaling = inner is None or hasattr(inner, "_step_supports_amp_scaling")

    @staticmethod
    def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
        """Return the hidden matrices and all other parameters as two groups. Raise PluginError without a hidden
        matrix.
        """
        matrices = hidden_matrices(model)
        if not matrices:
            raise PluginError(
                "optimizer=muon: the model has no hidden matrix (AdamW updates embeddings, the last linear layer and "
                "vectors); use optimizer=adamw"
            )
        chosen = set(matrices)
        others = [
            param
            for param in model.parameters()
            if param not in chosen and (param.is_floating_point() or param.is_complex())
        ]
        groups: list[dict[str, Any]] = [{"params": matrices, "muon": True}]
        return groups + ([{"params": others, "muon": False}] if others else [])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        spoilt = None if found_inf is None else found_inf != 0
        for group in self._groups(True):
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group, spoilt)
        others = self._groups(False)
        if self._adamw is None and others:  # added later
            self._adamw = _build_inner(AdamW, others, **self._kernel)
        if self._adamw is not None:
            self._update_inner(self._adamw, others)
            self._adamw.found_inf, self._adamw.grad_scale = found_inf, None  # type: ignore[attr-defined]
            self._update_others()

    def _update_inner(self, adamw: Optimizer, others: list[dict[str, Any]]) -> None:
        """Give the inner AdamW the current groups and state, which change if the optimizer is copied or loaded."""
        mine = adamw.param_groups
        same = adamw.state is self.state and len(mine) == len(others) and all(map(is_, others, mine))
        if not same or self._update_others is _do_nothing:
            for group in others:  # one that was added has not all of them
                group.update({name: value for name, value in adamw.defaults.items() if name not in group})
            adamw.param_groups, adamw.state = others, self.state
            self._update_others = build_plain_step(adamw)

    def describe_parts(self) -> str:
        """Describe how many parameters Muon and AdamW update, for the first lines of a run."""
        by_muon, by_adamw = (
            sum(len(group["params"]) for group in self._groups(is_muon)) for is_muon in (True, False)
        )
        matrices = "1 matrix" if by_muon == 1 else f"{by_muon} matrices"
        return f"{matrices} by Muon, {format_count(by_adamw, 'other parameter')} by AdamW"

    def _groups(self, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if bool(group["muon"]) is muon]

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any], spoilt: Tensor | None) -> None:
        """Update a parameter. spoilt: 0-d on the device, True if the gradients are not finite and nothing may
        change.
        """
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum_buffer: Tensor = state["momentum_buffer"]
        momentum = momentum_buffer if spoilt is None else momentum_buffer.clone()
        momentum.lerp_(grad, 1 - group["momentum"])
        direction = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        matrix = direction.flatten(1)
        update = orthogonalize(matrix, group["ns_steps"]).reshape(direction.shape).to(param.dtype)
        moved = param if spoilt is None else param.clone()
        moved.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * LR_RULES[group["adjust_lr_fn"]](*matrix.shape)
        if isinstance(rate, Tensor):  # in a graph, where no number may be asked for
            moved.sub_(update * rate)
        else:
            moved.add_(update, alpha=-rate)
        if spoilt is not None:
            momentum_buffer.copy_(torch.where(spoilt, momentum_buffer, momentum))
            param.copy_(torch.where(spoilt, param, moved))


def _do_nothing() -> None:
    """Do nothing. This is the update function before the first step."""


def _build_inner(kind: type[Optimizer], groups: list[dict[str, Any]], **keywords: Any) -> Optimizer:
    """Return an optimizer that shares these groups. The groups get its default options."""
    inner = kind([{"params": group["params"]} for group in groups], **keywords)
    for group, made in zip(groups, inner.param_groups, strict=True):
        for name, value in made.items():
            group.setdefault(name, value)
    return inner


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the real parameters of two or more dimensions, except embeddings and the last linear layer."""
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    excluded = {param for module in [*embeddings, *linear[-1:]] for param in module.parameters()}
    return [
        param
        for param in model.parameters()
        if param.is_floating_point()
        and param.ndim >= 2
        and min(param.flatten(1).shape) > 1
        and param not in excluded
    ]


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return approximately U V of the singular value decomposition U S V of a matrix.

    On a GPU it is computed in bfloat16, in which products are fast.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.device.type == "cuda" else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
