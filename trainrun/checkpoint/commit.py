"""Writing one checkpoint so that it is either complete and durable, or not there.

A temporary folder next to the target; every rank writes its files and fsyncs them; then the manifest;
fsync of the folder; the rename is the commit; fsync of the parent. No fault and no power loss at any
point leaves something that looks like a checkpoint and is none.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trainrun.checkpoint.files import FileLayer, Written, file_faults, free_bytes, set_aside
from trainrun.checkpoint.format import (
    MANIFEST,
    MAX_STATE_BYTES,
    Manifest,
    Metric,
    dumps,
    flatten,
    folder_name,
    manifest_bytes,
    rank_files,
    stream,
)
from trainrun.checkpoint.state_copy import num_bytes
from trainrun.errors import CheckpointError

HEADER_BYTES = 256  # of a tensor's entry, more than most need

Report = dict[str, tuple[int, str, int]]  # what a rank wrote: `Written` by file name


@dataclass(frozen=True)
class CommitPart:
    """What one rank writes: the JSON text of its values, and its tensors.

    events: to be waited for before the tensors are read. is_copy: nothing but this object holds them.
    """

    text: bytes
    tensors: dict[str, Tensor]
    events: list[Any] = field(default_factory=list)
    is_copy: bool = False

    @property
    def num_bytes(self) -> int:
        """Approximate size of its files."""
        return len(self.text) + num_bytes(self.tensors) + HEADER_BYTES * (len(self.tensors) + 1)


@dataclass(frozen=True)
class Record:
    """One checkpoint of one rank; `facts`: the manifest without its files."""

    facts: Manifest
    part: CommitPart


def build_part(rank: int, shared_tree: Any, rank_tree: Any) -> CommitPart:
    """`shared_tree` counts on rank 0 only. Raises TypeError that names what cannot be saved."""
    plain, tensors = flatten({"shared": shared_tree, "rank": rank_tree} if rank == 0 else {"rank": rank_tree})
    text = dumps(plain) + b"\n"
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"the state has {len(text):,} bytes of plain values; large ones belong in tensors"
        )
    return CommitPart(text, tensors)


def prepare(root: Path, facts: Manifest, needed: int, files: FileLayer) -> str | None:
    """The name of a new temporary folder; None if a sound checkpoint of the same run and step is there."""
    target = root / folder_name(facts.step)
    with file_faults(f"cannot save checkpoint {target}", root, needed):
        files.make_root(root)
        if os.path.lexists(target):
            from trainrun.checkpoint.reading import is_sound

            if is_sound(target, facts.run_id):
                return None
        if free_bytes(root) < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        name = f".tmp-{target.name}-{secrets.token_hex(4)}"
        files.mkdir(root / name)
        return name


def write_part(temporary: Path, target: Path, rank: int, part: CommitPart, files: FileLayer) -> Report:
    """The two files of one rank, on the disk when this returns."""
    for event in part.events:
        event.synchronize()
    text_name, tensors_name = rank_files(rank)
    with file_faults(f"cannot save checkpoint {target}", target.parent, part.num_bytes):
        return {
            text_name: files.write(temporary / text_name, [part.text]),
            tensors_name: files.write(temporary / tensors_name, stream(part.tensors)),
        }


def commit(temporary: Path, facts: Manifest, reports: list[Report], files: FileLayer) -> None:
    """The manifest and the rename. What lies at the target is no sound checkpoint of this run."""
    root = temporary.parent
    target = root / folder_name(facts.step)
    written = {name: Written(*entry) for report in reports for name, entry in report.items()}
    with file_faults(f"cannot save checkpoint {target}", root):
        files.write(temporary / MANIFEST, [manifest_bytes(replace(facts, files=written))])
        files.fsync_dir(temporary)
        if os.path.lexists(target):
            set_aside(target, files)
        files.rename(temporary, target)
        files.fsync_dir(root)


def write_metric(folder: Path, metric: Metric, files: FileLayer) -> None:
    """Add a metric that was measured after the checkpoint was committed; its manifest is replaced as a whole."""
    from trainrun.checkpoint.reading import read_manifest

    manifest = replace(read_manifest(folder), metric=metric)
    temporary = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    with file_faults(f"cannot add {metric.name} to checkpoint {folder}", folder.parent):
        files.write(temporary, [manifest_bytes(manifest)])
        files.rename(temporary, folder / MANIFEST)
        files.fsync_dir(folder)
