"""`MANIFEST.json`: what a checkpoint is, and the size and SHA-256 of each of its files.

It is written last and its own last line is the SHA-256 of the text before it, so a folder without a
sound manifest was never finished.

    step-00000042/
        MANIFEST.json                               written last
        state.json, shared.safetensors              what all ranks share, and what is rank 0's own
        rank-00001.json, rank-00001.safetensors     what is rank 1's own, and so on
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainrun.checkpoint.files import Written
from trainrun.checkpoint.format import dumps, flatten
from trainrun.errors import CheckpointError

FORMAT = 2  # 1: without `piece_bytes`, which only earlier versions write
MANIFEST = "MANIFEST.json"
MAX_STEP = 10**8 - 1
FOLDER_NAME = re.compile(r"step-(\d{8})", re.ASCII)


@dataclass(frozen=True)
class Metric:
    """What the monitored metric was at this step; mode: `min` or `max`."""

    name: str
    mode: str
    value: float


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without reading its tensors.

    fingerprint: facts of the environment that decide over the bits of a resumed run.
    files: by name, everything in the folder but the manifest.
    """

    run_id: str
    step: int
    epoch: int
    world_size: int
    kind: str
    metric: Metric | None
    fingerprint: Mapping[str, Any]
    files: Mapping[str, Written]


def folder_name(step: int) -> str:
    """The name of a step's checkpoint; steps beyond eight digits would never be found again."""
    if not 0 <= step <= MAX_STEP:
        raise CheckpointError(f"cannot save at step {step}: checkpoints are numbered up to {MAX_STEP}")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder name; None for any other name."""
    match = FOLDER_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def committed_steps(folder: Path) -> list[int]:
    """The steps of all checkpoint folders, oldest first; any other name is passed over."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted(step for name in names if (step := step_of(name)) is not None)


def rank_files(rank: int) -> tuple[str, str]:
    """The names of the values and of the tensors that one rank writes."""
    if rank == 0:
        return "state.json", "shared.safetensors"
    return f"rank-{rank:05d}.json", f"rank-{rank:05d}.safetensors"


def manifest_bytes(manifest: Manifest) -> bytes:
    fields = {name: getattr(manifest, name) for name in ("run_id", "step", "epoch", "world_size", "kind")}
    files = {name: _entry(written) for name, written in manifest.files.items()}
    metric = asdict(manifest.metric) if manifest.metric else None
    more = {"metric": metric, "fingerprint": dict(manifest.fingerprint), "files": files}
    plain, tensors = flatten({"format": FORMAT, **fields, **more})
    assert not tensors
    text = dumps(plain, indent=1) + b"\n"
    return text + hashlib.sha256(text).hexdigest().encode() + b"\n"


def _entry(written: Written) -> dict[str, Any]:
    entry = written._asdict()
    return entry if written.piece_bytes else {"size": entry["size"], "sha256": entry["sha256"]}
