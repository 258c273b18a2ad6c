from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainrun.checkpoint import blocks, file_hash
from trainrun.checkpoint.background import LOWER_BY
from trainrun.checkpoint.blocks import BLOCK_BYTES
from trainrun.checkpoint.file_hash import FileHash
from trainrun.checkpoint.files import FileLayer


def test_chunks_of_any_size_are_written_hashed_and_synced(
    tmp_path: Path, synced: list[int], faults: Any
) -> None:
    seen = faults()
    chunks = [b"", b"small", os.urandom(2 * BLOCK_BYTES + 7), memoryview(b"view")]
    data = b"".join(chunks)
    written = FileLayer(seen).write(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == data
    pieces = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
    hashes = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    assert written == (len(data), hashlib.sha256(hashes).hexdigest(), BLOCK_BYTES)
    assert len(synced) == 1
    assert seen.seen[-1] == ("fsync", "file")


@pytest.mark.parametrize("size", [0, 5, 2**16, 2**16 + 1, 30 * 2**16 + 7])
def test_memory_that_is_used_again_is_written_and_hashed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**16)
    data = os.urandom(size)
    written = FileLayer().write(tmp_path / "file", [data[:5], data[5:]])
    assert (tmp_path / "file").read_bytes() == data
    with FileHash(written.piece_bytes) as again:
        again.update(data)
        assert again.written() == written
    assert (written.piece_bytes == 0) == (size <= 2**16)
    assert written.piece_bytes or written.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("slow", ["hash", "disk"])
def test_memory_of_the_caller_and_gathered_blocks_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """However far the hash or the disk is behind, no byte is overwritten before both have it."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**16)
    memory = mmap.mmap(-1, 60 * 2**16)  # begins at a page
    memory.write(os.urandom(len(memory)))
    view = memoryview(memory)
    chunks: list[bytes | memoryview] = []
    for i in range(3):
        chunks += [os.urandom(2**16), view[20 * i * 2**16 :][: 20 * 2**16], os.urandom(10 * 2**16)]
    chunks.append(b"end")
    place, name = (file_hash, "_hash_of") if slow == "hash" else (os, "write")
    quick = getattr(place, name)

    def late(*given: Any) -> Any:
        time.sleep(0.003)
        return quick(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, late)
        written = FileLayer().write(tmp_path / "file", iter(chunks))
    data = (tmp_path / "file").read_bytes()
    assert data == b"".join(chunks)
    with FileHash(written.piece_bytes) as again:
        again.update(data)
        assert again.written() == written


def test_memory_that_only_the_stream_holds_is_let_go_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As copies of a device's tensors, one after the other, where there is no room for all of them."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(blocks, "MOST_BLOCKS", 2)
    quick, living, most = file_hash._hash_of, weakref.WeakSet[mmap.mmap](), 0

    def late(*given: Any) -> Any:
        time.sleep(0.002)
        return quick(*given)

    def copies() -> Iterator[memoryview]:
        nonlocal most
        for _ in range(100):
            living.add(memory := mmap.mmap(-1, 2 * 2**16))
            most = max(most, len(living))
            view = memoryview(memory)
            del memory
            yield view

    monkeypatch.setattr(file_hash, "_hash_of", late)
    FileLayer().write(tmp_path / "file", copies())
    assert most <= 3 * blocks.AHEAD


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
@pytest.mark.parametrize("forbidden", [False, True])
def test_only_what_hashes_has_a_lower_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forbidden: bool
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**16)
    seen: dict[str, set[int]] = {"hash": set(), "disk": set()}
    real_write, real_hash, own = os.write, file_hash._hash_of, priority()

    def write(*given: Any) -> int:
        seen["disk"].add(priority())
        return real_write(*given)

    def hash_of(*given: Any) -> bytes:
        seen["hash"].add(priority())
        return real_hash(*given)

    def forbid(*given: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if forbidden:
        monkeypatch.setattr(os, "setpriority", forbid)
    lower = own if forbidden else min(own + LOWER_BY, 19)
    for low, wanted in ((False, own), (True, lower)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            patch.setattr(file_hash, "_hash_of", hash_of)
            FileLayer().write(tmp_path / str(low), [bytes(4 * 2**16)], low)
        assert seen == {"hash": {wanted}, "disk": {own}}
        seen = {"hash": set(), "disk": set()}
    assert priority() == own


def priority() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize(("after_page", "at_a_time"), [(0, blocks.MOST_BLOCKS), (16, 1)])
def test_nothing_is_written_behind_a_block_that_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_page: int, at_a_time: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**16)
    data = memoryview(mmap.mmap(-1, 31 * 2**16))[after_page:][: 30 * 2**16 + 7]
    sizes: list[int] = []

    def full(descriptor: int, block: memoryview) -> int:
        sizes.append(len(block))
        if len(sizes) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, block)

    real = os.write
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        FileLayer().write(tmp_path / "file", [data])
    assert sizes == 3 * [at_a_time * 2**16]


def test_where_the_file_system_refuses_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no such flag here")
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    data = os.urandom(2 * BLOCK_BYTES + 7)
    FileLayer().write(tmp_path / "file", [data[:4096], data[4096:]])
    assert (tmp_path / "file").read_bytes() == data


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        FileLayer().write(tmp_path / "file", [b"x"])
    assert (tmp_path / "file").read_text() == "mine"


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "link").symlink_to(tmp_path / "kept")
    FileLayer().remove_tree(tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_a_new_root_is_synced_into_its_parent(tmp_path: Path, synced: list[int]) -> None:
    for _ in range(2):
        FileLayer().make_root(tmp_path / "checkpoints")
        assert len(synced) == 1
