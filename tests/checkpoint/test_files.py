from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from trainrun.checkpoint.files import PIECE_BYTES, FileLayer


def test_chunks_of_any_size_are_written_hashed_and_synced(
    tmp_path: Path, synced: list[int], faults: Any
) -> None:
    seen = faults()
    chunks = [b"", b"small", os.urandom(2 * PIECE_BYTES + 7), memoryview(b"view"), b"x" * 10]
    data = b"".join(chunks)
    written = FileLayer(seen).write(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == data
    assert written == (len(data), hashlib.sha256(data).hexdigest())
    assert len(synced) == 1
    assert [operation for operation, _ in seen.seen] == ["open", *["write"] * 5, "fsync"]
    assert FileLayer().write(tmp_path / "empty", []) == (0, hashlib.sha256().hexdigest())


def test_nothing_is_written_behind_a_piece_that_could_not_be(tmp_path: Path, faults: Any) -> None:
    full = faults(at=3, error=lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(OSError, match="No space"):
        FileLayer(full).write(tmp_path / "file", [bytes(5 * PIECE_BYTES)])
    assert len(full.seen) == 3
    assert (tmp_path / "file").stat().st_size == PIECE_BYTES


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
