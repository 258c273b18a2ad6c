"""Optimizers that want a closure, sparse gradients, or are none: what is refused, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from trainrun.errors import PluginError

StateOf = Callable[[Optimizer, nn.Module], dict[str, Any]]
DEEPEST = 3  # lists in lists of what an optimizer keeps
OF_TORCH = ("defaults", "state", "param_groups")


def check_contract(optimizer: Any, name: str, closures: bool) -> None:
    """closures: the loss may be computed several times in a step. Raises PluginError."""
    if not isinstance(optimizer, Optimizer):
        raise PluginError(
            f"optimizer: {name} returned a {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
        )
    if isinstance(optimizer, SparseAdam):
        optimizer.register_step_pre_hook(_only_sparse)
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


def lost_at_a_resume(optimizer: Optimizer, model: nn.Module) -> str:
    """What to say of what it keeps outside of its state, where no checkpoint finds it."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return ""
    kept = ", ".join(
        dict.fromkeys(name.partition(".")[0] for name, value in _kept(optimizer) if _is_lost(value, model))
    )
    return (
        f"; a resume begins with a new {kept}: keep it in its state, or in its state_dict()" if kept else ""
    )


def inner_states(optimizer: Optimizer, model: nn.Module, state_of: StateOf) -> dict[str, Any]:
    """What `named_optimizer_state` says of each optimizer that one keeps and that has a state of its own."""
    return {
        name: state_of(inner, model)
        for name, inner in inner_of(optimizer).items()
        if inner.state and inner.state is not optimizer.state and _is_of(inner, model)
    }


def inner_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that one keeps, as SAM and Lookahead do, by the place in its attributes (`parts.0`)."""
    return {name: value for name, value in _kept(optimizer) if isinstance(value, Optimizer)}


def _is_of(optimizer: Optimizer, model: nn.Module) -> bool:
    known = set(model.parameters())
    return all(param in known for group in optimizer.param_groups for param in group["params"])


def _kept(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The attributes of its own by name; in place of a list, tuple or dict its members."""
    for name, value in vars(optimizer).items():
        if name not in OF_TORCH:
            yield from _members(name, value, DEEPEST)


def _members(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, list | tuple | dict) or not depth:
        yield name, value
        return
    for place, key in enumerate(value if isinstance(value, dict) else range(len(value))):
        yield from _members(f"{name}.{key if isinstance(key, str) else place}", value[key], depth - 1)


def _is_lost(value: Any, model: nn.Module) -> bool:
    if isinstance(value, Optimizer):
        return not _is_of(value, model)
    if isinstance(value, nn.Module | nn.Parameter):
        return False
    return isinstance(value, Tensor) or (hasattr(value, "state_dict") and not isinstance(value, type))


def check_sparse(optimizer: Optimizer, model: nn.Module) -> None:
    """Raises PluginError for an option of SGD that adds a dense tensor to a sparse gradient, which torch cannot."""
    sparse = {
        param: f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for name, param in module.named_parameters(recurse=False)
    }
    for group in optimizer.param_groups:
        name = next((sparse[param] for param in group["params"] if param in sparse), None)
        option = next((option for option in ("nesterov", "weight_decay") if group[option]), None)
        if name is not None and option is not None:
            off = "false" if option == "nesterov" else "0"
            raise PluginError(
                f"optimizer.{option}={str(group[option]).lower()}: does not go with sparse gradients, of {name}; use "
                f"optimizer.{option}={off} (or for it alone, in optimizer.groups), or sparse=False in the embedding"
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
