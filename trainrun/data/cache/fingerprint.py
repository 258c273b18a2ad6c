"""The fingerprint of a source, a short text that changes with its decoded samples. It names the cache on disk.

A source with `fingerprint()` returns it. For any other source, the fingerprint is computed from the class, its code,
and the values that pickle would send to another process (so no open handles). Arrays count by content, functions by
their code and the user's functions and values that it names, and paths by the version of the file, see
`describe_version`. A folder counts by the versions of all files
below it, except hidden files, caches and runs. A folder that contains the working directory counts by its own version
alone, because files of a project change often.
"""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import logging
import os
import pickle
import stat
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainrun.data.cache.samples import NotCacheable, flatten_sample
from trainrun.data.readers.paths import describe_version
from trainrun.errors import DataError
from trainrun.user_code import is_user_file, is_users_class

LOG = logging.getLogger(__name__)
FORMAT_VERSION = 2
WHOLE_ARRAY_BYTES = 64 * 2**20  # larger arrays are known by blocks spread over them
NUM_BLOCKS, BLOCK_BYTES = 64, 2**16
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    list,
    dict,
    set,
    frozenset,
    Path,
    Tensor,
    np.ndarray,
    np.generic,
)
OF_A_RUN, COMPILED = "RUN.json", "__pycache__"
MOST_FILES = 100_000  # below the folders that a source names; looking at so many takes about half a second


def build_content_key(source: Any, own: str, samples: str) -> str:
    """Return the key of a cache. own: the result of `fingerprint_source`. samples: a digest of decoded samples."""
    kind = type(source)
    text = repr((FORMAT_VERSION, kind.__module__, kind.__qualname__, len(source), own, samples))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fingerprint_source(
    source: Any, cache: Path | None = None, say: Callable[[str], None] = LOG.warning
) -> str:
    """Return a text that changes with the samples of a source. Call it before a sample is read, because reads may
    change attributes.

    cache: the folder of caches, which is left out. say: receives a line about a folder whose files are not compared.
    """
    read_fingerprint = getattr(source, "fingerprint", None)
    if callable(read_fingerprint):
        return f"said {read_fingerprint()}"
    parts = _Parts(cache)
    try:
        parts.dump(source)
    except Exception as error:  # nested too deeply, or what some __reduce__ gives is no answer
        raise DataError(f"{type(source).__name__}: what it depends on cannot be told ({error}); give it a method "
                        "fingerprint() whose text changes with its samples") from error  # fmt: skip
    if parts.unseen:
        say(
            f"{parts.unseen}, so a change inside one of its files is not seen; "
            f"give {type(source).__name__} a method fingerprint() whose text then changes"
        )
    return parts.digest.hexdigest()


class _Parts(pickle.Pickler):
    """A pickler that hashes the parts of an object. Nothing is stored or loaded."""

    def __init__(self, cache: Path | None) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self.unseen = ""  # the first folder of which not all files were looked at, and why
        self._seen: set[Any] = set()
        self._left = MOST_FILES
        self._known: dict[tuple[int, int], str] = {}
        self._stamps: dict[str, str] = {}
        here = Path.cwd()
        self._projects = {_find_offset(folder.stat()) for folder in (here, *here.parents)}
        self._apart = None if cache is None or not cache.exists() else _find_offset(cache.stat())
        super().__init__(self, 5)

    def write(self, data: Any) -> None:
        self.digest.update(data)

    def persistent_id(self, value: Any) -> Any:
        """Return a replacement for an object, or None to let pickle process it.

        Bytes are new for each object, because pickle distinguishes one object from two equal ones.
        """
        if isinstance(value, str | Path):
            text = str(value)
            if text not in self._stamps:
                self._stamps[text] = self._describe_version(text)
            return f"{type(value).__name__} {text}{self._stamps[text]}".encode("utf-8", "surrogatepass")
        if isinstance(value, bytes | bytearray):
            return b"bytes " + value
        if isinstance(value, set | frozenset):
            return repr(sorted(map(repr, value))).encode()
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _describe_array(value)
        if isinstance(value, types.FunctionType | type):
            was_seen = value in self._seen
            self._seen.add(value)
            return [value.__qualname__, None if was_seen else _find_code(value)]
        return None

    def _describe_version(self, text: str) -> str:
        """Return the version of a path and of the files below it; empty if the text is not a path."""
        if not text.strip("./"):
            return ""
        try:
            status = os.stat(text)
            if not stat.S_ISDIR(status.st_mode):
                return f" {describe_version(status)}"
            if not (inside := self._describe_folder(text, status)):
                self.unseen = self.unseen or f"{text} holds runs alone"
            return inside
        except (OSError, ValueError):  # no path, or not one of this machine
            return ""

    def _describe_folder(self, folder: str, found: os.stat_result) -> str:
        """Return the versions of the files of a folder; "" if all of them are left out. Each folder is read once."""
        if (place := _find_offset(found)) in self._known:
            return self._known[place]
        if place in self._projects:
            self.unseen = self.unseen or f"{folder} holds the working directory"
            return f" {describe_version(found)}"
        self._known[place], lines = "", []
        with os.scandir(folder) as all_of_it:
            visible = (one for one in all_of_it if one.name[0] != "." and one.name != COMPILED)
            entries = sorted(visible, key=lambda one: one.name)
        if any(entry.name == OF_A_RUN for entry in entries):
            return ""
        for entry in entries:
            self._left -= 1
            if self._left < 0:
                self.unseen = self.unseen or f"{folder} has more than {MOST_FILES:,} files"
                return f" {describe_version(found)}"
            with suppress(OSError):  # a link to nothing
                about = entry.stat()
                if _find_offset(about) != self._apart:
                    is_folder = stat.S_ISDIR(about.st_mode)
                    inside = (
                        self._describe_folder(entry.path, about)
                        if is_folder
                        else f" {describe_version(about)}"
                    )
                    lines += [entry.name + inside] if inside else []
        if lines or not entries:
            listing = "\n".join(lines).encode("utf-8", "surrogateescape")
            self._known[place] = f" {hashlib.blake2b(listing, digest_size=16).hexdigest()}"
        return self._known[place]

    def reducer_override(self, value: Any) -> Any:
        """Use class and name alone for an object that cannot be pickled, such as a lock."""
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            return reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # whatever a class raises that refuses to be pickled
            return repr, (f"{type(value).__qualname__} {getattr(value, '__name__', '')}",)


def _find_code(value: Any) -> list[Any]:
    """Return what the result of a function depends on; of a class, its methods and plain attributes."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        named = _find_named_globals(value.__code__, value.__globals__)
        return [_describe_code(value.__code__), value.__defaults__, value.__kwdefaults__, cells, named]
    kinds = [kind for kind in value.__mro__ if kind.__module__ != "builtins"]
    attributes = [pair for kind in kinds for pair in sorted(vars(kind).items())]
    return [
        (name, part)
        for name, attribute in attributes
        if isinstance(part := _unwrap_function(attribute), types.FunctionType)
    ]


def _unwrap_function(value: Any) -> Any:
    """Return the function inside a static or class method, a property, or a decorator such as `functools.cache`."""
    if isinstance(value, property):
        return value.fget
    return inspect.unwrap(value) if callable(value) or hasattr(value, "__wrapped__") else value


def _find_named_globals(code: types.CodeType, module: dict[str, Any]) -> list[Any]:
    """Return the functions, classes and values that code of the user names in its module, and in modules of the user
    that it names.
    """
    if not is_user_file(code.co_filename):
        return []
    named_modules = [value for name in code.co_names if _is_users_module(value := module.get(name))]
    named = [
        (name, _unwrap_function(space[name]))
        for space in (module, *map(vars, named_modules))
        for name in code.co_names
        if name in space
    ]
    nested = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    inside = [pair for part in nested for pair in _find_named_globals(part, module)]
    return [*((name, value) for name, value in named if _counts(value)), *inside]


def _is_users_module(value: Any) -> bool:
    file = getattr(value, "__file__", None) if isinstance(value, types.ModuleType) else None
    return file is not None and is_user_file(file)


def _counts(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return is_user_file(value.__code__.co_filename)
    if isinstance(value, type):
        return is_users_class(value)
    return isinstance(value, PLAIN)


def _describe_code(code: types.CodeType) -> list[Any]:
    """Return the code of a function, without its line numbers."""
    constants = [
        _describe_code(part) if isinstance(part, types.CodeType) else part for part in code.co_consts
    ]
    return [code.co_code, list(code.co_names), constants]


def _find_offset(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _describe_array(value: Any) -> list[Any] | None:
    """Return type, shape and digest of an array; None if it has objects, which pickle processes."""
    try:
        raw = flatten_sample(value.detach().cpu() if isinstance(value, Tensor) else value)[2][0]
    except NotCacheable:
        return None
    step, block = 2**20, 2**20
    if raw.nbytes > WHOLE_ARRAY_BYTES:
        step, block = raw.nbytes // NUM_BLOCKS, BLOCK_BYTES
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, raw.nbytes, step):
        digest.update(raw[start : start + block].data)
    return [str(value.dtype), list(value.shape), digest.digest()]
