"""Checks of optimizers that need a closure, sparse gradients or whole tensors, and of objects that are not torch's
optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from trainrun.errors import PluginError
from trainrun.optimizer.plain_step import joined_optimizers
from trainrun.tensors import WHOLE_SHAPE

StateOf = Callable[[Optimizer, nn.Module], dict[str, Any]]
DEEPEST = 3  # lists in lists of what an optimizer keeps
OF_TORCH = ("defaults", "state", "param_groups")
COLUMNS, ROWS, STEPS = 6, 8, 3  # of the layer that `check_sharded_updates` tries
TOLERANCE = 1e-3  # of the largest change


def check_contract(optimizer: Any, name: str, closures: bool) -> None:
    """Raise PluginError if the runner cannot use this object as an optimizer.

    closures: whether a step may compute the loss again.
    """
    if not isinstance(optimizer, Optimizer):
        raise PluginError(
            f"optimizer: {name} returned a {type(optimizer).__name__}; it must return a torch.optim.Optimizer"
        )
    if closures:
        return
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, LBFGS):
        limits = {name: optimizer.param_groups[0][name] for name in ("max_iter", "line_search_fn")}
        if limits != {"max_iter": 1, "line_search_fn": None}:
            raise PluginError(
                f"optimizer.max_iter={limits['max_iter']}: LBFGS computes the loss several times per step, which the "
                "default step cannot do; use optimizer.max_iter=1 and optimizer.line_search_fn=null (exact: one "
                "iteration per step), or a step of your own that calls run.update(closure)"
            )
    elif closure is not None and closure.default is inspect.Parameter.empty:
        raise PluginError(
            f"optimizer: {name} computes the loss several times in a step (its step() needs a closure), "
            "which a step over micro-batches cannot offer; choose another, for example torch.optim.AdamW, or name a "
            "step of your own that calls run.update(closure)"
        )


def describe_lost_state(optimizer: Optimizer, model: nn.Module) -> str:
    """Describe the tensors that an optimizer stores outside of its state. Checkpoints do not contain them. Return "" if
    there are none.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return ""
    lost = ", ".join(
        dict.fromkeys(
            name.partition(".")[0]
            for name, value in _iterate_attributes(optimizer)
            if _is_unsaved(value, model)
        )
    )
    return (
        f"; a resume begins with a new {lost}: keep it in its state, or in its state_dict()" if lost else ""
    )


def inner_states(optimizer: Optimizer, model: nn.Module, state_of: StateOf) -> dict[str, Any]:
    """Return `named_optimizer_state` of each optimizer inside this one that has a state of its own."""
    return {
        name: state_of(inner, model)
        for name, inner in inner_optimizers(optimizer).items()
        if inner.state and inner.state is not optimizer.state and _is_optimizer_of(inner, model)
    }


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers inside this one (as in SAM and Lookahead), by attribute (`parts.0`)."""
    return {name: value for name, value in _iterate_attributes(optimizer) if isinstance(value, Optimizer)}


def _is_optimizer_of(optimizer: Optimizer, model: nn.Module) -> bool:
    model_parameters = set(model.parameters())
    return all(param in model_parameters for group in optimizer.param_groups for param in group["params"])


def _iterate_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the optimizer's own attributes by name. For lists, tuples and dicts, yield their members."""
    for name, value in vars(optimizer).items():
        if name not in OF_TORCH:
            yield from _iterate_members(name, value, DEEPEST)


def _iterate_members(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, list | tuple | dict) or not depth:
        yield name, value
        return
    for position, key in enumerate(value if isinstance(value, dict) else range(len(value))):
        yield from _iterate_members(
            f"{name}.{key if isinstance(key, str) else position}", value[key], depth - 1
        )


def _is_unsaved(value: Any, model: nn.Module) -> bool:
    if isinstance(value, Optimizer):
        return not _is_optimizer_of(value, model)
    if isinstance(value, nn.Module | nn.Parameter):
        return False
    return isinstance(value, Tensor) or (hasattr(value, "state_dict") and not isinstance(value, type))


# optimizers of torch that take sparse gradients, with the options that do not go with them
TAKES_SPARSE = {"SGD": ("nesterov", "weight_decay"), "Adagrad": ("weight_decay",), "SparseAdam": ()}


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with sparse gradients, according to the attribute `sparse` of their modules."""
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
    return [param for table in tables for param in table.parameters(recurse=False)]


def check_sparse_gradients(
    optimizer: Optimizer, model: nn.Module, sparse: Collection[Tensor], dense: Collection[Tensor] = ()
) -> None:
    """Raise PluginError if an optimizer of torch cannot use the gradients of these parameters.

    sparse: parameters with sparse gradients. dense: parameters with dense gradients, if known.
    """
    for part in joined_optimizers(optimizer) or [optimizer]:
        kind = type(part)
        if kind.__module__.startswith("torch.optim") or kind.__name__ == "Muon":
            _check_sparse_parameters(part, model, set(sparse), set(dense))


def _check_sparse_parameters(
    optimizer: Optimizer, model: nn.Module, sparse: Collection[Tensor], dense: Collection[Tensor]
) -> None:
    kind = type(optimizer).__name__
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        named_params = [param for param in group["params"] if param in names]
        names_here = [names[param] for param in named_params if param in sparse]
        others = [names[param] for param in named_params if param in dense]
        if kind == "SparseAdam" and others:
            raise PluginError(
                f"optimizer: SparseAdam needs sparse gradients, but the gradient of {others[0]} is dense; "
                f"{_describe_sparse_options(names, sparse)}"
            )
        if names_here and kind not in TAKES_SPARSE:
            raise PluginError(
                f"optimizer: {kind} does not accept the sparse gradient of {names_here[0]}; "
                f"{_describe_sparse_options(names, sparse)}"
            )
        option = next((option for option in TAKES_SPARSE.get(kind, ()) if group[option]), None)
        if names_here and option is not None:
            off = "false" if option == "nesterov" else "0"
            raise PluginError(
                f"optimizer.{option}={str(group[option]).lower()}: does not work with the sparse gradients of "
                f"{names_here[0]}; use optimizer.{option}={off} (or only for this parameter, in optimizer.groups), or "
                "sparse=False in the embedding"
            )


def _describe_sparse_options(names: Mapping[Tensor, str], sparse: Collection[Tensor]) -> str:
    """Describe which optimizers work for a model with these sparse gradients."""
    tables = [name for param, name in names.items() if param in sparse]
    if not tables:
        return "choose another, for example optimizer=adamw"
    others = [name for param, name in names.items() if param not in sparse]
    parts = {name.partition(".")[0] for name in tables}
    dense = dict.fromkeys(
        name if name.partition(".")[0] in parts or "." not in name else f"{name.partition('.')[0]}.*"
        for name in others
    )
    ways = "use sparse=False in the embedding, optimizer=sgd, or "
    if not others:
        return ways + "optimizer=custom optimizer._target_=torch.optim.SparseAdam"
    return ways + (
        "two optimizers: optimizer=custom optimizer.sparse._target_=torch.optim.SparseAdam "
        f"+optimizer.sparse.params=[{','.join(tables)}] optimizer.dense._target_=torch.optim.AdamW "
        f"+optimizer.dense.params=[{','.join(dense)}]"
    )


def are_shards(params: Iterable[Tensor]) -> bool:
    """Return whether the parameters are parts of larger tensors."""
    return any(hasattr(param, WHOLE_SHAPE) for param in params)


def check_sharded_updates(
    factory: Callable[..., Optimizer], keywords: dict[str, Any], device: torch.device
) -> None:
    """Raise PluginError if the optimizer updates two halves of a small layer differently from the whole layer."""
    name = getattr(factory, "__name__", type(factory).__name__)
    way_out = "each rank of parallel=fsdp has only rows of it; use torch.optim.AdamW or SGD, or parallel=ddp"
    try:
        changes = [_weight_changes(factory, keywords, device, rows) for rows in _row_slices(ROWS, ROWS // 2)]
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise PluginError(
            f"optimizer: {name} cannot be tried on a part of a layer ({type(error).__name__}: {reason}); {way_out}"
        ) from error
    unsharded, joined = changes[0], torch.cat(changes[1:])
    if not torch.allclose(unsharded, joined, rtol=0, atol=TOLERANCE * float(unsharded.abs().max())):
        raise PluginError(f"optimizer: {name} updates a weight by the whole of its gradient, and {way_out}")


def _row_slices(number: int, half: int) -> tuple[slice, slice, slice]:
    return slice(0, number), slice(0, half), slice(half, number)


def _weight_changes(
    factory: Callable[..., Optimizer], keywords: dict[str, Any], device: torch.device, rows: slice
) -> Tensor:
    """Return how a few updates change rows of a layer's weights and biases, (rows, COLUMNS + 1)."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(ROWS, COLUMNS + 1, generator=generator)[rows].to(device)
    model = nn.Sequential(nn.Linear(COLUMNS, len(start)), nn.Linear(len(start), 1)).to(device)
    layer: Any = model[0]  # the last layer gets no gradient: some optimizers treat it in another way
    with torch.no_grad():
        layer.weight.copy_(start[:, 1:])
        layer.bias.copy_(start[:, 0])
    make_groups = getattr(factory, "parameter_groups", None)
    optimizer = factory(list(model.parameters()) if make_groups is None else make_groups(model), **keywords)
    for step in range(STEPS):
        gradient = torch.randn(ROWS, COLUMNS + 1, generator=generator)[rows].to(device) * (step + 1)
        layer.weight.grad, layer.bias.grad = gradient[:, 1:].clone(), gradient[:, 0].clone()
        optimizer.step()
    end = torch.cat([layer.bias.detach()[:, None], layer.weight.detach()], dim=1)
    return end - start
