"""Check a state from `named_optimizer_state`, and copy it into a newly built optimizer."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainrun.errors import CheckpointError
from trainrun.optimizer.build_optimizer import ADDED, optimizer_parameter_names
from trainrun.optimizer.other_optimizers import inner_optimizers
from trainrun.tensors import read_whole_shape

CYCLED = ("momentum", "betas")
MAX_FAULTS_SHOWN = 5
LONGEST = 200  # letters of a name that a file may have made up
UNCOUNTED = ("SGD", "LBFGS", "Muon")  # of torch.optim; the others keep a `step` for every parameter
AVERAGES = {"Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq")}
# options of a group, and the state that each asks for
OPTIONS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
# belong to this machine, or to the class (which is all that parts AdamW from Adam), not to the training
OF_THIS_RUN = ("fused", "foreach", "decoupled_weight_decay")


def configured_fields(node: Mapping[str, Any]) -> set[str]:
    """Return the group fields that the config of an optimizer sets. `lr` is not among them: the schedule sets it."""
    some = [name for group in node.get("groups") or [] for name in group]
    kinds = ["weight_decay"] if node.get("no_decay") == "auto" else []
    return {*node, *some, *kinds} - {"_target_", "lr", "params"}


def load_named_optimizer_state(
    optimizer: Optimizer,
    model: nn.Module,
    tree: dict[str, Any],
    configured: Collection[str] = (),
) -> None:
    """Copy the stored state into a newly built optimizer of the same parameters.

    Groups that a hook has added are added again. configured: the group fields that the config sets (`weight_decay`).
    They keep the value of the current config in all other groups.
    """
    _check_class(optimizer, tree["classes"])
    params = {name: param for param, name in optimizer_parameter_names(optimizer, model).items()}
    _add_groups(params, optimizer, tree)
    _check_same_parameters(params, optimizer, tree)
    _check_fields(optimizer, tree)
    if tree["own"]:
        optimizer.load_state_dict(optimizer.state_dict() | tree["own"])
    for group, stored in zip(optimizer.param_groups, tree["groups"], strict=True):
        on_device = bool(group.get("fused") or group.get("capturable"))
        for name in stored["params"]:
            if name in tree["state"]:  # a parameter without a gradient so far may have none
                optimizer.state[params[name]] = _copy_state(tree["state"][name], params[name], on_device)
        cycled = CYCLED if "base_momentum" in stored else ()  # a schedule moves them
        fixed_fields = () if stored.get(ADDED) else configured
        _load_fields(group, stored, {name for name in fixed_fields if name not in cycled})
    if tree.get("inner"):
        inner = inner_optimizers(optimizer)
        for name, stored in tree["inner"].items():
            load_named_optimizer_state(inner[name], model, stored, configured)
    optimizer.state.update(copy.deepcopy(tree["others"]))


def _check_class(optimizer: Optimizer, stored: list[str]) -> None:
    """Raise CheckpointError if the state is of an unrelated optimizer class: neither a subclass nor a base class.

    stored: the names of the class of the saved optimizer and of its base classes.
    """
    classes = [kind.__name__ for kind in type(optimizer).__mro__]
    if stored[0] not in classes and classes[0] not in stored:
        raise CheckpointError(
            f"optimizer: the checkpoint has the state of {stored[0][:LONGEST]}, which {classes[0]} cannot continue "
            "with; use the same optimizer, or start a new run with its weights: init_from=RUN_DIR"
        )


def _add_groups(params: Mapping[str, Tensor], optimizer: Optimizer, tree: dict[str, Any]) -> None:
    """Move parameters into the groups that a hook had added before the checkpoint."""
    for stored in tree["groups"][len(optimizer.param_groups) :]:
        if stored.get(ADDED) and all(name in params for name in stored["params"]):
            optimizer.add_param_group({"params": [params[name] for name in stored["params"]]})


def _check_same_parameters(params: dict[str, Tensor], optimizer: Optimizer, tree: dict[str, Any]) -> None:
    """Raise CheckpointError unless the checkpoint and the optimizer have the same names, shapes and groups."""
    stored = tree["shapes"]
    faults = [f"{name} is new in the model" for name in params if name not in stored]
    faults += [f"{name[:LONGEST]} is not in the model now" for name in stored if name not in params]
    for name, shape in stored.items():
        if name in params and read_whole_shape(params[name]) != list(shape):
            faults.append(
                f"{name} has shape {read_whole_shape(params[name])}, stored {str(list(shape))[:LONGEST]}"
            )
    names = {param: name for name, param in params.items()}
    now = [{names[param] for param in group["params"] if param in names} for group in optimizer.param_groups]
    if not faults and now != [set(group["params"]) for group in tree["groups"]]:
        faults = [
            "the parameters are grouped differently (groups, no_decay and layer_decay of the optimizer)"
        ]
    if faults:
        shown, num_more = "; ".join(faults[:MAX_FAULTS_SHOWN]), len(faults) - MAX_FAULTS_SHOWN
        raise CheckpointError(
            f"optimizer: the state in the checkpoint belongs to other parameters: {shown}"
            + (f"; and {num_more} more" if num_more > 0 else "")
            + "; to start a new run with its weights: init_from=RUN_DIR"
        )


def _check_fields(optimizer: Optimizer, tree: dict[str, Any]) -> None:
    """Raise CheckpointError if the state lacks a field that torch's optimizer reads in its next step."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in UNCOUNTED:
        return
    always = ("step", *AVERAGES.get(kind.__name__, ()))
    for group, before in zip(optimizer.param_groups, tree["groups"], strict=True):
        needed = (*always, *(key for option, key in OPTIONS.items() if group.get(option)))
        for name in before["params"]:
            stored = tree["state"].get(name, dict.fromkeys(needed, 0))
            lacking = [key for key in needed if not isinstance(stored.get(key), Tensor | int | float)]
            if lacking:
                raise CheckpointError(
                    f"optimizer: the state of {name[:LONGEST]} in the checkpoint has no {' and no '.join(lacking)}, "
                    f"which torch.optim.{kind.__name__} needs with these options; continue with the same options, or "
                    "start a new run with its weights: init_from=RUN_DIR"
                )


def _load_fields(group: dict[str, Any], stored: dict[str, Any], fixed: Collection[str]) -> None:
    """Load the fields of a group except `fixed` ones. A tuple that became a list in the file becomes a tuple again."""
    for key, value in stored.items():
        if key == "params" or key in OF_THIS_RUN or key in fixed:
            continue
        fresh = group.get(key)
        if isinstance(fresh, Tensor):
            fresh.copy_(torch.as_tensor(value))
        elif isinstance(fresh, tuple) and isinstance(value, list):
            group[key] = tuple(value)
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value


def _copy_state(value: Any, param: Tensor, on_device: bool, key: str = "") -> Any:
    """Copy a nested state with the stored number types to the device where torch's optimizers keep it.

    Tensors get the memory format of the parameter, because fused kernels read both in memory order. A step count
    stays on the CPU unless the kernel reads it on the device.
    """
    if isinstance(value, Tensor):
        device = param.device if on_device or key != "step" else torch.device("cpu")
        if value.shape == param.shape:
            return torch.empty_like(param, dtype=value.dtype, device=device).detach().copy_(value)
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {k: _copy_state(v, param, on_device, k) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_copy_state(item, param, on_device) for item in value])
    return value
