from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from trainrun.checkpoint.blocks import BLOCK_BYTES
from trainrun.checkpoint.files import FileLayer


def test_chunks_of_any_size_are_written_hashed_and_synced(
    tmp_path: Path, synced: list[int], faults: Any
) -> None:
    seen = faults()
    chunks = [b"", b"small", os.urandom(2 * BLOCK_BYTES + 7), memoryview(b"view")]
    data = b"".join(chunks)
    written = FileLayer(seen).write(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == data
    assert written == (len(data), hashlib.sha256(data).hexdigest())
    assert len(synced) == 1
    assert seen.seen[-1] == ("fsync", "file")


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
