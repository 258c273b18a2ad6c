from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import Tensor

from trainrun.checkpoint import blocks, snapshot, tensor_file
from trainrun.checkpoint.blocks import in_blocks
from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.snapshot import Snapshots, host_bytes
from trainrun.checkpoint.tensor_file import read_tensors, stream


def state() -> dict[str, Tensor]:
    return {
        "step": torch.tensor(3.0),
        "short": torch.arange(5, dtype=torch.int64),
        "long": torch.randn(300, 1000),
        "picture": torch.randn(8, 64, 30, 30).to(memory_format=torch.channels_last),
        "half": torch.randn(999).bfloat16(),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the state above counts as a large one."""
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 2**16)
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 2**16)
    monkeypatch.setattr(snapshot, "LONG_BYTES", 2**16)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**18)
    monkeypatch.setattr(blocks, "MOST_BLOCKS", 2)
    monkeypatch.setattr(tensor_file, "LONG_BYTES", 2**18)


@pytest.mark.usefixtures("small_sizes")
def test_a_copy_holds_the_values_of_now() -> None:
    tensors, keep = state(), Snapshots(lambda: 2**40)
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    taken = keep.take(tensors).tensors
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(taken[name], tensor) for name, tensor in wanted.items())
    keep.give_back(taken)
    assert all(not tensor.any() for tensor in keep.take(tensors).tensors.values())


@pytest.mark.usefixtures("small_sizes")
def test_a_large_copy_is_written_from_where_it_lies(tmp_path: Path) -> None:
    tensors = state()
    taken = Snapshots(lambda: 2**40).take(tensors).tensors
    header, data = stream(taken)
    assert len(header) % tensor_file.ALIGNED_BYTES == 0
    memory = numpy.frombuffer(data, numpy.uint8)
    pieces = [numpy.frombuffer(block, numpy.uint8) for block in in_blocks([header, data])]
    inside = [numpy.shares_memory(piece, memory) for piece in pieces]
    assert inside == [False, *[True] * (len(pieces) - 2), False]  # with the header, full blocks, the rest
    assert len(pieces) > 4
    assert [len(piece) // blocks.BLOCK_BYTES for piece in pieces[:4]] == [1, 2, 2, 2]
    assert all(len(piece) % blocks.BLOCK_BYTES == 0 for piece in pieces[:-1])

    written = FileLayer().write(tmp_path / "copy", stream(taken))
    assert written == FileLayer().write(tmp_path / "state", stream(tensors))
    content = (tmp_path / "copy").read_bytes()
    assert content == (tmp_path / "state").read_bytes()
    assert len(content) == tensor_file.file_size(tensors)
    found, read = read_tensors(io.BytesIO(content), len(content), "copy", written.piece_bytes)
    assert read == written
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_page_locked_memory_comes_in_powers_of_two() -> None:
    def tensor(size: int, is_cuda: bool) -> SimpleNamespace:
        return SimpleNamespace(numel=lambda: size, element_size=lambda: 4, is_cuda=is_cuda)

    assert host_bytes({"a": tensor(5, False), "b": tensor(4, False)}) == 36
    assert host_bytes({"a": tensor(5, True), "b": tensor(4, False)}) == 64
    assert host_bytes({"a": tensor(16, True)}) == 64
    assert host_bytes({"a": tensor(0, True)}) == 0
