"""The files of one checkpoint, read back and verified: manifest, tensors, values. Nothing is believed."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainrun.checkpoint.files import PIECE_BYTES, Written
from trainrun.checkpoint.format import (
    FORMAT,
    MANIFEST,
    MAX_DEPTH,
    MAX_STATE_BYTES,
    MAX_STEP,
    Keys,
    Manifest,
    Metric,
    is_dense,
    loads,
    place_of,
    rank_files,
    step_of,
)
from trainrun.errors import CheckpointError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, contiguous and in memory of their own. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                tensor = file.get_tensor(name)
                if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
                    raise ValueError(f"{name[:200]!r} holds a byte that is neither true nor false")
                tensors[name] = tensor.clone()  # it shows the mapped file
    except (SafetensorError, OSError, RuntimeError, ValueError, MemoryError) as error:
        problem = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: not a sound safetensors file ({problem})") from error
    return tensors


def unflatten(plain: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """The tree again, from contiguous tensors; `place` begins the message of every CheckpointError."""
    reader = _Reader(tensors, place)
    try:
        tree = reader.decode(plain, ())
    except RecursionError as error:
        raise CheckpointError(f"{place}: nested deeper than {MAX_DEPTH}") from error
    unused = tensors.keys() - reader.views.keys()
    if unused:
        raise CheckpointError(f"{place}: nothing names the tensor {min(unused)!r}")
    return tree


class _Reader:
    """One walk over the JSON form. `views` holds what was handed out, by name."""

    def __init__(self, tensors: dict[str, Tensor], place: str) -> None:
        self._tensors, self._place = tensors, place
        self.views: dict[str, Tensor] = {}
        self._tags: dict[str, Callable[[Any, Keys], Any]] = {
            "$int": lambda text, path: int(text, 16),
            "$float": lambda text, path: struct.unpack(">d", bytes.fromhex(text))[0],
            "$str": lambda text, path: bytes.fromhex(text).decode(
                "utf-8", "surrogatepass"
            ),  # earlier versions
            "$bytes": lambda text, path: bytes.fromhex(text),
            "$tuple": lambda items, path: tuple(self.decode(_list(items), path)),
            "$dict": self._pairs,
            "$counter": lambda pairs, path: Counter(self._pairs(pairs, path)),
            "$tensor": self._tensor,
            "$complex": self._complex,
        }

    def decode(self, value: Any, path: Keys) -> Any:
        if len(path) > MAX_DEPTH:
            raise CheckpointError(f"{self._place}: nested deeper than {MAX_DEPTH}")
        if isinstance(value, list):
            return [self.decode(item, (*path, str(i))) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item, (*path, key)) for key, item in value.items()}
        if len(value) != 1 or tag not in self._tags:
            raise self._problem(path, f"unknown tag {tag[:40]!r}")
        try:
            return self._tags[tag](value[tag], path)
        except (TypeError, ValueError, LookupError, struct.error, RuntimeError) as error:
            if isinstance(error, RecursionError):
                raise
            raise self._problem(path, f"no {tag[1:]} ({' '.join(str(error).split())[:200]})") from error

    def _problem(self, path: Keys, what: str) -> CheckpointError:
        return CheckpointError(f"{self._place}: {place_of(path)[:200]}: {what}")

    def _pairs(self, pairs: Any, path: Keys) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, item in map(_list, _list(pairs)):
            key = self.decode(key, path)
            if type(key) not in (str, int) or key in result:
                raise TypeError("a key of another type, or there twice")
            result[key] = self.decode(item, (*path, str(key)))
        return result

    def _tensor(self, content: Any, path: Keys) -> Tensor:
        name, *more = _list(content)
        stored = self._tensors[name]
        stride = stored.stride()
        if more:
            (steps,) = more
            stride = tuple(_list(steps))
            if not all(type(step) is int for step in stride) or not is_dense(tuple(stored.shape), stride):
                raise ValueError(f"no memory format for the shape {tuple(stored.shape)}")
        if name not in self.views:
            view = stored
            if stride != stored.stride():
                view = torch.empty_strided(stored.shape, stride, dtype=stored.dtype).copy_(stored)
            self.views[name] = view
        if self.views[name].stride() != stride:
            raise ValueError(f"{name[:200]!r} has two memory formats")
        return self.views[name]

    def _complex(self, content: Any, path: Keys) -> Tensor:
        halves = self.decode(content, path)
        if not isinstance(halves, Tensor) or halves.dtype is not torch.float64:
            raise TypeError("no real and imaginary parts")
        return torch.view_as_complex(halves)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} in place of a list")
    return value


MAX_MANIFEST_BYTES = 16 * 2**20


KINDS = ("last", "best", "periodic", "final", "stopped")


MAX_NAME = 100  # letters of a run's id


MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**16, 2**26


SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


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
        for name in manifest.files:
            _check_file(folder / name, manifest.files[name])
    except CheckpointError:
        return False
    return manifest.run_id == run_id


def read_checkpoint(folder: Path, rank: int = 0, run_id: str | None = None) -> Loaded:
    """Read and verify; rank 0 looks at the files of all ranks, the others at what they need.

    run_id: the run that the checkpoint must be of. Files that the manifest does not name are never opened. Raises
    CheckpointError that names the file and what is wrong with it; Incompatible where nothing is damaged.
    """
    manifest = read_manifest(folder)
    if run_id is not None and manifest.run_id != run_id:
        raise Incompatible(f"{folder}: of another run ({manifest.run_id}; this one is {run_id})")
    if rank == 0:
        for other in range(1, manifest.world_size):
            for name in rank_files(other):
                _check_file(folder / name, manifest.files[name])
    first = _read_part(folder, manifest, 0)
    own: dict[str, Any] = {"rank": None}
    if rank < manifest.world_size:
        own = first if rank == 0 else _read_part(folder, manifest, rank)
    return Loaded(folder, manifest, first["shared"], own["rank"])


def _check_file(path: Path, expected: Written) -> None:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size:
            raise CheckpointError(f"{path}: damaged ({size} bytes, expected {expected.size})")
        _check_hash(path, sha256_of(file, expected.piece_bytes), expected)


def _check_hash(path: Path, sha256: str, expected: Written) -> None:
    if sha256 != expected.sha256:
        raise CheckpointError(f"{path}: damaged (SHA-256 {sha256}, expected {expected.sha256})")


def _read_part(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    text_path, tensors_path = (folder / name for name in rank_files(rank))
    if manifest.files[text_path.name].size > MAX_STATE_BYTES:
        raise CheckpointError(f"{text_path}: longer than {MAX_STATE_BYTES} bytes")
    for path in (text_path, tensors_path):
        _check_file(path, manifest.files[path.name])
    with open_regular(text_path) as file:
        text = file.read(MAX_STATE_BYTES)
    tree = unflatten(loads(text, str(text_path)), read_tensors(tensors_path), str(text_path))
    if not isinstance(tree, dict) or tree.keys() != ({"shared", "rank"} if rank == 0 else {"rank"}):
        raise CheckpointError(f"{text_path}: not the state of rank {rank}")
    return tree


PASSING = (
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT,
    errno.EAGAIN, errno.EBUSY, errno.EHOSTDOWN,
)  # fmt: skip


class Incompatible(CheckpointError):
    """One that is not for this program or this run, or cannot be read just now: never set aside as damaged."""


def sha256_of(file: BinaryIO, piece_bytes: int = 0) -> str:
    """In hex, from where the file stands to its end; see `Written`."""
    whole = hashlib.sha256()
    while data := file.read(piece_bytes or PIECE_BYTES):
        whole.update(hashlib.sha256(data).digest() if piece_bytes else data)
    return whole.hexdigest()


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A plain file to read; no link, pipe or device. OSErrors of the block become CheckpointErrors."""
    with readable(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{path}: not a plain file")
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            yield file


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """OSErrors of the block become CheckpointErrors; Incompatible where the reason lies outside of the disk."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except OSError as error:
        if error.errno in PASSING:
            raise Incompatible(f"{path}: cannot be read now ({error.strerror})") from error
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
