"""The files of a checkpoint: `MANIFEST.json`, and two of each rank: a tree of plain values as JSON, and the tensors it
names as safetensors.

What JSON has no word for is an object with one key that begins with `$`:

    {"$int": "0x..."}  {"$float": "<8 bytes, hex>"}  {"$bytes": "<hex>"}  {"$tuple": [...]}
    {"$dict": [[key, value], ...]}  {"$counter": [[key, value], ...]}
    {"$tensor": ["name"]}  {"$tensor": ["name", [stride, ...]]}
    {"$complex": {"$tensor": ...}}   complex128, for which safetensors has no name: real and imaginary parts

The round trip is exact, with these deliberate losses: an OrderedDict comes back as a dict, a NumPy
scalar as the Python number, a kind of str as a str, a Parameter as a plain tensor on the CPU. Places
that hold the same view of the same memory (tied weights) name the same tensor and share it again
after reading; views that only overlap become tensors of their own.

The package `safetensors` reads. Its writer opens the file itself, where neither the hash nor the tests of disk faults
see what is written: `stream` makes the same bytes.

The manifest says what a checkpoint is, and the size and SHA-256 of each of its files. It is written last and its own
last line is the SHA-256 of the text before it, so a folder without a sound manifest was never finished.

    step-00000042/
        MANIFEST.json                               written last
        state.json, shared.safetensors              what all ranks share, and what is rank 0's own
        rank-00001.json, rank-00001.safetensors     what is rank 1's own, and so on
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainrun.checkpoint.files import Written
from trainrun.errors import CheckpointError

MAX_STATE_BYTES = 64 * 2**20  # of JSON
MAX_DEPTH = 64  # levels of a tree
SAFE_INT = 2**53  # what every JSON reader keeps exact
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

Keys = tuple[str, ...]
FORMAT = 2  # 1: without `piece_bytes`, which only earlier versions write
MANIFEST = "MANIFEST.json"
MAX_STEP = 10**8 - 1
FOLDER_NAME = re.compile(r"step-(\d{8})", re.ASCII)


def dumps(value: Any, indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")


def loads(data: bytes, place: str) -> Any:
    """`place` begins the message of every CheckpointError; the caller has bounded the size."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place}: not valid JSON ({error})") from error


def stream(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file; a tensor on a device is copied to the host when its turn comes."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor, start = tensors[name], offset
        offset += tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, offset],
        }  # fmt: skip
    header = dumps(entries)
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    for name in names:
        tensor = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
        if tensor.numel():
            yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The JSON form of a tree and the tensors it names; nothing is copied.

    Raises TypeError that names the path of a value that cannot be saved.
    """
    writer = _Writer()
    return writer.encode(tree, ()), writer.tensors


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gap or overlap, in some order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


class _Writer:
    """One walk over a tree; collects the tensors under names made of their paths."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._views: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: Keys) -> Any:
        kind = type(value)
        if kind is int:
            return value if -SAFE_INT <= value <= SAFE_INT else {"$int": hex(value)}
        if value is None or kind in (bool, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": value.hex()}
        if len(path) >= MAX_DEPTH:
            raise TypeError(f"cannot save {place_of(path[:8])}/...: nested deeper than {MAX_DEPTH}")
        if kind in (list, tuple):
            items = [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in (dict, OrderedDict, Counter):
            return self._dict(value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, numpy.generic) and type(value.item()) is not kind:
            return self.encode(value.item(), path)
        raise TypeError(
            f"cannot save {place_of(path)}: {kind.__module__}.{kind.__qualname__} is no plain value"
        )

    def _dict(self, value: dict[Any, Any], path: Keys) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"cannot save {place_of(path)}: the key {key!r} is neither str nor int")
        items = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
        if type(value) is Counter or not all(
            type(key) is str and not key.startswith("$") for key, _ in items
        ):
            pairs = [[self.encode(key, path), item] for key, item in items]
            return {"$counter" if type(value) is Counter else "$dict": pairs}
        return dict(items)

    def _tensor(self, tensor: Tensor, path: Keys) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TypeError(f"cannot save {place_of(path)}: a {type(tensor).__name__} is no plain tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise TypeError(f"cannot save {place_of(path)}: a tensor without plain memory")
        if tensor.dtype is torch.complex128:
            return {"$complex": self._tensor(torch.view_as_real(tensor.detach().resolve_conj()), path)}
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"cannot save {place_of(path)}: {tensor.dtype} has no place in a safetensors file"
            )
        shape, stride = tuple(tensor.shape), tensor.stride()
        bits = (tensor.is_conj(), tensor.is_neg())  # lazy: the memory is the same, the values are not
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride, bits)
        name = self._views.get(view)
        if name is None:
            name = self._views[view] = self._new_name(path)
            self.tensors[name] = tensor
        if tensor.is_contiguous() or not is_dense(shape, stride):
            return {"$tensor": [name]}
        return {"$tensor": [name, list(stride)]}

    def _new_name(self, path: Keys) -> str:
        name = plain = place_of(path).encode("utf-8", "replace").decode()
        number = 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{plain}#{number}"
        return name


def place_of(path: Keys) -> str:
    """How a message names a place of the tree."""
    return "/".join(path) or "the tree"


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
