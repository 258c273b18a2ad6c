"""One checkpoint: a folder that is either complete and durable, or not there.

    step-00000042/
        MANIFEST.json                               what it is, and the hash of every file; written last
        state.json, shared.safetensors              what all ranks share, and what is rank 0's own
        rank-00001.json, rank-00001.safetensors     what is rank 1's own, and so on

`commit.py` writes it, this file reads it and trusts nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainrun.checkpoint import strict_json
from trainrun.checkpoint.blocks import AHEAD
from trainrun.checkpoint.file_hash import FileHash, Written
from trainrun.checkpoint.files import BUFFER_BYTES
from trainrun.checkpoint.manifest import (
    MANIFEST,
    Incompatible,
    Manifest,
    open_regular,
    rank_files,
    read_manifest,
    readable,
)
from trainrun.checkpoint.tensor_file import read_tensors
from trainrun.checkpoint.tree import unflatten
from trainrun.errors import CheckpointError

MAX_STATE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: what all ranks share, and the own tree of the rank that asked.

    own: None if the run that was saved had fewer ranks; `manifest.world_size` says how many.
    """

    folder: Path
    manifest: Manifest
    shared: Any
    own: Any


def is_sound(folder: Path, run_id: str) -> bool:
    """Whether a complete, undamaged checkpoint of this run lies there."""
    try:
        manifest = read_manifest(folder)
        _check_listing(folder, manifest)
        for name in manifest.files:
            _check_file(folder / name, manifest.files[name])
    except CheckpointError:
        return False
    return manifest.run_id == run_id


def read_checkpoint(folder: Path, rank: int = 0, run_id: str | None = None) -> Loaded:
    """Read and verify; rank 0 looks at the files of all ranks, the others at what they need.

    run_id: the run that the checkpoint must be of. Raises CheckpointError that names the file and
    what is wrong with it; Incompatible where nothing is damaged.
    """
    manifest = read_manifest(folder)
    if run_id is not None and manifest.run_id != run_id:
        raise Incompatible(f"{folder}: of another run ({manifest.run_id}; this one is {run_id})")
    _check_listing(folder, manifest)
    if rank == 0:
        for other in range(1, manifest.world_size):
            for name in rank_files(other):
                _check_file(folder / name, manifest.files[name])
    first = _read_part(folder, manifest, 0)
    own: dict[str, Any] = {"rank": None}
    if rank < manifest.world_size:
        own = first if rank == 0 else _read_part(folder, manifest, rank)
    return Loaded(folder, manifest, first["shared"], own["rank"])


def _check_listing(folder: Path, manifest: Manifest) -> None:
    with readable(folder):
        found = set(os.listdir(folder))
    expected = {MANIFEST, *manifest.files}
    if found != expected:
        name = min(found ^ expected)
        raise CheckpointError(f"{folder / name}: {'missing' if name in expected else 'not in the manifest'}")


def _check_file(path: Path, expected: Written) -> None:
    with open_regular(path) as file, FileHash(expected.piece_bytes) as content:
        _check_size(path, os.fstat(file.fileno()).st_size, expected)
        while data := file.read(BUFFER_BYTES):
            content.update(data)
            content.wait(AHEAD)
        found = content.written()
    _check_hash(path, found.sha256, expected)


def _read_part(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    text_path, tensors_path = (folder / name for name in rank_files(rank))
    expected = manifest.files[text_path.name]
    if expected.size > MAX_STATE_BYTES:
        raise CheckpointError(f"{text_path}: longer than {MAX_STATE_BYTES} bytes")
    with open_regular(text_path) as file, FileHash(expected.piece_bytes) as content:
        _check_size(text_path, os.fstat(file.fileno()).st_size, expected)
        text = file.read(expected.size)
        content.update(text)
        _check_hash(text_path, content.written().sha256, expected)
    expected = manifest.files[tensors_path.name]
    with open_regular(tensors_path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(tensors_path, size, expected)
        tensors, read = read_tensors(file, size, str(tensors_path), expected.piece_bytes)
    _check_hash(tensors_path, read.sha256, expected)
    tree = unflatten(strict_json.loads(text, str(text_path)), tensors, str(text_path))
    if not isinstance(tree, dict) or tree.keys() != ({"shared", "rank"} if rank == 0 else {"rank"}):
        raise CheckpointError(f"{text_path}: not the state of rank {rank}")
    return tree


def _check_size(path: Path, size: int, expected: Written) -> None:
    if size != expected.size:
        raise CheckpointError(f"{path}: damaged ({size} bytes, expected {expected.size})")


def _check_hash(path: Path, sha256: str, expected: Written) -> None:
    if sha256 != expected.sha256:
        raise CheckpointError(f"{path}: damaged (SHA-256 {sha256}, expected {expected.sha256})")
