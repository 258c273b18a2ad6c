"""One checkpoint: a folder that is either complete and durable, or not there.

    step-00000042/
        MANIFEST.json                               what it is, and the hash of every file; written last
        state.json, shared.safetensors              what all ranks share, and what is rank 0's own
        rank-00001.json, rank-00001.safetensors     what is rank 1's own, and so on

Writing: a temporary folder next to the target; every rank writes its files, fsyncs and reports; then
the manifest; fsync of the folder; the rename is the commit; fsync of the parent. No fault and no
power loss at any point leaves something that looks like a checkpoint and is none.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainrun.checkpoint import strict_json
from trainrun.checkpoint.files import BUFFER_BYTES, FileLayer, Written
from trainrun.checkpoint.manifest import (
    MANIFEST,
    Incompatible,
    Manifest,
    Metric,
    folder_name,
    manifest_bytes,
    open_regular,
    rank_files,
    read_manifest,
)
from trainrun.checkpoint.tensor_file import file_size, read_tensors, stream
from trainrun.checkpoint.together import file_faults, free_bytes, on_every_rank, on_rank_zero
from trainrun.checkpoint.tree import flatten, unflatten
from trainrun.errors import CheckpointError
from trainrun.interfaces import Parallel

MAX_STATE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Part:
    """What one rank writes: the JSON text of its values, and its tensors."""

    text: bytes
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return len(self.text) + file_size(self.tensors)

    def kept(self) -> Part:
        """A copy in host memory that further training does not change."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}
        return Part(self.text, copies)


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: what all ranks share, and the own tree of the rank that asked.

    own: None where the run that was saved had fewer ranks; `manifest.world_size` says how many.
    """

    folder: Path
    manifest: Manifest
    shared: Any
    own: Any


def build_part(rank: int, shared_tree: Any, rank_tree: Any) -> Part:
    """`shared_tree` counts on rank 0 only. Raises TypeError that names what cannot be saved."""
    plain, tensors = flatten({"shared": shared_tree, "rank": rank_tree} if rank == 0 else {"rank": rank_tree})
    text = strict_json.dumps(plain) + b"\n"
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"the state has {len(text):,} bytes of plain values; large ones belong in tensors"
        )
    return Part(text, tensors)


def write_checkpoint(root: Path, facts: Manifest, part: Part, parallel: Parallel, files: FileLayer) -> Path:
    """Commits one checkpoint below `root`; called by all ranks together, each with its own part.

    facts: the manifest without its files. A sound checkpoint of the same run and step is kept as it
    is. Any fault: no trace stays, and every rank raises CheckpointError with the reason.
    """
    target = root / folder_name(facts.step)
    needed = sum(parallel.gather(part.num_bytes))
    faults = partial(file_faults, f"cannot save checkpoint {target}", root, needed)

    def prepare() -> str | None:
        with faults():
            files.make_root(root)
            if is_sound(target, facts.run_id):
                return None
            if free_bytes(root) < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            name = f".tmp-{target.name}-{secrets.token_hex(4)}"
            files.mkdir(root / name)
            return name

    def write() -> dict[str, tuple[int, str]]:
        with faults():
            text_name, tensors_name = rank_files(parallel.rank)
            return {
                text_name: files.write(temporary / text_name, [part.text]),
                tensors_name: files.write(temporary / tensors_name, stream(part.tensors)),
            }

    def commit() -> None:
        with faults():
            manifest = replace(facts, files={name: Written(*w) for one in written for name, w in one.items()})
            files.write(temporary / MANIFEST, [manifest_bytes(manifest)])
            files.fsync_dir(temporary)
            if os.path.lexists(target):
                set_aside(target, files)
            files.rename(temporary, target)
            files.fsync_dir(root)

    name = on_rank_zero(parallel, prepare)
    if name is None:
        return target
    temporary = root / name
    try:
        written = on_every_rank(parallel, write)
        on_rank_zero(parallel, commit)
    except Exception:
        if parallel.rank == 0:
            with suppress(OSError):  # what cannot be removed now is swept when the run is opened again
                files.remove_tree(temporary)
        raise
    return target


def write_metric(folder: Path, metric: Metric, files: FileLayer) -> None:
    """Adds a metric that was measured after the checkpoint was committed; its manifest is replaced as a whole."""
    manifest = replace(read_manifest(folder), metric=metric)
    temporary = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    with file_faults(f"cannot add {metric.name} to checkpoint {folder}", folder.parent):
        files.write(temporary, [manifest_bytes(manifest)])
        files.rename(temporary, folder / MANIFEST)
        files.fsync_dir(folder)


def set_aside(folder: Path, files: FileLayer, prefix: str = ".bad") -> Path:
    """Renames a folder so that it is never taken for a checkpoint again, and never deleted either."""
    number = 1
    while os.path.lexists(target := folder.with_name(f"{prefix}-{folder.name}-{number}")):
        number += 1
    files.rename(folder, target)
    return target


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
    """Reads and verifies; rank 0 looks at the files of all ranks, the others at what they need.

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
    with file_faults(f"{folder}: cannot be read", folder):
        found = set(os.listdir(folder))
    expected = {MANIFEST, *manifest.files}
    if found != expected:
        name = min(found ^ expected)
        raise CheckpointError(f"{folder / name}: {'missing' if name in expected else 'not in the manifest'}")


def _check_file(path: Path, expected: Written) -> None:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        _check_size(path, os.fstat(file.fileno()).st_size, expected)
        while data := file.read(BUFFER_BYTES):
            digest.update(data)
    _check_hash(path, digest.hexdigest(), expected)


def _read_part(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    text_path, tensors_path = (folder / name for name in rank_files(rank))
    expected = manifest.files[text_path.name]
    if expected.size > MAX_STATE_BYTES:
        raise CheckpointError(f"{text_path}: longer than {MAX_STATE_BYTES} bytes")
    with open_regular(text_path) as file:
        _check_size(text_path, os.fstat(file.fileno()).st_size, expected)
        text = file.read(expected.size)
    _check_hash(text_path, hashlib.sha256(text).hexdigest(), expected)
    expected = manifest.files[tensors_path.name]
    with open_regular(tensors_path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(tensors_path, size, expected)
        tensors, read = read_tensors(file, size, str(tensors_path))
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
