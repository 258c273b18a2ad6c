"""Copy a network with the functions and hooks that refer to it.

Why: `copy.deepcopy` leaves functions as they are, so a hook `lambda *call: self.keep(call)` of the copy would call the
    original. It also leaves out the hooks and the attributes of parameters.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor, nn

Network = TypeVar("Network")
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
NOT_COPIED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, Enum)


def copy_network(network: Network) -> Network:
    """Return a deep copy of a network, or of an object that has one. No function of it refers to the original."""
    copied = {id(part) for part in iterate_held_objects(network, types.FunctionType) if _is_copied(part)}
    parts = list(iterate_held_objects(network))
    functions = [part for part in parts if isinstance(part, types.FunctionType)]
    functions = [function for function in functions if _refers_to(copied, find_references(function))]
    copies: dict[int, Any] = {id(function): _copy_function(function) for function in functions}
    for part in parts:
        if isinstance(part, Tensor) and part.grad_fn is not None:  # computed by a hook, as by weight_norm
            copies[id(part)] = part.detach().clone()
    duplicate = copy.deepcopy(network, copies)

    def renew(value: Any) -> Any:
        return copy.deepcopy(value, copies) if _refers_to(copied, [value]) else value

    for function in functions:
        new = copies[id(function)]
        new.__defaults__, new.__kwdefaults__ = renew(function.__defaults__), renew(function.__kwdefaults__)
        for cell, new_cell in zip(function.__closure__ or (), new.__closure__ or (), strict=True):
            for value in find_references(cell):
                new_cell.cell_contents = renew(value)
    for param in parts:
        if isinstance(param, nn.Parameter) and id(param) in copies:
            new = copies[id(param)]
            vars(new).update(copy.deepcopy(vars(param), copies))
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if hooks := getattr(param, name):
                    setattr(new, name, copy.deepcopy(hooks, copies))
    return duplicate


def iterate_held_objects(value: Any, *closed: type) -> Iterator[Any]:
    """Yield a value and all objects that it refers to, each once. Objects of the closed types are yielded, but not
    searched.
    """
    waiting, seen = [value], {}
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part  # kept, so that no other object gets its id
        yield part
        if not isinstance(part, closed):
            waiting += find_references(part)


def find_references(value: Any) -> Iterable[Any]:
    """Return the objects that a container, an object or a function refers to."""
    if isinstance(value, type | types.ModuleType):
        return ()
    if isinstance(value, nn.Parameter):
        return [vars(value), value._backward_hooks, value._post_accumulate_grad_hooks]
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, CONTAINERS):
        return value
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, types.CellType):
        return [value.cell_contents] if value != types.CellType() else ()
    return getattr(value, "__dict__", {}).values()


def _is_copied(value: Any) -> bool:
    """Return whether `copy.deepcopy` makes another object of the value."""
    is_container = isinstance(value, CONTAINERS) and not isinstance(value, tuple | frozenset)
    return is_container or (hasattr(value, "__dict__") and not isinstance(value, NOT_COPIED))


def _refers_to(parts: set[int], values: Iterable[Any]) -> bool:
    """Return whether values are one of the parts, or hold one in containers, modules or functions."""
    holders = (
        *CONTAINERS,
        nn.Module,
        Tensor,
        functools.partial,
        types.MethodType,
        types.FunctionType,
        types.CellType,
    )
    held = (
        part
        for value in values
        if id(value) in parts or isinstance(value, holders)
        for part in iterate_held_objects(value)
    )
    return any(id(part) in parts for part in held)


def _copy_function(function: types.FunctionType) -> types.FunctionType:
    """Return the function with empty variables in place of those that it takes from around its definition."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    duplicate = types.FunctionType(function.__code__, function.__globals__, closure=cells)
    functools.update_wrapper(duplicate, function)
    return duplicate
