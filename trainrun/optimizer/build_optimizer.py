"""The optimizer of a run, with torch's fused update where it exists; and its state by the names of parameters.

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
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainrun.errors import OF_ARGUMENTS, CheckpointError, PluginError
from trainrun.optimizer.plain_step import plain_step

if TYPE_CHECKING:
    from trainrun.optimizer.groups import GroupRules

PLAIN = (Adam, AdamW, SGD)  # which any gradients suit, and whose step asks for no closure
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
        from trainrun.user_code import named

        raise PluginError(f"optimizer: {name}: {named(error)}") from error
    if type(optimizer) not in PLAIN:
        from trainrun.optimizer.other_optimizers import check_contract

        check_contract(optimizer, name, closures)
    lines = division.settle(optimizer, factory, keywords) if division else []
    start_momentum(optimizer)
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
    from trainrun.user_code import is_of_torch

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
            from trainrun.user_code import named

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


def named_optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """The optimizer's state by the names of parameters, with the exact number types.

    Optimizer.state_dict numbers the parameters, so it cannot tell a reordered model from the same one; and
    Optimizer.load_state_dict casts what it loads to the type of the parameter, so float32 averages of
    bfloat16 weights would be rounded. Here nothing is renamed silently and nothing is cast.

    groups: the fields of each group, with names for parameters; state: by name; shapes: by name.

    others: state that belongs to no parameter; own: what the optimizer adds to its own `state_dict`.
    Tensors are the live ones, not copies. Parameters outside the model are an error.
    """
    names = names_of(optimizer, model)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {
        "groups": groups,
        "shapes": {name: list(param.shape) for param, name in names.items()},
        "state": {names[key]: value for key, value in optimizer.state.items() if key in names},
        "others": {key: value for key, value in optimizer.state.items() if key not in names},
        "own": _own_fields(optimizer),
    }


def names_of(optimizer: Optimizer, model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter of the optimizer, in its order."""
    known: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = sum(param not in known for param in params)
    if strangers:
        raise CheckpointError(
            f"optimizer: {strangers} of its {len(params)} tensors are no parameters of the model, "
            "so their state cannot be saved; make them parameters of the model"
        )
    return {param: known[param] for param in params}


def _own_fields(optimizer: Optimizer) -> dict[str, Any]:
    if type(optimizer).state_dict is Optimizer.state_dict:
        return {}
    return {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}
