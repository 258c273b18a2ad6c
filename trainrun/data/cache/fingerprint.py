"""What the decoded content of a source depends on, as one short text: the name of its cache on disk.

A source with `fingerprint()` says it itself. Of others: the class and its code, the attributes (arrays by
content, paths by size and time of change), the length and a few decoded samples.
"""

from __future__ import annotations

import functools
import hashlib
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from trainrun.data.cache.tree import NotKept, take_apart

FORMAT_VERSION = 1
LONGEST_PATH = 4096
WHOLE_ARRAY_BYTES = 64 * 2**20  # larger arrays are known by blocks spread over them
NUM_BLOCKS = 64
DEEPEST = 12


class Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def content_key(source: Any, own: str, samples: str) -> str:
    """own: from `own_fingerprint`. samples: a digest of the decoded ones."""
    kind = type(source)
    text = repr((FORMAT_VERSION, kind.__module__, kind.__qualname__, len(source), own, samples))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def own_fingerprint(source: Any) -> str:
    """To be taken before a sample is read: reading may leave traces in the attributes."""
    say = getattr(source, "fingerprint", None)
    if callable(say):
        return f"said {say()}"
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, source, 0, {})
    return digest.hexdigest()


def _add(digest: Hash, value: Any, depth: int, seen: dict[int, Any]) -> None:
    """Whatever is no plain value adds its class and its parts; one that was met before adds its class alone."""
    digest.update(f"|{type(value).__module__}.{type(value).__qualname__}:".encode())
    if value is None or isinstance(value, bool | int | float | complex):
        digest.update(repr(value).encode())
    elif isinstance(value, str | Path):
        _add_text(digest, str(value))
    elif isinstance(value, bytes | bytearray):
        digest.update(value)
    elif isinstance(value, Tensor | np.ndarray | np.generic):
        _add_array(digest, value)
    elif depth < DEEPEST and id(value) not in seen:
        seen[id(value)] = value  # kept alive, or another object might get its id
        for part in _parts(value):
            _add(digest, part, depth + 1, seen)
        if isinstance(value, list | tuple):  # two equal ones may be one object or two
            del seen[id(value)]


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | range):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__qualname__, *_code(value.__code__), value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        return [getattr(value, "__qualname__", value.__name__)]
    codes = [_class_code(kind) for kind in type(value).__mro__ if kind.__module__ != "builtins"]
    return [codes, *(part for pair in sorted(_attributes(value).items(), key=_name) for part in pair)]


def _name(pair: tuple[Any, Any]) -> str:
    return str(pair[0])


def _attributes(value: Any) -> dict[str, Any]:
    """Those that would be sent to another process, where the class tells them apart: no open handles."""
    own_state = getattr(type(value), "__getstate__", None)
    if own_state is not None and own_state is not getattr(object, "__getstate__", None):
        state = value.__getstate__()
        return state if isinstance(state, dict) else {"state": state}
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})


def _code(code: types.CodeType) -> list[Any]:
    """What a function does, without where it stands."""
    inner = [_code(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts]
    return [code.co_code, list(code.co_names), inner]


def _class_code(kind: type) -> list[Any]:
    """The code of the methods of a class: a changed one decodes otherwise."""
    functions = [(name, part) for name, part in vars(kind).items() if isinstance(part, types.FunctionType)]
    return [kind.__qualname__, *([name, *_code(part.__code__)] for name, part in sorted(functions))]


def _add_text(digest: Hash, text: str) -> None:
    """A text that is the path of something adds its size and time of change."""
    digest.update(text.encode("utf-8", "surrogatepass"))
    if 0 < len(text) <= LONGEST_PATH and (os.sep in text or "." in text) and not {"\n", "\0"} & set(text):
        try:
            found = os.stat(text)
        except (OSError, ValueError):  # no path, or not one of this machine
            return
        digest.update(f"{found.st_size} {found.st_mtime_ns}".encode())


def _add_array(digest: Hash, value: Any) -> None:
    digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
    try:
        raw = take_apart(value.detach().cpu() if isinstance(value, Tensor) else value).buffers[0]
    except NotKept:  # of objects
        digest.update(repr(value.tolist()).encode() if isinstance(value, np.ndarray) else b"")
        return
    if raw.nbytes <= WHOLE_ARRAY_BYTES:
        digest.update(raw.data)
        return
    step = raw.nbytes // NUM_BLOCKS
    for start in range(0, raw.nbytes - step + 1, step):
        digest.update(raw[start : start + 2**16].data)
