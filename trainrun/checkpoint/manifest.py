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

from trainrun.checkpoint.files import Incompatible, Written, open_regular, readable
from trainrun.checkpoint.format import dumps, flatten, loads, unflatten
from trainrun.errors import CheckpointError

FORMAT = 2  # 1: without `piece_bytes`, which only earlier versions write
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 16 * 2**20
MAX_STEP = 10**8 - 1
KINDS = ("last", "best", "periodic", "final", "stopped")
MAX_NAME = 100  # letters of a run's id
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**16, 2**26
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
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


def parse_manifest(data: bytes, place: str) -> Manifest:
    """Raises CheckpointError for damage, Incompatible for what a newer version wrote."""
    text, last_line = data[:-65], data[-65:]
    digest = hashlib.sha256(text).hexdigest()
    if last_line != digest.encode() + b"\n":
        found = last_line.decode("ascii", "replace").strip()
        raise CheckpointError(f"{place}: damaged (its last line is {found!r}, expected {digest})")
    value = unflatten(loads(text, place), {}, place)
    version = value.pop("format", None) if isinstance(value, dict) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{place}: no format version")
    if version > FORMAT:
        raise Incompatible(
            f"{place}: made by a newer version of trainrun (checkpoint format {version}; this version reads "
            f"up to {FORMAT}): install that version to go on"
        )
    kinds = {
        "run_id": str, "step": int, "epoch": int, "world_size": int, "kind": str,
        "metric": type(None) if value.get("metric") is None else dict, "fingerprint": dict, "files": dict,
    }  # fmt: skip
    _check(value, kinds, place)
    if not 0 <= value["step"] <= MAX_STEP or value["epoch"] < 0 or value["kind"] not in KINDS:
        raise CheckpointError(f"{place}: no step, epoch or kind of a checkpoint")
    if len(value["run_id"]) > MAX_NAME or not value["run_id"].isprintable():
        raise CheckpointError(f"{place}: no id of a run")
    if value["metric"] is not None:
        _check(value["metric"], {"name": str, "mode": str, "value": float}, f"{place}: metric")
        value["metric"] = Metric(**value["metric"])
    files, world_size = value["files"], value["world_size"]
    if world_size < 1 or len(files) != 2 * world_size:  # before a list as long as the ranks is made
        raise CheckpointError(f"{place}: {len(files)} files for {world_size} ranks")
    expected = {name for rank in range(world_size) for name in rank_files(rank)}
    if files.keys() != expected:
        names = [name[:40] for name in sorted(map(str, files))[:8]]
        raise CheckpointError(f"{place}: names {names}, expected {sorted(expected)[:8]}")
    value["files"] = {name: _written(entry, f"{place}: {name}") for name, entry in files.items()}
    return Manifest(**value)


def _written(entry: Any, place: str) -> Written:
    in_pieces = isinstance(entry, dict) and "piece_bytes" in entry
    _check(entry, {"size": int, "sha256": str} | ({"piece_bytes": int} if in_pieces else {}), place)
    if entry["size"] < 0 or not SHA256.fullmatch(entry["sha256"]):
        raise CheckpointError(f"{place}: no size and SHA-256")
    if in_pieces and not MIN_PIECE_BYTES <= entry["piece_bytes"] <= MAX_PIECE_BYTES:
        raise CheckpointError(f"{place}: hashed in pieces of {entry['piece_bytes']} bytes")
    return Written(**entry)


def _check(value: Any, kinds: Mapping[str, type], place: str) -> None:
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise CheckpointError(f"{place}: needs exactly {', '.join(sorted(kinds))}")
    for key, kind in kinds.items():
        if type(value[key]) is not kind:
            raise CheckpointError(f"{place}: {key} is no {kind.__name__}")


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of a checkpoint folder; its files are not looked at."""
    path = folder / MANIFEST
    with readable(path):
        if folder.is_dir() and not os.path.lexists(path):
            raise CheckpointError(f"{folder}: not a finished checkpoint (it has no {MANIFEST})")
    with open_regular(path) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: longer than {MAX_MANIFEST_BYTES} bytes")
    manifest = parse_manifest(data, str(path))
    if step_of(folder.name) != manifest.step:
        raise CheckpointError(
            f"{folder}: the folder is {folder.name}, its manifest says step {manifest.step}"
        )
    return manifest
