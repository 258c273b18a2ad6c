"""Read and verify a checkpoint. Choose the best one, and the one to resume from.

The content of a folder is untrusted: it may be damaged, cut off, or crafted. Every fault becomes a CheckpointError
that names the file. Reading executes no code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainrun.checkpoint.files import (
    MAX_STEP,
    PIECE_BYTES,
    FileDigest,
    FileLayer,
    explain_disk_errors,
    format_folder_name,
    list_committed_steps,
    parse_step,
    set_aside,
)
from trainrun.checkpoint.save import (
    FORMAT,
    MANIFEST,
    MAX_DEPTH,
    MAX_STATE_BYTES,
    SAVED_OFFSETS,
    SHARDING_INFO,
    SHARED,
    Keys,
    Manifest,
    Metric,
    fills_memory,
    flatten_tree,
    format_keys,
    rank_file_names,
    run_on_rank_zero,
)
from trainrun.errors import CheckpointError
from trainrun.folder.run_folder import RunDir
from trainrun.folder.status import read_status
from trainrun.interfaces import Parallel
from trainrun.tensors import StoredTensor
from trainrun.train_state import StartPosition

BEST = "best.json"
KINDS = ("last", "best", "periodic", "final", "stopped")
MAX_MANIFEST_BYTES = 16 * 2**20
MAX_ID_LENGTH = 100
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")
TRANSIENT_ERRORS = (
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT,
    errno.EAGAIN, errno.EBUSY, errno.EHOSTDOWN,
)  # fmt: skip


class IncompatibleCheckpoint(CheckpointError):
    """An intact checkpoint of another run or version, or one that cannot be read at the moment.

    It is never renamed as damaged.
    """


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint: the state that all ranks share, and the state of this rank.

    own: None if the saved run had fewer ranks (see `manifest.world_size`).
    """

    folder: Path
    manifest: Manifest
    shared: Any
    own: Any


# ---- files


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError, or into IncompatibleCheckpoint if the error is transient."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except OSError as error:
        if error.errno in TRANSIENT_ERRORS:
            raise IncompatibleCheckpoint(f"{path}: cannot be read now ({error.strerror})") from error
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Raise CheckpointError for a link, a pipe or a device."""
    with explain_read_errors(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{path}: not a plain file")
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            yield file


def parse_json(data: bytes, where: str) -> Any:
    """Parse JSON. Raise CheckpointError, with a message that begins with `where`, if it is invalid."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error


def open_tensors(
    paths: Sequence[Path], is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files, whose values are read when they are needed.

    Tensors of one name are rows of a larger one, whose first rows are in the headers. is_wanted: called with
    the name of each tensor. Raise CheckpointError if a file is damaged, or if rows are missing.
    """
    pieces: dict[str, list[StoredRows]] = {}
    for path in paths:
        with raise_as_checkpoint_error(path):
            file: Any = safe_open(path, framework="pt")
            text = (file.metadata() or {}).get(SHARDING_INFO)
            offsets = {} if text is None else json.loads(text)
            for name in [name for name in file.keys() if is_wanted(name)]:  # noqa: SIM118
                first_row = int((*offsets[name][SAVED_OFFSETS], 0)[0]) if name in offsets else 0
                shape = tuple(file.get_slice(name).get_shape())
                pieces.setdefault(name, []).append(StoredRows(path, file, name, first_row, shape))
    return {name: join_rows(name, rows) for name, rows in pieces.items()}


class StoredRows(NamedTuple):
    """Rows of a tensor in a safetensors file. first_row: their place in the whole tensor. shape: of these rows."""

    path: Path
    file: Any
    name: str
    first_row: int
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of the rows that lie between two rows of the whole tensor."""
        with raise_as_checkpoint_error(self.path):
            tensor: Tensor
            if not self.shape or (start <= self.first_row and self.first_row + self.shape[0] <= stop):
                tensor = self.file.get_tensor(self.name)
            else:
                rows = max(start - self.first_row, 0), min(stop - self.first_row, self.shape[0])
                tensor = self.file.get_slice(self.name)[slice(*rows)]
            if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
                raise ValueError(f"{self.name[:200]!r} has a byte that is neither true nor false")
            return tensor.clone()  # it is a view of the mapped file


def is_shared(name: str) -> bool:
    """Return whether a stored tensor is state of all ranks."""
    return name.startswith(f"{SHARED}/")


def has_shards(path: Path) -> bool:
    """Return whether tensors of a safetensors file are rows of larger ones."""
    with raise_as_checkpoint_error(path), safe_open(path, framework="pt") as file:
        return SHARDING_INFO in (file.metadata() or {})


def join_rows(name: str, pieces: Sequence[StoredRows]) -> StoredTensor:
    """Return the tensor that the rows of one or several files make up. Raise CheckpointError if they do not fit."""
    pieces = sorted(pieces, key=lambda piece: piece.first_row)
    end, tail = 0, pieces[0].shape[1:]
    for piece in pieces:
        if piece.first_row != end or piece.shape[1:] != tail or (len(pieces) > 1 and not piece.shape):
            raise CheckpointError(f"{piece.path.parent}: the rows of {name[:200]} do not fit together")
        end += piece.shape[0] if piece.shape else 0
    with raise_as_checkpoint_error(pieces[0].path):
        dtype = pieces[0].read(0, 0).dtype if pieces[0].shape else pieces[0].read(0, 1).dtype

    def read_rows(start: int, stop: int) -> Tensor:
        if not pieces[0].shape:
            return pieces[0].read(0, 1)
        ends = [piece.first_row + piece.shape[0] for piece in pieces]
        inside = [
            piece for piece, last in zip(pieces, ends, strict=True) if piece.first_row < stop and last > start
        ]
        parts = [piece.read(start, stop) for piece in inside or pieces[:1]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return StoredTensor((end, *tail) if pieces[0].shape else (), dtype, read_rows)


@contextmanager
def raise_as_checkpoint_error(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged safetensors file into CheckpointError."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError,
            MemoryError) as error:  # fmt: skip
        raise CheckpointError(f"{path}: not a valid safetensors file ({_format_error(error)})") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return contiguous copies of all tensors of a safetensors file. Raise CheckpointError if it is damaged."""
    return {name: stored.read() for name, stored in open_tensors([path]).items()}


def _format_error(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


# ---- a tree from its JSON form


def unflatten_tree(json_tree: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return the tree that `flatten` turned into JSON and tensors. Raise CheckpointError, prefixed with `where`, if
    invalid.
    """
    decoder = _TreeDecoder(tensors, where)
    try:
        tree = decoder.decode(json_tree, ())
    except RecursionError as error:
        raise CheckpointError(f"{where}: nested deeper than {MAX_DEPTH}") from error
    unused = tensors.keys() - decoder.views.keys()
    if unused:
        raise CheckpointError(f"{where}: nothing names the tensor {min(unused)!r}")
    return tree


class _TreeDecoder:
    """A decoder of one JSON form. views: the tensors returned so far, by name."""

    def __init__(self, tensors: dict[str, Tensor], where: str) -> None:
        self._tensors, self._where = tensors, where
        self.views: dict[str, Tensor] = {}
        self._decoders: dict[str, Callable[[Any, Keys], Any]] = {
            "$int": lambda text, path: int(text, 16),
            "$float": lambda text, path: struct.unpack(">d", bytes.fromhex(text))[0],
            "$bytes": lambda text, path: bytes.fromhex(text),
            "$tuple": lambda items, path: tuple(self.decode(_convert_to_list(items), path)),
            "$dict": self._decode_pairs,
            "$counter": lambda pairs, path: Counter(self._decode_pairs(pairs, path)),
            "$tensor": self._decode_tensor,
            "$complex": self._decode_complex,
        }

    def decode(self, value: Any, path: Keys) -> Any:
        if len(path) > MAX_DEPTH:
            raise CheckpointError(f"{self._where}: nested deeper than {MAX_DEPTH}")
        if isinstance(value, list):
            return [self.decode(item, (*path, str(i))) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item, (*path, key)) for key, item in value.items()}
        where = f"{self._where}: {format_keys(path)[:200]}"
        if len(value) != 1 or tag not in self._decoders:
            raise CheckpointError(f"{where}: unknown tag {tag[:40]!r}")
        try:
            return self._decoders[tag](value[tag], path)
        except RecursionError:
            raise
        except (TypeError, ValueError, LookupError, struct.error, RuntimeError) as error:
            raise CheckpointError(f"{where}: not a valid {tag[1:]} ({_format_error(error)})") from error

    def _decode_pairs(self, pairs: Any, path: Keys) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, item in map(_convert_to_list, _convert_to_list(pairs)):
            key = self.decode(key, path)
            if type(key) not in (str, int) or key in result:
                raise TypeError("a key of another type, or there twice")
            result[key] = self.decode(item, (*path, str(key)))
        return result

    def _decode_tensor(self, content: Any, path: Keys) -> Tensor:
        name, *strides = _convert_to_list(content)
        stored = self._tensors[name]
        stride = stored.stride()
        if strides:
            stride = tuple(_convert_to_list(*strides))
            if not all(type(step) is int for step in stride) or not fills_memory(tuple(stored.shape), stride):
                raise ValueError(f"no memory format for the shape {tuple(stored.shape)}")
        if name not in self.views:
            view = stored
            if stride != stored.stride() and not isinstance(stored, StoredTensor):
                view = torch.empty_strided(stored.shape, stride, dtype=stored.dtype).copy_(stored)
            self.views[name] = view
        if self.views[name].stride() != stride and not isinstance(stored, StoredTensor):
            raise ValueError(f"{name[:200]!r} has two memory formats")
        return self.views[name]

    def _decode_complex(self, content: Any, path: Keys) -> Tensor:
        halves = self.decode(content, path)
        if not isinstance(halves, Tensor) or halves.dtype is not torch.float64:
            raise TypeError("no real and imaginary parts")
        return torch.view_as_complex(halves)


def _convert_to_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} in place of a list")
    return value


# ---- one checkpoint


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest in a file's bytes.

    Raise CheckpointError for damage, IncompatibleCheckpoint for a newer format. where: the beginning of the messages.
    """
    text, last_line = data[:-65], data[-65:]
    digest = hashlib.sha256(text).hexdigest()
    if last_line != digest.encode() + b"\n":
        last_text = last_line.decode("ascii", "replace").strip()
        raise CheckpointError(f"{where}: damaged (its last line is {last_text!r}, expected {digest})")
    value = unflatten_tree(parse_json(text, where), {}, where)
    try:
        version = value.pop("format")
        if version > FORMAT:
            raise IncompatibleCheckpoint(
                f"{where}: made by a newer version of trainrun (checkpoint format {version}; this version reads "
                f"up to {FORMAT}): install that version to go on"
            )
        value["metric"] = value["metric"] and Metric(**value["metric"])
        value["files"] = {name: FileDigest(**entry) for name, entry in value["files"].items()}
        manifest = Manifest(**value)
        _check_manifest(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: not a valid manifest of a checkpoint ({_format_error(error)})"
        ) from error
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError or TypeError for values that no run writes, for example in a crafted manifest."""
    metric, num_ranks = manifest.metric, manifest.world_size
    texts = [manifest.run_id, manifest.kind, *(metric[:2] if metric else ())]
    numbers = [manifest.step, manifest.epoch, num_ranks, *(file.size for file in manifest.files.values())]
    if (
        {*map(type, texts)} != {str}
        or {*map(type, numbers)} != {int}
        or type(manifest.fingerprint) is not dict
    ):
        raise TypeError("a text or a number is of another type")
    if metric is not None and type(metric.value) is not float:
        raise TypeError("the metric is no number")
    if min(numbers) < 0 or manifest.step > MAX_STEP or manifest.kind not in KINDS:
        raise ValueError("no step, epoch, size or kind of a checkpoint")
    if len(manifest.run_id) > MAX_ID_LENGTH or not manifest.run_id.isprintable():
        raise ValueError("no id of a run")
    if not 1 <= num_ranks == len(manifest.files) / 2:  # checked before a list as long as the ranks is made
        raise ValueError(f"{len(manifest.files)} files for {num_ranks} ranks")
    if manifest.files.keys() != {name for rank in range(num_ranks) for name in rank_file_names(rank)}:
        raise ValueError("it names files that no checkpoint has")


def read_manifest(folder: Path) -> Manifest:
    """Return the verified manifest of a checkpoint folder, without reading the other files."""
    path = folder / MANIFEST
    with explain_read_errors(path):
        if folder.is_dir() and not os.path.lexists(path):
            raise CheckpointError(f"{folder}: not a finished checkpoint (it has no {MANIFEST})")
    with open_regular_file(path) as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: longer than {MAX_MANIFEST_BYTES} bytes")
    manifest = parse_manifest(data, str(path))
    if parse_step(folder.name) != manifest.step:
        raise CheckpointError(
            f"{folder}: the folder is {folder.name}, its manifest says step {manifest.step}"
        )
    return manifest


def read_start_position(folder: Path) -> StartPosition | None:
    """Return where a run that loads this checkpoint continues; None if it cannot be read, which the load reports."""
    path = folder / rank_file_names(0)[0]
    try:
        with open_regular_file(path) as file:
            shared = parse_json(file.read(MAX_STATE_BYTES), str(path))["shared"]
        train, samples_per_batch = shared["train"], shared["stream"]["samples_per_batch"]
        position = StartPosition(train["step"], train["epoch"], train["batches"] * samples_per_batch)
    except (CheckpointError, LookupError, TypeError):
        return None
    return position if all(type(number) is int and 0 <= number <= MAX_STEP for number in position) else None


def is_intact_checkpoint(folder: Path, run_id: str) -> bool:
    """Return whether the folder holds a complete, undamaged checkpoint of this run."""
    try:
        manifest = read_manifest(folder)
        for name, expected in manifest.files.items():
            _check_file(folder / name, expected)
    except CheckpointError:
        return False
    return manifest.run_id == run_id


def read_checkpoint(
    folder: Path, rank: int = 0, run_id: str | None = None, in_parts: bool = False
) -> LoadedCheckpoint:
    """Read and verify a checkpoint. Rank 0 verifies the files of all ranks; other ranks verify only the files they
    read.

    run_id: the run that must have written it; None for any. Files that the manifest does not list are never opened.
        in_parts: leave the shared tensors in the files, as `StoredTensor`, of which a rank reads its rows.
        Raise CheckpointError for damage, IncompatibleCheckpoint if it is intact but unusable.
    """
    manifest = read_manifest(folder)
    if run_id is not None and manifest.run_id != run_id:
        raise IncompatibleCheckpoint(f"{folder}: belongs to another run ({manifest.run_id}, not {run_id})")
    if rank == 0:
        for other in range(1, manifest.world_size):
            for name in rank_file_names(other):
                _check_file(folder / name, manifest.files[name])
    first = _read_part(folder, manifest, 0, in_parts)
    rank_state: dict[str, Any] = {"rank": None}
    if rank < manifest.world_size:
        rank_state = first if rank == 0 else _read_part(folder, manifest, rank, in_parts)
    return LoadedCheckpoint(folder, manifest, first["shared"], rank_state["rank"])


def _read_part(folder: Path, manifest: Manifest, rank: int, in_parts: bool) -> dict[str, Any]:
    """Return the tree of one rank; that of rank 0 has the shared state, whose rows may be in the files of all ranks."""
    text_path, tensors_path = (folder / name for name in rank_file_names(rank))
    if manifest.files[text_path.name].size > MAX_STATE_BYTES:
        raise CheckpointError(f"{text_path}: longer than {MAX_STATE_BYTES} bytes")
    for path in (text_path, tensors_path):
        _check_file(path, manifest.files[path.name])
    with open_regular_file(text_path) as file:
        text = file.read(MAX_STATE_BYTES)
    if not has_shards(tensors_path):
        stored = open_tensors([tensors_path])
    else:
        stored = open_tensors([tensors_path], lambda name: not is_shared(name))
        if rank == 0:
            paths = [folder / rank_file_names(other)[1] for other in range(manifest.world_size)]
            for path in paths[1:]:
                _check_file(path, manifest.files[path.name])
            stored |= open_tensors(paths, is_shared)
    tensors = {
        name: tensor if in_parts and is_shared(name) else tensor.read() for name, tensor in stored.items()
    }
    tree = unflatten_tree(parse_json(text, str(text_path)), tensors, str(text_path))
    if not isinstance(tree, dict) or tree.keys() != ({"shared", "rank"} if rank == 0 else {"rank"}):
        raise CheckpointError(f"{text_path}: not the state of rank {rank}")
    return tree


def _check_file(path: Path, expected: FileDigest) -> None:
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size:
            raise CheckpointError(f"{path}: damaged ({size} bytes, expected {expected.size})")
        digest = hashlib.sha256()
        while data := file.read(PIECE_BYTES):
            digest.update(data)
    _check_hash(path, digest.hexdigest(), expected)


def _check_hash(path: Path, sha256: str, expected: FileDigest) -> None:
    if sha256 != expected.sha256:
        raise CheckpointError(f"{path}: damaged (SHA-256 {sha256}, expected {str(expected.sha256)[:64]})")


# ---- which checkpoint


def resolve_checkpoint(folder: Path, which: str | Path) -> Path:
    """Return the checkpoint folder for a user's word: `best`, `last`, `step-00000042`, or the path of such a folder.

    folder: the run's folder of checkpoints. The files of the checkpoint are not read. Raise CheckpointError if there
        is none.
    """
    word = str(which)
    if word == "last":
        steps = list_committed_steps(folder)
        if not steps:
            raise CheckpointError(f"{folder.parent}: the run has no checkpoint{_describe_end(folder.parent)}")
        return folder / format_folder_name(steps[-1])
    if word == "best":
        best = find_best_checkpoint(folder)
        if best is None:
            raise CheckpointError(
                f"best: no checkpoint in {folder} was chosen as the best; {_describe_choices(folder)}"
            )
        return best
    path = folder / word if parse_step(word) is not None else Path(word).expanduser().absolute()
    if not path.exists():
        raise CheckpointError(f"{word}: no such checkpoint; {_describe_choices(folder)}")
    if parse_step(path.name) is None or not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{word}: not a trainrun checkpoint (a folder step-XXXXXXXX with {MANIFEST}); "
            f"{_describe_foreign(path)}{_describe_choices(folder)}"
        )
    return path


def _describe_end(root: Path) -> str:
    """Return the reason why a run without checkpoints ended, from its status file; "" if unknown."""
    status = read_status(RunDir(root))
    state, message = status.get("state"), str(status.get("message") or status.get("reason") or "")
    if state == "running":
        return " yet; it is running"
    if state not in ("failed", "stopped") or not message:
        return ""
    return f", because it {'failed' if state == 'failed' else 'was stopped'}: {message.splitlines()[0]}"


def _describe_foreign(path: Path) -> str:
    if path.is_dir():
        return "it is a torch.distributed checkpoint; " if (path / ".metadata").exists() else ""
    return "it is another program's file and is not opened; " if path.suffix in PICKLE_SUFFIXES else ""


def _describe_choices(folder: Path) -> str:
    names = [format_folder_name(step) for step in list_committed_steps(folder)]
    if not names:
        return f"no checkpoint in {folder}"
    best = []
    with suppress(CheckpointError):
        best = ["best"] if find_best_checkpoint(folder) else []
    return f"available: {', '.join([*best, 'last', *names[-5:]])}"


def read_committed_metrics(folder: Path) -> dict[int, Metric]:
    """Return the metrics of all checkpoints whose manifest is intact and has one, by step, oldest first."""
    metrics: dict[int, Metric] = {}
    for step in list_committed_steps(folder):
        with suppress(CheckpointError):  # reported when somebody loads that checkpoint
            metric = read_manifest(folder / format_folder_name(step)).metric
            if metric is not None:
                metrics[step] = metric
    return metrics


def choose_checkpoint(folder: Path, which: str | None = None) -> str:
    """Return `which` if it is given, else "best", or "last" if no checkpoint has a metric."""
    if which is not None:
        return which
    return "last" if find_best_checkpoint(folder) is None else "best"


def find_best_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the best step according to the manifests; None if no manifest has a metric.

    `best.json` is only a cross-check: it names the best step from when all manifests were intact. If it names
    another step and a manifest is damaged, the best is unknown: raise CheckpointError.
    """
    metrics = read_committed_metrics(folder)
    newest = next(reversed(metrics.values()), None)
    best = None
    if newest is not None:
        sign = -1.0 if newest.mode == "max" else 1.0
        ranked = [
            (sign * metric.value, step)
            for step, metric in metrics.items()
            if metric.name == newest.name and math.isfinite(metric.value)
        ]
        best = folder / format_folder_name(min(ranked)[1]) if ranked else None
    recorded = _read_recorded_best(folder)
    if recorded == (None if best is None else best.name):
        return best
    try:
        for step in list_committed_steps(folder):
            read_manifest(folder / format_folder_name(step))
    except CheckpointError as error:
        raise CheckpointError(
            f"best: {error}, so which checkpoint is the best is not known; name one, as last"
        ) from error
    return best


def _read_recorded_best(folder: Path) -> str | None:
    """Return the folder name of the best checkpoint in `best.json`; None if the file cannot be read."""
    try:
        with open_regular_file(folder / BEST) as file:
            value = parse_json(file.read(MAX_MANIFEST_BYTES), str(folder / BEST))
        name = value["entries"][0]["folder"]
    except (CheckpointError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) and parse_step(name) is not None else None


# ---- loading by all ranks together


def load_on_all_ranks(folder: Path, parallel: Parallel, run_id: str | None) -> LoadedCheckpoint:
    """Return the same checkpoint on every rank, or raise the same CheckpointError on every rank.

    Rank 0 verifies the files of all ranks. If only another rank sees damage, its folder is not the one of rank 0.
    Ranks that do not see the folder of rank 0 get their state from it.
    """
    loaded: LoadedCheckpoint | None = None
    states: list[Any] = []  # of all ranks, to be sent
    answer = "", ""
    try:
        if parallel.shares_folder or parallel.rank == 0:
            loaded = read_checkpoint(folder, parallel.rank, run_id, in_parts=parallel.forward_is_collective)
            answer = "", " ".join(written.sha256 for written in loaded.manifest.files.values())
        if loaded is not None and not parallel.shares_folder:
            others = range(1, loaded.manifest.world_size)
            parts = [_read_part(folder, loaded.manifest, rank, in_parts=False) for rank in others]
            states = [loaded.own, *(part["rank"] for part in parts)]
    except IncompatibleCheckpoint as error:
        answer = "incompatible", str(error)
    except CheckpointError as error:
        answer = "damaged", str(error)
    answers = parallel.gather(answer)
    for fault, text in answers:
        if fault == "incompatible":
            raise IncompatibleCheckpoint(text)
    if answers[0][0]:
        raise CheckpointError(answers[0][1])
    for rank, (fault, text) in enumerate(answers):
        if fault:
            raise IncompatibleCheckpoint(
                f"rank {rank}: {text}; rank 0 finds it sound: all ranks need this folder"
            )
    if not parallel.shares_folder:
        return send_checkpoint(parallel, loaded, states)
    if len({hashes for _, hashes in answers}) != 1:
        raise IncompatibleCheckpoint(f"{folder}: the ranks see different files there; they need one folder")
    assert loaded is not None
    return loaded


def send_checkpoint(
    parallel: Parallel, loaded: LoadedCheckpoint | None, states: list[Any]
) -> LoadedCheckpoint:
    """Return rank 0's checkpoint on every rank. All ranks call it together.

    loaded: the checkpoint, on rank 0. states: the states of all ranks, on rank 0.
    """
    answer: Any = None
    tensors: dict[str, Tensor] = {}
    if loaded is not None:
        form, tensors = flatten_tree([loaded.shared, states])
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        answer = loaded.folder, loaded.manifest, form, kinds
    folder, manifest, form, kinds = parallel.gather(answer)[0]
    if loaded is None:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
    # as bytes: gloo does not know all types
    parallel.broadcast(
        tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel()
    )
    if loaded is not None:
        return loaded
    shared, states = unflatten_tree(form, tensors, str(folder))
    own = states[parallel.rank] if parallel.rank < len(states) else None
    return LoadedCheckpoint(folder, manifest, shared, own)


def load_latest(
    folder: Path, run_id: str, parallel: Parallel, files: FileLayer, note: Callable[[str], None]
) -> LoadedCheckpoint | None:
    """Return the newest undamaged checkpoint; None only if none was ever committed.

    A damaged checkpoint is renamed to `.bad-...` and noted, and the next older one is tried.
    """
    faults: list[str] = []

    def find_newest_folder() -> str | None:
        steps = list_committed_steps(folder)
        return format_folder_name(steps[-1]) if steps else None

    while (name := run_on_rank_zero(parallel, find_newest_folder)) is not None:
        try:
            loaded = load_on_all_ranks(folder / name, parallel, run_id)
        except IncompatibleCheckpoint:
            raise
        except CheckpointError as error:
            faults.append(str(error))
        else:
            if foreign := _list_foreign_files(loaded):
                note(f"{name}: ignored files that do not belong to the checkpoint: {', '.join(foreign)}")
            return loaded
        new_name = run_on_rank_zero(parallel, lambda: _set_damaged_aside(folder / name, files))
        if parallel.rank == 0:
            note(f"{name} was set aside as {new_name}: {faults[-1]}")
    faults += run_on_rank_zero(parallel, lambda: [] if faults else _find_traces_of_checkpoints(folder))
    if faults:
        raise CheckpointError(
            f"{folder}: no intact checkpoint is left: {'; '.join(faults)}. "
            "Start a new run, or delete this folder to start again from step 0"
        )
    return None


def _list_foreign_files(loaded: LoadedCheckpoint) -> list[str]:
    """Return the names of files in the folder that other programs wrote, such as .DS_Store."""
    with suppress(OSError):
        return sorted({*os.listdir(loaded.folder)} - {MANIFEST, *loaded.manifest.files})
    return []


def _set_damaged_aside(folder: Path, files: FileLayer) -> str:
    with explain_disk_errors(f"cannot set aside the damaged {folder}", folder.parent):
        return set_aside(folder, files).name


def _find_traces_of_checkpoints(folder: Path) -> list[str]:
    """Return a message for each file that shows that the run once had checkpoints."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [f"{name} was left by one" for name in names if name == BEST or name.startswith(".bad-step-")]


# ---- an action of one rank or of all ranks, with the same result or fault on all of them
