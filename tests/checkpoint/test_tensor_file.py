from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from trainrun.checkpoint.tensor_file import MAX_HEADER_BYTES, file_size, read_tensors, stream
from trainrun.errors import CheckpointError

TENSORS = {
    "a": torch.arange(5, dtype=torch.int8),
    "b": torch.rand(2, 3),
    "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "double": torch.rand((), dtype=torch.float64),
    "half": torch.rand(3).bfloat16(),
    "none": torch.empty(0, 4),
    "yes": torch.tensor([True, False]),
}


def file_of(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def read(data: bytes) -> dict[str, torch.Tensor]:
    return read_tensors(io.BytesIO(data), len(data), "x.safetensors")[0]


def entry(start: int, stop: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    data = b"".join(stream(TENSORS))
    assert len(data) == file_size(TENSORS)
    (tmp_path / "x.safetensors").write_bytes(data)
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_we_read_what_the_library_writes_and_ourselves() -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    for data in (safetensors.torch.save(contiguous, {"by": "the library"}), b"".join(stream(TENSORS))):
        found, written = read_tensors(io.BytesIO(data), len(data), "x")
        assert written == (len(data), hashlib.sha256(data).hexdigest(), 0)
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(found[name], tensor)
            assert found[name].dtype == tensor.dtype
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}) == 6


def test_lazy_bits_are_settled() -> None:
    base = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    found = read(b"".join(stream({"conjugate": base.conj(), "negative": base.conj().imag})))
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 1j]
    assert found["negative"].tolist() == [-2, 1]


def test_wide_tensors_are_aligned() -> None:
    data = b"".join(stream(TENSORS))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header["double"]["data_offsets"][0] == 0
    assert header["b"]["data_offsets"][0] % 4 == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends after 0 of 8"),
        (b"\x00" * 7, "ends after 7 of 8"),
        ((2**63).to_bytes(8, "little") + b"{}", "header of 9223372036854775808 bytes"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{" + b" " * (MAX_HEADER_BYTES + 8), "header of"),
        (file_of({"a": entry(0, 4)}, b"1234")[:-10], "header of"),
        (file_of(b"[]", b""), "not a safetensors file"),
        (file_of(b"", b""), "not a safetensors file"),
        (file_of(b' {"a": 1}', b""), "not a safetensors file"),
        (file_of(b'{"a": NaN}', b""), "NaN"),
        (file_of(b'{"a":' * 1000, b""), "nested deeper"),
        (file_of(b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 1)).encode(),) * 2), b"1"), "there twice"),
        (file_of({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "starts at 2, expected 4"),
        (file_of({"a": entry(0, 4), "b": entry(5, 6)}, b"123456"), "starts at 5, expected 4"),
        (file_of({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"), "starts at 0, expected 4"),
        (file_of({"a": entry(1, 4)}, b"1234"), "starts at 1, expected 0"),
        (file_of({"a": entry(0, 4)}, b"12345"), "the tensors have 4 bytes, the file 5"),
        (file_of({"a": entry(0, 40)}, b"1234"), "the tensors have 40 bytes, the file 4"),
        (file_of({"a": entry(0, 10**12, "U8")}, b"1234"), "the tensors have 1000000000000 bytes"),
        (file_of({"a": entry(0, 4, "F32", [2])}, b"1234"), "4 bytes, expected 8"),
        (file_of({"a": entry(4, 0, "U8", [4])}, b"1234"), "-4 bytes, expected 4"),
        (file_of({"a": entry(0, 4, "F31", [1])}, b"1234"), "unknown dtype 'F31'"),
        (file_of({"a": entry(0, 4, ["F32"], [1])}, b"1234"), "unknown dtype"),
        (file_of({"a": entry(0, 4, "U8", [-4])}, b"1234"), "no shape"),
        (file_of({"a": entry(0, 4, "U8", [4.0])}, b"1234"), "no shape"),
        (file_of({"a": entry(0, 4, "U8", [True, 4])}, b"1234"), "no shape"),
        (file_of({"a": entry(0, 1, "U8", [1] * 65)}, b"1"), "no shape"),
        (file_of({"a": entry(0, 0, "U8", [0, 2**50, 2**50])}, b""), "no shape"),
        (file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"1"), "no offsets"),
        (file_of({"a": {"dtype": "U8", "shape": [1]}}, b"1"), "needs exactly"),
        (file_of({"a": entry(0, 1) | {"url": "x"}}, b"1"), "needs exactly"),
        (file_of({"a": 1}, b""), "needs exactly"),
        (file_of({"__metadata__": {"a": 1}}, b""), "no map of strings"),
        (file_of({"a": entry(0, 2, "BOOL")}, b"\x01\x02"), "neither true nor false"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(data)
    assert str(caught.value).startswith("x.safetensors: ")


def test_a_huge_declaration_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("memory was asked for")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(CheckpointError):
        read(file_of({"a": entry(0, 4), "b": entry(4, 2**40)}, b"1234"))


def test_a_file_that_changes_its_length_meanwhile() -> None:
    data = file_of({"a": entry(0, 4)}, b"1234")
    with pytest.raises(CheckpointError, match="1 bytes too early"):
        read_tensors(io.BytesIO(data[:-1]), len(data), "x")
    with pytest.raises(CheckpointError, match="longer than"):
        read_tensors(io.BytesIO(data + b"5"), len(data), "x")
