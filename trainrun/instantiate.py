"""Build the object that an open node of the config describes: a dict with `_target_` and keyword arguments.

    {"_target_": "my_net.Net", "width": 64, "head": {"_target_": "torch.nn.ReLU"}}

`_args_` is a list of positional arguments. `_partial_: true` gives a `functools.partial`. Nested nodes, also in
dicts and lists, are built first. `check_node_arguments` finds mistakes before anything is built. With `_check_:
false` only the target itself checks its arguments.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from trainrun.errors import PluginError, TrainrunError
from trainrun.plugin_faults import (
    describe_error_location,
    describe_failed_call,
    describe_missing_module,
    describe_unknown_argument,
    format_class_example,
    is_missing_module,
    suggest_name,
)
from trainrun.user_code import HERE, add_import_paths

TARGET, ARGS, PARTIAL, CHECK = "_target_", "_args_", "_partial_", "_check_"
WORDS = (TARGET, ARGS, PARTIAL, CHECK)
CALLED = ("transform", "collate_fn", "loss")  # settings whose object is called with samples, or with outputs
KEPT = ("trainrun", "torch")  # which the program itself is made of
BUILT: set[str] = set()  # keys of the nodes that were built since a run began to be built
REFUSED = ("builtins", "ctypes", "importlib", "marshal", "nt", "os", "pickle", "posix", "posixpath", "pty",
           "runpy", "shutil", "subprocess", "sys")  # fmt: skip


def is_node(value: Any) -> bool:
    """Return whether a value of a config describes an object to build."""
    return isinstance(value, dict) and TARGET in value


def read_target_name(node: Any, usual: str = "") -> str:
    return str((node or {}).get(TARGET) or usual)


def named_nodes(value: Any) -> dict[str, Any]:
    """Return the named nodes in a value that has no `_target_` of its own; {} for any other value."""
    if not isinstance(value, dict) or value.get(TARGET):
        return {}
    return {name: inner for name, inner in value.items() if is_node(inner)}


def import_target(target: Any, key: str) -> Any:
    """Return the callable at a dotted path. Modules are imported; the rest of the path are attributes.

    Raise PluginError if it is not found, cannot be imported or called, or belongs to a refused module of the
    operating system. The refusal is a guard against slips and copied configs. It is no sandbox: naming a target runs
    code.
    """
    if target is None:
        raise PluginError(f"{key}: needs a class or function; name it, as {key}.{TARGET}=my_net.Net")
    names = target.split(".") if isinstance(target, str) else []
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        raise PluginError(f"{key}.{TARGET}={target}: name a class or function by its path, as my_net.Net")
    fault = f"{key}.{TARGET}={target}:"
    check_module_allowed(names[0], fault)
    value: Any
    value, path, rest = import_longest_prefix(names, fault)
    for name in rest:
        value, path = read_attribute(value, path, name, fault), f"{path}.{name}"
    if isinstance(value, ModuleType):
        raise PluginError(
            f"{fault} this is a module; name a class or function in it{format_class_example(value)}"
        )
    if not callable(value):
        raise PluginError(f"{fault} this is a value of type {type(value).__name__}, not a class or function")
    check_module_allowed(str(getattr(value, "__module__", "")).split(".")[0], fault)
    return value


def check_module_allowed(module: str, fault: str) -> None:
    if module in REFUSED:
        raise PluginError(f"{fault} targets from {module} are refused; use a function of your own instead")


def read_attribute(found: Any, path: str, name: str, fault: str) -> Any:
    try:
        return getattr(found, name)
    except AttributeError as error:
        modules = [module.name for module in pkgutil.iter_modules(list(getattr(found, "__path__", [])))]
        if name in modules:
            raise PluginError(f"{fault} this is a module; name a class or function in it") from error
        raise PluginError(
            f"{fault} {path} has no {name}{suggest_name(name, [*dir(found), *modules])}"
        ) from error
    except Exception as error:  # packages that import their parts when they are asked for
        raise PluginError(
            f"{fault} importing {path}.{name} failed: {describe_error_location(error)}"
        ) from error


def import_longest_prefix(names: list[str], fault: str) -> tuple[ModuleType, str, list[str]]:
    """Import the module at the start of a dotted path. Return it, its name, and the rest of the path."""
    with suppress(OSError):  # the working directory may be gone
        add_import_paths([])  # a program that calls `trainrun.train` may stand in another folder
    if names[0] not in sys.modules:
        importlib.invalidate_caches()  # its file may be younger than Python's listing of the folder
    prefix = HERE if is_shadowed_module(names[0]) else ""
    if prefix:
        enter_working_directory()
    for length in range(len(names) - 1, 0, -1):
        path = ".".join(names[:length])
        try:
            module = importlib.import_module(prefix + path)
            return module, f"{path} ({module.__file__})" if prefix else path, names[length:]
        except (Exception, SystemExit) as error:
            if not is_missing_module(error, prefix + path):
                raise PluginError(
                    f"{fault} importing {path} failed: {describe_error_location(error)}"
                ) from error
    raise PluginError(f"{fault} {describe_missing_module(names[0])}")


def enter_working_directory() -> None:
    """Make `trainrun.here` stand for the current working directory, which the process may have changed."""
    here = importlib.import_module(HERE.rstrip("."))
    folder = str(Path.cwd())
    if list(here.__path__) != [folder]:
        here.__path__[:] = [folder]
        for name in [name for name in sys.modules if name.startswith(HERE)]:
            del sys.modules[name]


def is_shadowed_module(name: str) -> bool:
    """Return whether another module of the same name hides a module of the working directory."""
    with suppress(OSError):  # the working directory may be gone
        folder = Path.cwd().resolve()
        if name in KEPT or folder not in {Path(path).resolve() for path in sys.path}:
            return False
        own_files = [
            place for place in (folder / name / "__init__.py", folder / f"{name}.py") if place.is_file()
        ]
        if not own_files:
            return False
        if name in sys.stdlib_module_names:
            return True
        with suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(name)
            return (
                spec is None or spec.origin is None or Path(spec.origin).resolve() != own_files[0].resolve()
            )
        return True
    return False


def check_node_arguments(
    node: Any, key: str, extra: Sequence[str] = (), also: Iterable[str] = ()
) -> list[str]:
    """Return a line for each mistake in a node and in the nodes inside it. Targets are imported, but not called.

    extra: names of positional arguments that trainrun itself passes. also: names of trainrun's own settings in the
        node. They are only used to suggest similar names.
    """
    faults = [
        fault for name, value in iterate_children(node, key) for fault in check_node_arguments(value, name)
    ]
    if not is_node(node):
        return faults
    try:
        target = import_target(node[TARGET], key)
    except PluginError as error:
        return [str(error), *faults]
    unchecked = node.get(CHECK) is False
    return (
        check_special_keys(node, key)
        + ([] if unchecked else check_target_signature(target, node, key, extra, also))
        + faults
    )


def build_node(node: Any, key: str, /, *positional: Any, **extra: Any) -> Any:
    """Build the object that a node describes. In any other value, build the nodes inside it.

    `positional` arguments come before the node's own. `extra` replaces keyword arguments of the same name. Raise
    PluginError if the target cannot be imported or if it raises. A TrainrunError of the target is not changed.
    """
    if not is_node(node):
        return build_inner_nodes(node, key)
    BUILT.add(key)
    target = import_target(node[TARGET], key)
    arguments = {name: value for name, value in node.items() if name not in WORDS}
    keywords = {name: build_node(value, f"{key}.{name}") for name, value in arguments.items()} | extra
    args = (*positional, *build_inner_nodes(node.get(ARGS, []), f"{key}.{ARGS}"))
    if node.get(PARTIAL, False):
        return functools.partial(target, *args, **keywords)
    try:
        return target(*args, **keywords)
    except TrainrunError:
        raise
    except Exception as error:
        if node[TARGET].startswith("trainrun.") and str(error).partition("=")[0] in keywords:
            raise PluginError(f"{key}.{error}") from error  # one of ours names the argument that it refuses
        raise PluginError(f"{key}: {node[TARGET]} {describe_failed_call(error, args, keywords)}") from error


def build_inner_nodes(value: Any, key: str) -> Any:
    """Return a dict or list with the nodes inside it built; other values unchanged."""
    if isinstance(value, dict):
        return {name: build_node(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [build_node(item, f"{key}[{i}]") for i, item in enumerate(value)]
    return value


def iterate_children(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield key and value of each entry of a dict or list."""
    if isinstance(value, dict):
        yield from ((f"{key}.{name}", item) for name, item in value.items())
    elif isinstance(value, list):
        yield from ((f"{key}[{i}]", item) for i, item in enumerate(value))


def check_special_keys(node: dict[str, Any], key: str) -> list[str]:
    """Return a message for each wrong value of a special key such as `_partial_`."""
    faults = []
    if not isinstance(node.get(ARGS, []), list):
        faults.append(f"{key}.{ARGS}={node[ARGS]}: must be a list")
    for word in (PARTIAL, CHECK):
        if not isinstance(node.get(word, False), bool):
            faults.append(f"{key}.{word}={node[word]}: must be true or false")
    return faults


def check_target_signature(
    target: Callable[..., Any], node: dict[str, Any], key: str, extra: Sequence[str], also: Iterable[str]
) -> list[str]:
    """Bind the arguments of a node to the signature of its target. Return a message for each mistake.

    Return [] if the target has no usable signature.
    """
    parameters = list_parameters(target)
    if parameters is None:
        return []
    target_path, arguments = node[TARGET], [name for name in node if name not in WORDS]
    args = node.get(ARGS, [])
    num_positional = len(extra) + (len(args) if isinstance(args, list) else 0)
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    faults = []
    if num_positional > len(by_place) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        handed = f" ({', '.join(extra)} from trainrun)" if extra else ""
        faults.append(
            f"{key}.{TARGET}={target_path}: takes {len(by_place)} arguments by position, "
            f"but gets {num_positional}{handed}"
        )
    placed = {p.name for p in by_place[:num_positional]}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    free = [p for p in named if p.name not in placed]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in arguments:
        if name in placed and not is_positional_only(by_place, name):
            faults.append(f"{key}.{name}: {target_path} gets it by position already; take {key}.{name} away")
        elif name not in placed and not takes_any and name not in [p.name for p in free]:
            faults.append(
                describe_unknown_argument(key, name, target_path, [p.name for p in free], also, WORDS)
            )
    if not node.get(PARTIAL, False):
        missing = [p for p in free if p.default is p.empty and p.name not in arguments]
        itself = f", or {key}.{PARTIAL}=true for the function itself" if is_called_later(target, key) else ""
        faults += [
            f"{key}.{p.name}: {target_path} needs this argument; add {key}.{p.name}=...{itself}"
            for p in missing
        ]
    return faults


def is_called_later(target: Any, key: str) -> bool:
    """Return whether the target is a function, at a key that needs an object which is called later."""
    return inspect.isroutine(target) and key.endswith(CALLED)


def list_parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of the function that is called in the end. A wrapper may take more than the function
    that it wraps.

    Return None for C code without a signature, and for a signature that was set by hand (`transformers`, pydantic).
    """
    called = (target, getattr(target, "__init__", None), getattr(target, "__new__", None))
    if any("__signature__" in getattr(item, "__dict__", ()) for item in called):
        return None
    try:
        return list(inspect.signature(target, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None


def is_positional_only(by_place: list[inspect.Parameter], name: str) -> bool:
    """Return whether a name is a positional-only parameter, so that **kwargs may contain it too."""
    return any(p.name == name and p.kind is p.POSITIONAL_ONLY for p in by_place)


def import_satellite(name: str, without: str, tell: Callable[[str], None]) -> ModuleType | None:
    """Import the module `trainrun.<name>`. If its folder was removed, report this in one line and return None.

    without: what the run does instead, such as "no pictures are drawn".
    """
    folder = f"trainrun.{name.partition('.')[0]}"
    try:
        return importlib.import_module(f"trainrun.{name}")
    except ModuleNotFoundError as error:
        if error.name not in (folder, f"trainrun.{name}"):
            raise
        tell(f"{folder} is not installed: {without}")
        return None
