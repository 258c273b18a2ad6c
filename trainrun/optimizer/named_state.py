"""The optimizer's state by the names of parameters, with the exact number types.

Optimizer.state_dict numbers the parameters, so it cannot tell a reordered model from the same one; and
Optimizer.load_state_dict casts what it loads to the type of the parameter, so float32 averages of
bfloat16 weights would be rounded. Here nothing is renamed silently and nothing is cast.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainrun.errors import CheckpointError


def named_optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """groups: the fields of each group, with names for parameters; state: by name; shapes: by name.

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
