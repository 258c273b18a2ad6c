"""Build the optimizer of a run, with torch's fused update where it exists, and describe its state by parameter
names.

`fused=None` is torch's default. On a CPU it means a Python loop over the parameters. The fused update computes the
same in one call: a whole step of a small network takes 1.5x less time (227 against 334 us on a CPU), and the update
alone of 200 small tensors 7x less. On a GPU torch uses batched kernels (`foreach=True`) by default. On a CPU they
are rarely faster (0.8x to 1.8x).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainrun.errors import OF_ARGUMENTS, CheckpointError, PluginError
from trainrun.optimizer.groups import GroupDivision, GroupRules
from trainrun.optimizer.other_optimizers import (
    are_shards,
    check_contract,
    check_sharded_updates,
    check_sparse_gradients,
    describe_lost_state,
    inner_states,
    sparse_parameters,
)
from trainrun.runtime.memory_layout import is_dense
from trainrun.tensors import read_whole_shape
from trainrun.user_code import class_package, format_error, is_raised_by_torch

ADDED = "added"  # the mark of a group that a hook has added
PLAIN = (Adam, AdamW, SGD)  # which any gradients suit, and whose step asks for no closure


def build_optimizer(
    factory: Callable[..., Optimizer],
    keywords: dict[str, Any],
    model: nn.Module,
    params: list[nn.Parameter] | None = None,
    closures: bool = False,
    rules: GroupRules | None = None,
) -> tuple[Optimizer, str]:
    """Return `factory(parameters, **keywords)`, and a note on the chosen kernel.

    The optimizer gets frozen parameters too. Like torch's optimizers, it must skip parameters without a gradient, and
    train
    them from the step on in which they are no longer frozen.
    params: the parameters of one of several optimizers; None for all. closures: whether it may compute the loss
        several times in a step. rules: of parameter groups, each of which adds a line to the note.
    """
    has_all_params = params is None
    members = list(model.parameters()) if params is None else params
    params = [param for param in members if param.is_floating_point() or param.is_complex()]
    if not any(param.requires_grad for param in model.parameters()):
        raise PluginError("model: no parameter of the model requires a gradient, so nothing can be trained")
    name = getattr(factory, "__name__", type(factory).__name__)
    make_groups = getattr(factory, "parameter_groups", None)  # of Muon, or of a user's own
    if make_groups is not None and not has_all_params:
        raise PluginError(
            f"optimizer: {name} divides the parameters of a whole model; it cannot be one of several"
        )
    groups: Any = params if make_groups is None else make_groups(model)
    division, settings = None, [keywords]
    if rules is not None:
        division = GroupDivision(rules, model, members, groups if make_groups else [{"params": params}])
        groups = division.groups
        settings += [keywords | rules.options(number) for number in range(len(rules.groups))]
    wish = keywords
    keywords = choose_kernel(factory, settings, model, params)
    if are_shards(params):
        check_sharded_updates(factory, keywords, params[0].device)
    try:
        optimizer = factory(groups, **keywords)
    except (RuntimeError, *OF_ARGUMENTS) as error:
        if not (
            _is_refusal(error)
            or (isinstance(error, RuntimeError) and (wish.get("fused") or wish.get("foreach")))
        ):
            raise
        raise PluginError(f"optimizer: {name}: {format_error(error)}") from error
    lost = ""
    if type(optimizer) not in PLAIN:
        check_contract(optimizer, name, closures)
        lost = describe_lost_state(optimizer, model)
    lines = division.apply_options(optimizer, factory, keywords) if division else []
    if _is_sparse(model) and (sparse := sparse_parameters(model)):
        check_sparse_gradients(optimizer, model, sparse)
    start_momentum_at_zero(optimizer)
    move_parameters_to_added_groups(optimizer)
    if class_package(type(optimizer)) not in ("torch", "trainrun"):
        hide_frozen_parameters(optimizer)
    devices = ", ".join(sorted({param.device.type for param in params}))
    kernel, reason = describe_kernel(optimizer, wish)
    note = f"optimizer: {name}, {kernel} ({devices}): {reason}{lost}"
    if callable(describe_parts := getattr(optimizer, "describe_parts", None)):
        note += f"; {describe_parts()}"
    return optimizer, "\n".join([note, *lines])


def choose_kernel(
    factory: Callable[..., Optimizer],
    settings: list[dict[str, Any]],
    model: nn.Module,
    params: list[nn.Parameter],
) -> dict[str, Any]:
    """Return the keywords of the optimizer, the first of `settings`, with `fused=True` if that is possible for all
    of them.

    Raise PluginError if `fused=True` is among them and would compute wrong values.
    """
    keywords, param_set = settings[0], set(params)
    strided = [name for name, p in model.named_parameters() if p in param_set and not is_dense(p)]
    if keywords.get("fused") is True and is_fused_kernel_wrong(factory, params):
        raise PluginError(
            "optimizer.fused=true: torch's fused SGD of a CPU computes wrong values for 16-bit weights; use "
            "optimizer.fused=null"
        )
    if keywords.get("fused") is True and strided:
        raise PluginError(
            f"optimizer.fused=true: the parameter {strided[0]} is a part of a larger tensor, and torch's fused update "
            "on a CPU would overwrite the rest; use optimizer.fused=null"
        )
    if strided or not is_fused_kernel_correct(factory, params):
        return keywords
    suits = all(_may_fuse(factory, each, model) for each in settings)
    return keywords | {"fused": True} if suits else keywords


def describe_kernel(optimizer: Optimizer, wish: dict[str, Any]) -> tuple[str, str]:
    """Return which kernel computes the update, and why. wish: the options in the config."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    foreach = any(group.get("foreach") for group in optimizer.param_groups)
    kernel = "fused" if fused else "foreach" if foreach else "not fused"
    for switch in ("fused", "foreach"):
        if wish.get(switch) is not None:
            return kernel, f"optimizer.{switch}={str(wish[switch]).lower()}"
    if fused:
        return kernel, "one kernel in place of a loop over the tensors"
    excluded = "fused" in optimizer.defaults
    return kernel, "these parameters or options exclude it" if excluded else "it has no fused kernel"


def _may_fuse(factory: Callable[..., Optimizer], keywords: dict[str, Any], model: nn.Module) -> bool:
    """Return whether the fused kernel can be used: the optimizer has it, the config does not choose, and nothing
    prevents it.
    """
    if not has_option(factory, "fused", None) or keywords.get("fused") is not None:
        return False
    if factory is SGD and keywords.get("momentum") and keywords.get("dampening"):
        return False  # see start_momentum
    return not (_is_sparse(model) or keywords.get("foreach") or keywords.get("differentiable"))


def _is_sparse(model: nn.Module) -> bool:
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def _is_refusal(error: Exception) -> bool:
    """Return whether an error means that the optimizer refused its arguments, and not a mistake inside the user's
    code.
    """
    return isinstance(error, TypeError | ValueError) or (
        isinstance(error, OF_ARGUMENTS) and is_raised_by_torch(error)
    )


def has_option(factory: Callable[..., Optimizer], name: str, default: bool | None) -> bool:
    try:
        switch = inspect.signature(factory).parameters.get(name)
    except (TypeError, ValueError):  # a callable without a readable signature
        return False
    return switch is not None and switch.default is default


def is_fused_kernel_correct(factory: Callable[..., Optimizer], params: list[nn.Parameter]) -> bool:
    """Return whether torch 2.8 and later have a correct fused kernel for these parameters."""
    is_known_class = factory in PLAIN or getattr(factory, "__module__", "") == "trainrun.optimizer.muon"
    has_known_params = all(
        param.device.type in ("cpu", "cuda") and param.is_floating_point() for param in params
    )
    return is_known_class and has_known_params and not is_fused_kernel_wrong(factory, params)


def is_fused_kernel_wrong(factory: Callable[..., Optimizer], params: list[nn.Parameter]) -> bool:
    """Return whether the fused kernel computes wrong values.

    Up to torch 2.13, fused SGD on a CPU leaves most 16-bit weights unchanged (pytorch issue 191763).
    """
    return factory is SGD and any(param.device.type == "cpu" and param.itemsize == 2 for param in params)


def start_momentum_at_zero(optimizer: Optimizer) -> None:
    """Give torch's SGD a momentum of 0 at the start instead of none, which computes the same numbers.

    Call it again for parameters that are trained later.

    Without it, fused SGD does not initialise the momentum if the first update is skipped. It fails if a parameter
    gets its first gradient later than others (torch 2.13). With sparse gradients the momentum would be sparse, grow
    with every step, and fit into no checkpoint. It is not done with dampening, where the first update of torch would
    differ.
    """
    for group in optimizer.param_groups if type(optimizer) is SGD else []:
        if group["momentum"] != 0 and group["dampening"] == 0:
            for param in group["params"]:
                if param.requires_grad and optimizer.state.get(param, {}).get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param).detach()


def move_parameters_to_added_groups(optimizer: Optimizer) -> None:
    """Let a hook give parameters options of their own: `add_param_group` first removes them from their group.

    Torch refuses a parameter that is already in a group, and here each parameter is in one from the start. The new
    group is marked, so that a resume adds it again.
    """

    def add_param_group(param_group: dict[str, Any]) -> None:
        added = param_group["params"]
        params = [added] if isinstance(added, Tensor) else list(added)
        moved, before = set(params), [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param not in moved]
        try:
            type(optimizer).add_param_group(optimizer, {**param_group, "params": params, ADDED: True})
        except Exception:
            for group, members in zip(optimizer.param_groups, before, strict=True):
                group["params"] = members
            raise

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def hide_frozen_parameters(optimizer: Optimizer) -> None:
    """Hide frozen parameters from an optimizer during its steps, because it may read the gradient of every
    parameter.
    """
    members: list[list[Tensor]] = []

    def hide(*_: Any) -> None:
        members[:] = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param.requires_grad]

    def show(*_: Any) -> None:
        for group, params in zip(optimizer.param_groups, members, strict=True):
            group["params"] = params

    optimizer.register_step_pre_hook(hide)
    optimizer.register_step_post_hook(show)


def named_optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, without changing the number types.

    `Optimizer.state_dict` numbers the parameters, so it cannot detect a reordered model. `Optimizer.load_state_dict`
    casts to the type of the parameter, which would round the float32 averages of bfloat16 weights.

    groups: the fields of each group, with names for parameters. state, shapes: by name. others: state that belongs
        to no parameter. own: what the optimizer adds to its own `state_dict`. inner: the same for optimizers inside
        it. The tensors are not copied. Raise PluginError for parameters outside the model.
    """
    names, inner = optimizer_parameter_names(optimizer, model), {}
    if type(optimizer) not in PLAIN:
        inner = inner_states(optimizer, model, named_optimizer_state)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {
        "classes": [kind.__name__ for kind in type(optimizer).__mro__],
        "groups": groups,
        "shapes": {name: read_whole_shape(param) for param, name in names.items()},
        "state": {
            names[key]: value
            for key, value in optimizer.state.items()
            if key in names and not is_initial_adagrad_state(key, value)
        },
        "others": {key: value for key, value in optimizer.state.items() if key not in names},
        "own": _extra_fields(optimizer),
        "inner": inner,
    }


def is_initial_adagrad_state(param: Tensor, state: Any) -> bool:
    """Return whether this is the initial state that Adagrad also builds for frozen parameters."""
    return not param.requires_grad and isinstance(state, dict) and float(state.get("step", 1)) == 0


def optimizer_parameter_names(optimizer: Optimizer, model: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter of the optimizer, in the order of its groups."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = sum(param not in names for param in params)
    if strangers:
        raise CheckpointError(
            f"optimizer: {strangers} of its {len(params)} tensors are not parameters of the model, "
            "so their state cannot be saved; make them parameters of the model"
        )
    return {param: names[param] for param in params}


def _extra_fields(optimizer: Optimizer) -> dict[str, Any]:
    if type(optimizer).state_dict is Optimizer.state_dict:
        return {}
    return {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}
