"""Messages about a target that cannot be found, called or built, with the nearest name, the line, or the arguments."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import reprlib
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

BUILDER = str(Path(__file__).with_name("instantiate.py"))
EXTRAS = {
    "torchmetrics": "metrics",
    "transformers": "transformers",
    "timm": "timm",
}  # what brings these packages


def is_missing_module(error: BaseException, path: str) -> bool:
    """Return whether an import failed because the module itself, or a package that contains it, does not exist."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return name is not None and f"{path}.".startswith(f"{name}.")


def list_top_modules(name: str) -> list[str]:
    """Return the importable modules among which a similar name is searched; those of the working directory first."""
    own_modules = [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]
    return (
        own_modules
        if difflib.get_close_matches(name, own_modules)
        else [module.name for module in pkgutil.iter_modules()]
    )


def describe_missing_module(name: str) -> str:
    """Return a message about a missing module, with the extra to install or a similar name."""
    extra = EXTRAS.get(name)
    guess = f"; pip install 'trainrun[{extra}]'" if extra else suggest_name(name, list_top_modules(name))
    return f"no module {name} (looked in {Path.cwd()}, PYTHONPATH and what is installed){guess}"


def describe_failed_call(error: Exception, args: Sequence[Any], keywords: dict[str, Any]) -> str:
    """Return a message about a call with these arguments that raised an error."""
    arguments = (
        f"its arguments: {format_arguments(args, keywords)}" if args or keywords else "it got no arguments"
    )
    refused = isinstance(error, TypeError) and error.__traceback__ and error.__traceback__.tb_next is None
    problem = "does not take its arguments" if refused else "failed"
    tensor = "; give a tensor, as {_target_: torch.tensor, data: [1, 2]}" * (
        "'list' object to buffer" in str(error)
    )
    return f"{problem}: {describe_error_location(error)}; {arguments}{tensor}"


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean x?` with the most similar known name; "" if none is similar."""
    guesses = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {guesses[0]}?" if guesses else ""


def format_class_example(module: ModuleType) -> str:
    """Return the first class that a module defines, as an example for a message; "" without one."""
    classes = [item for item in vars(module).values() if inspect.isclass(item)]
    own_classes = [item.__name__ for item in classes if item.__module__ == module.__name__]
    return f", as {module.__name__.removeprefix('trainrun.here.')}.{own_classes[0]}" if own_classes else ""


def describe_error_location(error: BaseException) -> str:
    """Return `Type: first line of the message (file line n)`, with the innermost line outside installed packages."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename} line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (BUILDER, importlib.__file__)
    ]
    own_frames = [frame for frame in frames if "site-packages" not in frame.filename]
    last_frame = (own_frames or frames)[-1:]
    return f"{text} ({last_frame[0].filename} line {last_frame[0].lineno})" if last_frame else text


def describe_unknown_argument(
    key: str, name: str, target: str, takes: list[str], also: Iterable[str], words: Sequence[str]
) -> str:
    """Return the message for an unknown argument. words: the keys of a node that are no arguments, such as `_args_`."""
    if name.startswith("_") and name.endswith("_"):
        return f"{key}.{name}: not a word of trainrun, which knows {', '.join(words)}"
    takes_text = f"It takes: {', '.join(takes)}" if takes else "It takes none"
    near = suggest_name(name, [*takes, *also]) or "."
    if (key, name) == ("data.train", "val_fraction"):
        near = "; nothing is held out from your own data: add data.val._target_=..., or data.folds=5 data.fold=0."
    return f"{key}.{name}: {target} takes no such argument{near} {takes_text}"


def format_arguments(args: Sequence[Any], keywords: dict[str, Any]) -> str:
    """Format the arguments of a call in a short form. For objects only the type is given."""
    parts = [format_brief_value(value) for value in args] + [
        f"{name}={format_brief_value(value)}" for name, value in keywords.items()
    ]
    return ", ".join(parts)


def format_brief_value(value: Any) -> str:
    is_plain = value is None or isinstance(value, (bool, int, float, str, list, dict, tuple))
    return reprlib.repr(value) if is_plain else type(value).__name__


def describe_missing_satellite(error: Exception) -> str:
    """Return the message for a command whose folder was removed from the package; "" for any other error."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name or not name.startswith("trainrun."):
        return ""
    return f"{name} is not installed: this command needs it; install the whole package again"
