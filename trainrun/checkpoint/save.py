"""Write one checkpoint, so that it is complete and durable, or does not exist.

    step-00000042/
        MANIFEST.json                               written last
        state.json, shared.safetensors              what all ranks share, and the state of rank 0
        rank-00001.json, rank-00001.safetensors     the state of rank 1, and so on

If the ranks hold shards (`parallel=fsdp`), the file of each rank also has its rows of every shared tensor, under the
name of the whole tensor. The header says where they begin.

The steps of a save: make a temporary folder beside the target. Every rank writes and syncs its two files. Rank 0 writes
and syncs the manifest and the folder. The rename of the folder is the commit. The manifest has the size and the SHA-256
of every file, and its last line is the SHA-256 of the text before it.

A tree of plain values becomes JSON. Values that JSON does not have are objects with one key that begins with `$`:

    {"$int": "0x..."}  {"$float": "<8 bytes, hex>"}  {"$bytes": "<hex>"}  {"$tuple": [...]}
    {"$dict": [[key, value], ...]}  {"$counter": [[key, value], ...]}
    {"$tensor": ["name"]}  {"$tensor": ["name", [stride, ...]]}
    {"$complex": {"$tensor": ...}}   complex128 as real and imaginary parts; safetensors has no such type

The round trip is exact, except for these types: an OrderedDict is read as a dict, a NumPy scalar as the Python number,
a subclass of str as a str, a Parameter as a plain tensor on the CPU. Equal views of the same memory (tied weights)
share one tensor again. Views that only overlap become separate tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from trainrun.checkpoint.files import (
    FileDigest,
    FileLayer,
    explain_disk_errors,
    format_folder_name,
    set_aside,
)
from trainrun.errors import CheckpointError, SaveError
from trainrun.interfaces import Parallel, TensorShard
from trainrun.user_code import format_error_with_line

FORMAT = 2
MANIFEST = "MANIFEST.json"
MAX_STATE_BYTES = 64 * 2**20  # of JSON
MAX_DEPTH = 64  # levels of a tree
MAX_SAFE_INT = 2**53  # every JSON reader keeps smaller integers exact
TENSOR_ENTRY_BYTES = 256  # estimate for the header entry of one tensor
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

AS_THEY_ARE = (bool, str)  # values that JSON has
SHARED = "shared"  # the state of all ranks, as tensor names begin
# Where torch.distributed.checkpoint keeps the layout of tensors in a safetensors file.
SHARDING_INFO, SHARDING_VERSION, SAVED_OFFSETS = "DCP_SHARDING_INFO", "DCP_VERSION", "saved_offsets"

Keys = tuple[str, ...]


# ---- names of folders and files


def rank_file_names(rank: int) -> tuple[str, str]:
    """Return the names of the JSON file and of the tensor file of a rank."""
    if rank == 0:
        return "state.json", "shared.safetensors"
    return f"rank-{rank:05d}.json", f"rank-{rank:05d}.safetensors"


def format_keys(path: Keys) -> str:
    """Return the path of a value in a tree, such as `model/weight`, for messages and tensor names."""
    return "/".join(path) or "the tree"


# ---- a tree of plain values and tensors as JSON and named tensors


def format_json(value: Any, indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")


def flatten_tree(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON form of a tree and its tensors by name, without copies.

    Raise TypeError with the path of a value that cannot be saved.
    """
    encoder = _TreeEncoder()
    return encoder.encode(tree, ()), encoder.tensors


class _TreeEncoder:
    """An encoder of one tree. It collects the tensors, named by their paths."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.shards: dict[str, TensorShard] = {}  # by the same names
        self._names: dict[tuple[Any, ...], str] = {}  # by view of the memory

    def encode(self, value: Any, path: Keys) -> Any:
        kind = type(value)
        if kind is int:
            return value if -MAX_SAFE_INT <= value <= MAX_SAFE_INT else {"$int": hex(value)}
        if value is None or kind in AS_THEY_ARE:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": value.hex()}
        if len(path) >= MAX_DEPTH:
            raise TypeError(f"cannot save {format_keys(path[:8])}/...: nested deeper than {MAX_DEPTH}")
        if kind in (list, tuple):
            items = [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in (dict, OrderedDict, Counter):
            return self._encode_dict(value, path)
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if kind is TensorShard:
            form = self._encode_tensor(value.tensor, path)
            self.shards[form["$tensor"][0]] = value
            return form
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, numpy.generic) and type(value.item()) is not kind:
            return self.encode(value.item(), path)
        type_name = f"{kind.__module__}.{kind.__qualname__}"
        raise TypeError(f"cannot save {format_keys(path)}: {type_name} is no plain value")

    def _encode_dict(self, value: dict[Any, Any], path: Keys) -> Any:
        items, has_plain_keys = {}, type(value) is not Counter
        for key, item in value.items():
            if type(key) is not str:
                if type(key) is not int:
                    raise TypeError(
                        f"cannot save {format_keys(path)}: the key {key!r} is neither str nor int"
                    )
                has_plain_keys = False
            elif key[:1] == "$":
                has_plain_keys = False
            items[key] = (
                item if item is None or type(item) in AS_THEY_ARE else self.encode(item, (*path, str(key)))
            )
        if has_plain_keys:
            return items
        pairs = [[self.encode(key, path), item] for key, item in items.items()]
        return {"$counter" if type(value) is Counter else "$dict": pairs}

    def _encode_tensor(self, tensor: Tensor, path: Keys) -> Any:
        where = f"cannot save {format_keys(path)}"
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TypeError(f"{where}: a {type(tensor).__name__} is no plain tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise TypeError(f"{where}: a tensor without plain memory")
        if tensor.dtype is torch.complex128:
            halves = torch.view_as_real(tensor.detach().resolve_conj())
            return {"$complex": self._encode_tensor(halves, path)}
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{where}: {tensor.dtype} has no place in a safetensors file")
        shape, stride = tuple(tensor.shape), tensor.stride()
        lazy_bits = (tensor.is_conj(), tensor.is_neg())  # the memory is the same, the values are not
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride, lazy_bits)
        name = self._names.get(view)
        if name is None:
            name = self._names[view] = self._choose_name(path)
            self.tensors[name] = tensor
        if tensor.is_contiguous() or not fills_memory(shape, stride):
            return {"$tensor": [name]}
        return {"$tensor": [name, list(stride)]}

    def _choose_name(self, path: Keys) -> str:
        name = stem = format_keys(path).encode("utf-8", "replace").decode()
        number = 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{stem}#{number}"
        return name


def fills_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def iterate_safetensors_bytes(
    tensors: dict[str, Tensor], first_rows: Mapping[str, int] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file. Tensors on a device are copied to the host one at a time.

    first_rows: the first row of each tensor that is part of the rows of a larger one. The header then has the
        offsets in the format of torch.distributed.checkpoint. The writer of the package `safetensors` opens the file
        itself; then neither the hash nor the tests of disk faults would see its writes.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    about = {"format": "pt"}
    if first_rows is not None:
        offsets = {
            name: {
                SAVED_OFFSETS: [first_rows.get(name, 0), *[0] * (tensors[name].dim() - 1)][
                    : tensors[name].dim()
                ]
            }
            for name in names
        }
        about |= {SHARDING_INFO: format_json(offsets).decode(), SHARDING_VERSION: "1.0"}
    entries: dict[str, Any] = {"__metadata__": about}
    stop = 0
    for name in names:
        tensor, start = tensors[name], stop
        stop += tensor.numel() * tensor.element_size()
        dtype, shape = DTYPES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    header = format_json(entries)
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for name in names:
        tensor = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
        if tensor.numel():
            yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


# ---- the state of one rank


@dataclass(frozen=True)
class StatePart:
    """The JSON text and the tensors that one rank writes.

    events: CUDA events to wait for before the tensors are read. is_copy: only this object refers to the tensors.
    first_rows: of tensors that are rows of larger ones; None if every tensor is whole.
    """

    text: bytes
    tensors: dict[str, Tensor]
    first_rows: Mapping[str, int] | None = None
    events: list[Any] = field(default_factory=list)
    is_copy: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the approximate size of this part's files in bytes."""
        return len(self.text) + count_bytes(self.tensors) + TENSOR_ENTRY_BYTES * (len(self.tensors) + 1)


def build_part(rank: int, shared_tree: Any, rank_tree: Any) -> StatePart:
    """Return what a rank writes. Rank 0 writes `shared_tree`, other ranks only their shards of it.

    Raise TypeError for a value that cannot be saved, CheckpointError for too much text.
    """
    shared = _TreeEncoder()
    json_shared = shared.encode({SHARED: shared_tree}, ())
    json_tree, tensors = flatten_tree({"rank": rank_tree})
    if rank == 0:
        json_tree, tensors = json_shared | json_tree, shared.tensors | tensors
    written = {name: shard for name, shard in shared.shards.items() if shard.is_written and len(shard.tensor)}
    tensors |= {name: shard.tensor for name, shard in written.items()}
    first_rows = {name: shard.start for name, shard in written.items()} if shared.shards else None
    text = format_json(json_tree) + b"\n"
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"the state has {len(text):,} bytes of plain values; large ones belong in tensors"
        )
    return StatePart(text, tensors, first_rows)


# ---- one checkpoint on the disk


class Metric(NamedTuple):
    """The monitored metric of a checkpoint's step. mode: `min` or `max`."""

    name: str
    mode: str
    value: float


@dataclass(frozen=True)
class Manifest:
    """The facts about a checkpoint that are known without reading its other files.

    kind: why it was saved. fingerprint: facts of the environment that decide over the bits of a resumed run.
    files: size and hash of every file of the folder but the manifest, by name.
    """

    run_id: str
    step: int
    epoch: int
    world_size: int
    kind: str
    metric: Metric | None
    fingerprint: Mapping[str, Any]
    files: Mapping[str, FileDigest]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the text of a manifest, followed by the SHA-256 of that text."""
    fields = {name: getattr(manifest, name) for name in ("run_id", "step", "epoch", "world_size", "kind")}
    tree, tensors = flatten_tree({
        "format": FORMAT,
        **fields,
        "metric": manifest.metric and manifest.metric._asdict(),
        "fingerprint": dict(manifest.fingerprint),
        "files": {name: written._asdict() for name, written in manifest.files.items()},
    })  # fmt: skip
    assert not tensors
    lines = [
        format_json(name) + b": " + format_json(value) for name, value in tree.items()
    ]  # `indent` is slow: not written in C
    text = b"{\n " + b",\n ".join(lines) + b"\n}\n"
    return text + hashlib.sha256(text).hexdigest().encode() + b"\n"


def make_temporary_folder(root: Path, step: int, files: FileLayer) -> str:
    """Make a temporary folder beside the target of a save; return its name."""
    name = f".tmp-{format_folder_name(step)}-{secrets.token_hex(4)}"
    files.mkdir(root / name)
    return name


def write_part(temporary: Path, rank: int, part: StatePart, files: FileLayer) -> dict[str, FileDigest]:
    """Write the two files of one rank durably; return their sizes and hashes by name. Raise SaveError."""
    for event in part.events:
        event.synchronize()
    text_name, tensors_name = rank_file_names(rank)
    target = _target_folder(temporary)
    with explain_disk_errors(f"cannot save checkpoint {target}", target.parent, part.num_bytes):
        return {
            text_name: files.write(temporary / text_name, [part.text]),
            tensors_name: files.write(
                temporary / tensors_name, iterate_safetensors_bytes(part.tensors, part.first_rows)
            ),
        }


def commit_checkpoint(temporary: Path, manifest: Manifest, files: FileLayer, replaces: bool = False) -> None:
    """Write the manifest and rename the folder to its final name. Raise SaveError.

    A damaged checkpoint of the same step is set aside. replaces: an intact one of the same step is removed; between
    the two renames it is called `.before-...`, and the next start of the run restores it if the process is killed
    then.
    """
    replaced = None
    root, target = temporary.parent, _target_folder(temporary)
    with explain_disk_errors(f"cannot save checkpoint {target}", root):
        files.write(temporary / MANIFEST, [encode_manifest(manifest)])
        files.fsync_dir(temporary)
        if os.path.lexists(target) and replaces:
            replaced = root / f".before-{target.name}-{secrets.token_hex(4)}"
            files.rename(target, replaced)
        elif os.path.lexists(target):
            set_aside(target, files)
        files.rename(temporary, target)
        files.fsync_dir(root)
        if replaced is not None:
            files.remove_tree(replaced)


def replace_manifest(folder: Path, manifest: Manifest, metric: Metric, files: FileLayer) -> None:
    """Add a metric that was measured after the commit, by an atomic replacement of the manifest. Raise SaveError."""
    temporary = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    with explain_disk_errors(f"cannot add {metric.name} to checkpoint {folder}", folder.parent):
        files.write(temporary, [encode_manifest(replace(manifest, metric=metric))])
        files.rename(temporary, folder / MANIFEST)
        files.fsync_dir(folder)


def _target_folder(temporary: Path) -> Path:
    step_name = temporary.name.removeprefix(".tmp-").rpartition("-")[0]
    return temporary.with_name(step_name)


LARGE_BYTES = 32 * 2**20  # smaller copies need neither preparation nor a check of free memory
MAX_SHARE_OF_FREE = 0.8


class HostCopy(NamedTuple):
    """A copy of tensors in host memory. events: CUDA events to wait for before the tensors are read."""

    tensors: dict[str, Tensor]
    events: list[Any]


class CopyMemory:
    """The memory for copies of the state. The memory of one copy is reused for the next.

    free_bytes: returns the free memory of the machine; called for large copies only.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._memory: dict[str, Tensor] = {}
        self._preparation: threading.Thread | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Return a copy of the current values."""
        self._wait_for_preparation()
        memory, self._memory = self._memory, {}
        new = {
            name: tensor
            for name, tensor in tensors.items()
            if not _has_shape_and_dtype(memory.get(name), tensor)
        }
        if new:
            memory = memory | _allocate_like(new)
        copies = {name: memory[name] for name in tensors}
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        with torch.no_grad():
            for name, copy in copies.items():
                copy.copy_(tensors[name], non_blocking=bool(devices))
        return HostCopy(copies, [_record_event(device) for device in devices])

    def release_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Keep the memory of a copy for the next one."""
        self._memory = tensors

    def has_room(self, tensors: Mapping[str, Tensor], may_allocate: bool = True) -> bool:
        """Return whether there is memory for a copy. may_allocate: whether fresh memory may be used for a large
        copy.
        """
        self._wait_for_preparation()
        size = count_bytes(tensors)
        if self._memory or size < LARGE_BYTES:
            return True
        if any(tensor.is_cuda for tensor in tensors.values()):
            size = 1 << (size - 1).bit_length()  # torch's allocator of pinned memory rounds up
        return may_allocate and size <= MAX_SHARE_OF_FREE * self._free_bytes()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate memory for a large copy and touch its pages in a thread, so that the first copy is fast."""
        if self._memory or count_bytes(tensors) < LARGE_BYTES or not self.has_room(tensors):
            return
        self._memory = _allocate_like(tensors)
        storage = next(iter(self._memory.values())).untyped_storage()
        pages = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self._preparation = threading.Thread(
            target=pages.fill, args=(0,), name="trainrun snapshot", daemon=True
        )
        self._preparation.start()

    def _wait_for_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.join()
            self._preparation = None


def count_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _has_shape_and_dtype(memory: Tensor | None, tensor: Tensor) -> bool:
    return memory is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype


def _allocate_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a contiguous host tensor for each tensor, all in one allocation, ordered by element size for alignment."""
    pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
    memory = torch.empty(count_bytes(tensors), dtype=torch.uint8, pin_memory=pinned)
    pieces, start = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), -tensors[name].numel())):
        tensor = tensors[name]
        stop = start + tensor.numel() * tensor.element_size()
        pieces[name] = memory[start:stop].view(tensor.dtype).view(tensor.shape)
        start = stop
    return pieces


def _record_event(device: torch.device) -> Any:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread takes no core
    event.record(torch.cuda.current_stream(device))
    return event


Answer = tuple[Any, str, bool]  # a plain result, or the text of a fault and whether it is a SaveError


def run_on_rank_zero(parallel: Parallel, action: Callable[[], Any]) -> Any:
    """Run an action on rank 0 and return its plain result on every rank. Its error is raised on every rank."""
    answer: Answer = None, "", False
    fault: Exception | None = None
    if parallel.rank == 0:
        answer, fault = run_action(action)
    result, text, is_save_error = parallel.gather(answer)[0]
    if text:
        raise fault or (SaveError if is_save_error else CheckpointError)(text)
    return result


def run_on_every_rank(parallel: Parallel, action: Callable[[], Any]) -> list[Any]:
    """Run an action on every rank and return the plain results of all ranks. The first error is raised on every
    rank.
    """
    answer, fault = run_action(action)
    answers = parallel.gather(answer)
    for rank, (_, text, is_save_error) in enumerate(answers):
        if text:
            raise fault or (SaveError if is_save_error else CheckpointError)(f"rank {rank}: {text}")
    return [result for result, _, _ in answers]


def run_action(action: Callable[[], Any]) -> tuple[Answer, Exception | None]:
    try:
        return (action(), "", False), None
    except CheckpointError as error:
        return (None, str(error), isinstance(error, SaveError)), error
    except Exception as error:  # a bug, raised again on this rank: the other ranks must not wait for it
        return (None, format_error_with_line(error), False), error
