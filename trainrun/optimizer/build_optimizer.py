"""The optimizer of a run, with torch's fused update where it exists.

`fused=None` is torch's default, and on a CPU it means a Python loop over the parameters. The fused update
is the same mathematics in one call: a whole step of a small network takes 1.5x less time with it
(227 against 334 us on a CPU), the update alone of 200 small tensors 7x less. `foreach=True`, batched
kernels, is what torch takes on a GPU by itself where nothing is fused; on a CPU it rarely pays (0.8x to 1.8x).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from trainrun.errors import OF_ARGUMENTS, PluginError, is_of_torch, named
from trainrun.optimizer.plain_step import plain_step

if TYPE_CHECKING:
    from trainrun.optimizer.groups import GroupRules

WRONG = "the fused update computes wrong values"


def build_optimizer(
    factory: Callable[..., Optimizer],
    keywords: dict[str, Any],
    model: nn.Module,
    params: list[nn.Parameter] | None = None,
    closures: bool = False,
    rules: GroupRules | None = None,
) -> tuple[Optimizer, str]:
    """`factory(parameters, **keywords)` on the parameters that want a gradient, and a note on the choice.

    params: some of them, for one of several optimizers. closures: it may compute the loss several times in a step.
    rules: of parameter groups, each of which adds a line to the note.
    """
    whole = params is None
    members = list(model.parameters()) if params is None else params
    params = [param for param in members if param.requires_grad]
    if not params:
        raise PluginError("model: the model has no parameter that wants a gradient; nothing can be trained")
    name = getattr(factory, "__name__", type(factory).__name__)
    make_groups = getattr(factory, "parameter_groups", None)  # of Muon, or of a user's own
    if make_groups is not None and not whole:
        raise PluginError(
            f"optimizer: {name} divides the parameters of a whole model; it cannot be one of several"
        )
    groups: Any = params if make_groups is None else make_groups(model)
    division, settings = None, [keywords]
    if rules is not None:
        from trainrun.optimizer.groups import Division

        division = Division(rules, model, members, groups if make_groups else [{"params": params}])
        groups = division.groups
        settings += [keywords | rules.options(number) for number in range(len(rules.groups))]
    fault = ""
    wish = keywords
    if all(_may_fuse(factory, each, model) for each in settings):
        fault = _fused_fault(factory, keywords, params)
        keywords = keywords | ({} if fault else {"fused": True})
    elif keywords.get("fused") is True and (fault := _fused_fault(factory, keywords, params)).startswith(
        WRONG
    ):
        raise PluginError(f"optimizer.fused=true: {fault}; choose optimizer.fused=null")
    try:
        optimizer = factory(groups, **keywords)
    except (RuntimeError, *OF_ARGUMENTS) as error:
        if not (
            _is_refusal(error)
            or (isinstance(error, RuntimeError) and (wish.get("fused") or wish.get("foreach")))
        ):
            raise
        raise PluginError(f"optimizer: {name}: {named(error)}") from error
    _check_contract(optimizer, name, closures)
    lines = division.settle(optimizer, factory, keywords) if division else []
    start_momentum(optimizer)
    if isinstance(optimizer, SparseAdam):
        optimizer.register_step_pre_hook(_only_sparse)
    devices = ", ".join(sorted({param.device.type for param in params}))
    kernel, reason = kernel_of(optimizer, wish, fault)
    note = f"optimizer: {name}, {kernel} ({devices}): {reason}"
    if type(optimizer).__module__ == "trainrun.optimizer.muon":
        from trainrun.optimizer.muon import shares

        note += f"; {shares(optimizer.param_groups)}"
    return optimizer, "\n".join([note, *lines])


def kernel_of(optimizer: Optimizer, wish: dict[str, Any], fault: str) -> tuple[str, str]:
    """How the update is computed, and why. wish: what the config says; fault: why it could not be fused."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    foreach = any(group.get("foreach") for group in optimizer.param_groups)
    kernel = "fused" if fused else "foreach" if foreach else "not fused"
    for switch in ("fused", "foreach"):
        if wish.get(switch) is not None:
            return kernel, f"optimizer.{switch}={str(wish[switch]).lower()}"
    if fused:
        return kernel, "one kernel in place of a loop over the tensors"
    if fault:
        return kernel, fault
    return (
        kernel,
        "these gradients or options exclude it"
        if "fused" in optimizer.defaults
        else "it has no fused kernel",
    )


def _may_fuse(factory: Callable[..., Optimizer], keywords: dict[str, Any], model: nn.Module) -> bool:
    """Whether the factory has the switch, leaves it open, and nothing that is known excludes it."""
    if not has_switch(factory, "fused", None) or keywords.get("fused") is not None:
        return False
    if factory is SGD and keywords.get("momentum") and keywords.get("dampening"):
        return False  # see start_momentum
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    return not (sparse or keywords.get("foreach") or keywords.get("differentiable"))


def _is_refusal(error: Exception) -> bool:
    """Whether arguments were refused; other errors in the user's own code are mistakes in it."""
    return isinstance(error, TypeError | ValueError) or (
        isinstance(error, OF_ARGUMENTS) and is_of_torch(error)
    )


def has_switch(factory: Callable[..., Optimizer], name: str, default: bool | None) -> bool:
    try:
        switch = inspect.signature(factory).parameters.get(name)
    except (TypeError, ValueError):  # a callable without a readable signature
        return False
    return switch is not None and switch.default is default


def _fused_fault(
    factory: Callable[..., Optimizer], keywords: dict[str, Any], params: list[nn.Parameter]
) -> str:
    """Why not to fuse, "" if it works: three updates of 67 numbers, compared with the plain ones.

    Which devices and types are fused differs by version, and not all of it is right: up to torch 2.13 the
    fused SGD of a CPU leaves most bfloat16 weights as they are (pytorch issue 191763). A mistake in the
    keywords comes again, unguarded, when the real optimizer is built.
    """
    for device, dtype in {(param.device, param.dtype) for param in params}:
        try:
            fused, plain = (
                _try_out(factory, keywords | {"fused": choice}, device, dtype) for choice in (True, False)
            )
        except RuntimeError as error:
            return str(error)
        except OF_ARGUMENTS as error:
            if not _is_refusal(error):
                raise
            return named(error)
        if not (fused - plain).abs().max() <= 0.1 * plain.abs().max():
            kind = str(dtype).removeprefix("torch.")
            return f"{WRONG} for {kind} on the device {device.type} in torch {torch.__version__}"
    return ""


def _try_out(
    factory: Callable[..., Optimizer], keywords: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Weights that began at 0. 67: some whole vector registers of any width, and a rest."""
    probe = nn.Parameter(torch.zeros(67, dtype=dtype, device=device))
    optimizer = factory([probe], **keywords)
    update = plain_step(optimizer)
    for step in range(3):
        probe.grad = torch.linspace(-1, 1 + step, 67, device=device).to(dtype)
        update()
    return probe.detach().double()


def start_momentum(optimizer: Optimizer) -> None:
    """Let torch's fused SGD begin with a momentum of 0 instead of none, which gives the same numbers.

    Without it, it leaves the momentum uninitialised where the first update is skipped, and fails where a
    parameter gets its first gradient later than others (torch 2.13). Only without dampening: with it,
    the first update of torch is another one.
    """
    for group in optimizer.param_groups if type(optimizer) is SGD else []:
        if group["fused"] and group["momentum"] != 0 and group["dampening"] == 0:
            for param in group["params"]:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param).detach()


def _check_contract(optimizer: Any, name: str, closures: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        raise PluginError(
            f"optimizer: {name} returned a {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
        )
    if closures:
        return
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, LBFGS):
        asked = {name: optimizer.param_groups[0][name] for name in ("max_iter", "line_search_fn")}
        if asked != {"max_iter": 1, "line_search_fn": None}:
            raise PluginError(
                f"optimizer.max_iter={asked['max_iter']}: LBFGS computes the loss again for each further iteration and "
                "in a line search, which a step over micro-batches cannot offer; use optimizer.max_iter=1 and "
                "optimizer.line_search_fn=null, which is exact: one iteration a step; or a step of your own that calls "
                "run.update(closure)"
            )
    elif closure is not None and closure.default is inspect.Parameter.empty:
        raise PluginError(
            f"optimizer: {name} computes the loss several times in a step (its step() needs a closure), "
            "which a step over micro-batches cannot offer; choose another, for example torch.optim.AdamW, or name a "
            "step of your own that calls run.update(closure)"
        )


def _only_sparse(optimizer: Optimizer, *_: Any) -> None:
    """A hook before each step of SparseAdam, whose own words say neither whose gradients nor what to do."""
    grads = [
        param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None
    ]
    if dense := sum(not grad.is_sparse for grad in grads):
        raise PluginError(
            f"optimizer: {type(optimizer).__name__} updates from sparse gradients alone, and {dense} parameters have "
            "dense ones; choose another, for example torch.optim.Adam"
        )
