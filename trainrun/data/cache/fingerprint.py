"""What the decoded content of a source depends on, as one short text: the name of its cache on disk.

A source with `fingerprint()` says it itself. Of others: the class and its code, and what pickle would send to another
process, so no open handles; arrays by content, paths by size and time of change, functions by their code.
"""

from __future__ import annotations

import copyreg
import hashlib
import os
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainrun.data.cache.samples import NotKept, take_apart
from trainrun.errors import DataError

FORMAT_VERSION = 2
WHOLE_ARRAY_BYTES = 64 * 2**20  # larger arrays are known by blocks spread over them
NUM_BLOCKS, BLOCK_BYTES = 64, 2**16


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
    parts = _Parts()
    try:
        parts.dump(source)
    except Exception as error:  # nested too deeply, or what some __reduce__ gives is no answer
        raise DataError(f"{type(source).__name__}: what it depends on cannot be told ({error}); give it a method "
                        "fingerprint() whose text changes with its samples") from error  # fmt: skip
    return parts.digest.hexdigest()


class _Parts(pickle.Pickler):
    """Feeds the parts of an object to a digest; nothing is kept or loaded."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._seen: set[Any] = set()
        super().__init__(self, 5)

    def write(self, data: Any) -> None:
        self.digest.update(data)

    def persistent_id(self, value: Any) -> Any:
        """Asked about every object. What is not None is taken in its place; bytes are made new for each, as pickle
        tells one object from two that are equal."""
        if isinstance(value, str | Path):
            return f"{type(value).__name__} {value}{_stamp(str(value))}".encode("utf-8", "surrogatepass")
        if isinstance(value, bytes | bytearray):
            return b"bytes " + value
        if isinstance(value, set | frozenset):
            return repr(sorted(map(repr, value))).encode()
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _array(value)
        if isinstance(value, types.FunctionType | type):
            known = value in self._seen
            self._seen.add(value)
            return [value.__qualname__, None if known else _code_of(value)]
        return None

    def reducer_override(self, value: Any) -> Any:
        """What cannot be sent to another process, such as a lock, counts by its class and name alone."""
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            return reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # whatever a class raises that refuses to be pickled
            return repr, (f"{type(value).__qualname__} {getattr(value, '__name__', '')}",)


def _code_of(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_code(value.__code__), value.__defaults__, value.__kwdefaults__, cells]
    kinds = [kind for kind in value.__mro__ if kind.__module__ != "builtins"]
    methods = [pair for kind in kinds for pair in sorted(vars(kind).items())]
    return [(name, _code(part.__code__)) for name, part in methods if isinstance(part, types.FunctionType)]


def _code(code: types.CodeType) -> list[Any]:
    """What a function does, without where it stands."""
    constants = [_code(part) if isinstance(part, types.CodeType) else part for part in code.co_consts]
    return [code.co_code, list(code.co_names), constants]


def _stamp(text: str) -> str:
    """Size and time of change of what a text is the path of."""
    if not text.strip("./") or not ("." in text or os.sep in text):
        return ""
    try:
        found = os.stat(text)
    except (OSError, ValueError):  # no path, or not one of this machine
        return ""
    return f" {found.st_size} {found.st_mtime_ns}"


def _array(value: Any) -> list[Any] | None:
    """None if it holds objects, which pickle goes through."""
    try:
        raw = take_apart(value.detach().cpu() if isinstance(value, Tensor) else value)[2][0]
    except NotKept:
        return None
    step, block = 2**20, 2**20
    if raw.nbytes > WHOLE_ARRAY_BYTES:
        step, block = raw.nbytes // NUM_BLOCKS, BLOCK_BYTES
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, raw.nbytes, step):
        digest.update(raw[start : start + block].data)
    return [str(value.dtype), list(value.shape), digest.digest()]
