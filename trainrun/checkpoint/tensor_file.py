"""One safetensors file, written as a stream and read with every check before memory is asked for.

The format (https://github.com/huggingface/safetensors): 8 bytes length of the header, the header as
JSON (name -> dtype, shape, offsets), the tensors back to back. The library itself accepts a header
key that is there twice and does not hash; both matter here, hence a reader of our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from trainrun.checkpoint import strict_json
from trainrun.checkpoint.file_hash import FileHash, Written
from trainrun.errors import CheckpointError

MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS = 64
LONG_BYTES = 4 * 2**20
ALIGNED_BYTES = 4096  # where the tensors of a long file begin: O_DIRECT writes from a page to a page

NAMES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPES = {dtype: name for name, dtype in NAMES.items()}


class Slot(NamedTuple):
    """Where a tensor lies: bytes from the end of the header on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def file_size(tensors: dict[str, Tensor]) -> int:
    """Bytes of the file that `stream` makes."""
    return len(_header(tensors)) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def stream(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of the file; a tensor on a device is copied to the host when its turn comes.

    Tensors that lie in memory as they will in the file come as one.
    """
    yield _header(tensors)
    before: Tensor | None = None
    for name in file_order(tensors):
        tensor = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
        if not tensor.numel():
            continue
        data = tensor.reshape(-1).view(torch.uint8)
        joined = None if before is None else _joined(before, data)
        if before is not None and joined is None:
            yield _bytes(before)
        before = data if joined is None else joined
    if before is not None:
        yield _bytes(before)


def _joined(first: Tensor, second: Tensor) -> Tensor | None:
    """Both as one, where the second begins in the memory of the first where that ends."""
    end, memory = first.storage_offset() + len(first), first.untyped_storage()
    if second.storage_offset() != end or second.untyped_storage().data_ptr() != memory.data_ptr():
        return None
    return first.as_strided((len(first) + len(second),), (1,))


def _bytes(data: Tensor) -> memoryview:
    """The memory of a one-dimensional uint8 tensor."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide elements first, so that each tensor is aligned in the file; among those the long ones, which a
    tensor of a few bytes before them would set off the cache lines."""

    def key(name: str) -> tuple[int, int, str]:
        return -tensors[name].element_size(), -tensors[name].numel(), name

    return sorted(tensors, key=key)


def _header(tensors: dict[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in file_order(tensors):
        tensor = tensors[name]
        stop = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = strict_json.dumps(entries)
    text += b" " * (-(len(text) + 8) % (ALIGNED_BYTES if offset >= LONG_BYTES else 8))
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors are too many for one checkpoint file")
    return len(text).to_bytes(8, "little") + text


def read_tensors(
    file: BinaryIO, size: int, place: str, piece_bytes: int = 0
) -> tuple[dict[str, Tensor], Written]:
    """All tensors, contiguous and in memory of their own, and the hash of what was read.

    size: bytes of the file. piece_bytes: see FileHash. Raises CheckpointError that begins with `place`; the
    caller compares the hash before it uses a tensor.
    """
    header = read_header(file, size, place)
    tensors: dict[str, Tensor] = {}
    with FileHash(piece_bytes) as content:
        content.update(len(header).to_bytes(8, "little") + header)
        for slot in parse_header(header, size - 8 - len(header), place):
            data = _memory(slot.stop - slot.start, place)
            if len(data):
                view = _bytes(data)
                _fill(file, view, place)
                content.update(view)
            if slot.dtype == torch.bool and len(data) and int(data.max()) > 1:
                raise CheckpointError(
                    f"{place}: {slot.name[:200]!r} holds a byte that is neither true nor false"
                )
            tensors[slot.name] = data.view(slot.dtype).reshape(slot.shape)
        if file.read(1):
            raise CheckpointError(f"{place}: longer than the {size} bytes expected")
        return tensors, content.written()


def read_header(file: BinaryIO, size: int, place: str) -> bytes:
    """Without the eight bytes of its length in front."""
    length = int.from_bytes(read_exactly(file, 8, place), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{place}: a header of {length} bytes in a file of {size} bytes (at most {MAX_HEADER_BYTES})"
        )
    return read_exactly(file, length, place)


def _memory(num_bytes: int, place: str) -> Tensor:
    """A file can be longer than what it takes on the disk, and than all memory."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise CheckpointError(f"{place}: no memory for a tensor of {num_bytes:,} bytes") from error


def parse_header(header: bytes, data_bytes: int, place: str) -> list[Slot]:
    """The tensors in the order of the file; they fill `data_bytes` without gap or overlap."""
    entries = strict_json.loads(header, f"{place}: header") if header[:1] == b"{" else None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{place}: not a safetensors file (the header is no JSON object)")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{place}: header: __metadata__ is no map of strings")
    slots = [_slot(name, entry, place) for name, entry in entries.items()]
    slots.sort(key=lambda slot: (slot.start, slot.stop))
    end = 0
    for slot in slots:
        if slot.start != end:
            raise CheckpointError(
                f"{place}: header: {slot.name[:200]!r} starts at {slot.start}, expected {end}"
            )
        end = slot.stop
    if end != data_bytes:
        raise CheckpointError(f"{place}: header: the tensors have {end} bytes, the file {data_bytes}")
    return slots


def _slot(name: str, entry: Any, place: str) -> Slot:
    fault = f"{place}: header: {name[:200]!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{fault} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NAMES:
        raise CheckpointError(f"{fault}: unknown dtype {str(dtype)[:40]!r}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) >= 2**60:
        raise CheckpointError(f"{fault}: no shape: {str(shape)[:80]}")
    if not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{fault}: no offsets: {str(offsets)[:80]}")
    expected = math.prod(shape) * NAMES[dtype].itemsize
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(f"{fault}: {offsets[1] - offsets[0]} bytes, expected {expected}")
    return Slot(name, NAMES[dtype], tuple(shape), offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read_exactly(file: BinaryIO, size: int, place: str) -> bytes:
    """Bytes of a file whose length is known; the caller has bounded `size`."""
    data = file.read(size)
    if len(data) != size:
        raise CheckpointError(f"{place}: ends after {len(data)} of {size} bytes")
    return data


def _fill(file: BinaryIO, view: memoryview, place: str) -> None:
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{place}: ends {len(view) - filled} bytes too early")
        filled += count
