"""What a conversion was made of: the nodes of the config, the files they name, and a few samples."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainrun.data.convert.samples import Samples, leaves_of

PATH_WORDS = ("path", "file", "files", "root", "dir", "folder")


def identity_of(nodes: Mapping[str, Any], parts: Mapping[str, Samples]) -> str:
    """Changes when the source changes: files by name, size and time of change; data in memory by its content.

    Of a data set of the user's own that names no file, only its length and a few samples are known.
    """
    digest = hashlib.sha256(json.dumps(nodes, sort_keys=True, default=str).encode())
    files = sorted({file for path in _paths(nodes) for file in _files(path)})
    for file in files:
        state = os.stat(file)
        digest.update(
            f"{os.path.abspath(file)}\0{state.st_size}\0{state.st_mtime_ns}\0".encode("utf-8", "replace")
        )
    for name, samples in parts.items():
        digest.update(f"{name} {len(samples)} {samples.class_names}\0".encode())
        for sample in samples.looked_at:
            _add(digest, sample)
        if not files and samples.columns is not None:
            for column in samples.columns.values:
                _add(digest, column)
    return digest.hexdigest()


def _add(digest: Any, sample: Any) -> None:
    for name, leaf in leaves_of(sample):
        digest.update(f"{name} {getattr(leaf, 'dtype', '')} {getattr(leaf, 'shape', '')}\0".encode())
        digest.update(leaf.data if isinstance(leaf, np.ndarray) and leaf.size else repr(leaf).encode())


def _paths(value: Any, key: str = "") -> Iterator[str]:
    """Words that name files: they stand under a name like path, or have a slash in them."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _paths(part, str(name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _paths(part, key)
    elif isinstance(value, str) and ("/" in value or key.lower().split("_")[-1] in PATH_WORDS):
        yield value


def _files(path: str) -> Iterator[str]:
    place = os.path.expanduser(path)
    found = [place] if os.path.exists(place) else glob.glob(place, recursive=True)
    for name in found:
        if os.path.isdir(name):
            for folder, _, files in os.walk(name):
                yield from (os.path.join(folder, file) for file in files)
        else:
            yield name
