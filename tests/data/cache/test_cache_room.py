"""Disk caches keep to a limit: the least recently used goes first, and never one that a living process reads."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused
from cache_sources import Made, in_child, same

from trainrun.cli.main import main
from trainrun.data.cache import room
from trainrun.data.cache.cached import open_cache
from trainrun.data.cache.room import list_cache_folders, list_caches
from trainrun.data.readers import column_store
from trainrun.data.readers.mapped_files import find_mapped_path
from trainrun.data.readers.text.text import load as load_text
from trainrun.errors import DataError

pytestmark = pytest.mark.process


class Large:
    """40 samples of 10,000 bytes: a cache of about 0.4 MB for each `kind`."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((10_000,), (self.kind + index) % 256, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(room.LIMIT, raising=False)


def limit_to(monkeypatch: pytest.MonkeyPatch, megabytes: float) -> None:
    monkeypatch.setenv(room.LIMIT, str(megabytes / 1000))


def built(kind: int, folder: Path, lines: list[str] | None = None) -> Any:
    return open_cache(
        Large(kind), f"disk:{folder}", "data.train", say=(lines if lines is not None else []).append
    )


def used(cache: Any, seconds: float) -> Path:
    """Say that a cache was used so many seconds after 1970, and close it."""
    path = find_mapped_path(cache.arrays["leaf.0"]).parent
    os.utime(path / room.META, (seconds, path.stat().st_mtime))
    return path


def closed(kind: int, folder: Path, seconds: float) -> Path:
    path = used(built(kind, folder), seconds)
    gc.collect()
    return path


def test_the_least_recently_used_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_to(monkeypatch, 1.3)
    a = closed(1, tmp_path / "a", 300)
    b = closed(2, tmp_path / "b", 100)
    c = closed(3, tmp_path / "a", 200)
    lines: list[str] = []
    d = built(4, tmp_path / "d", lines)
    assert [path.exists() for path in (a, b, c)] == [True, False, True]
    assert len(lines) == 1
    assert str(b) in lines[0]
    assert torch.equal(d[7], Large(4)[7])


def test_opening_a_cache_counts_as_use_and_changes_no_time_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_to(monkeypatch, 1.0)
    a, b = closed(1, tmp_path, 100), closed(2, tmp_path, 200)
    before = (a / room.META).stat().st_mtime_ns
    assert "(found)" in built(1, tmp_path).note
    gc.collect()
    list_caches([tmp_path])
    assert (a / room.META).stat().st_mtime_ns == before
    built(3, tmp_path)
    assert (a.exists(), b.exists()) == (True, False)


def test_a_cache_in_use_stays_whatever_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_to(monkeypatch, 0.5)
    kept = built(1, tmp_path)
    path, lines = used(kept, 100), []
    built(2, tmp_path, lines)
    assert path.exists()
    assert any(room.LIMIT in line for line in lines), "it is said that the limit is passed"
    assert torch.equal(kept[3], Large(1)[3])
    del kept
    gc.collect()
    built(3, tmp_path)
    assert not path.exists()


def test_a_cache_that_another_process_reads_stays(tmp_path: Path) -> None:
    kept = built(1, tmp_path)
    path = used(kept, 100)
    (entry,) = list_caches([tmp_path])
    assert entry.is_in_use()
    assert in_child(lambda: entry.remove()) is False
    assert path.exists()
    del kept
    gc.collect()
    assert not entry.is_in_use()
    assert in_child(lambda: entry.remove()) is True
    assert not path.exists()


def test_a_cache_that_is_removed_while_it_is_opened_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = closed(1, tmp_path, 100), []
    really = column_store.open_columns

    def removed_once(*words: Any) -> Any:
        if not opened:
            shutil.rmtree(path)
        opened.append(1)
        return really(*words)

    monkeypatch.setattr(column_store, "open_columns", removed_once)
    again = built(1, tmp_path)
    assert "(built)" in again.note
    assert torch.equal(again[5], Large(1)[5])


def test_one_that_is_larger_than_the_limit_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = closed(1, tmp_path, 100)
    limit_to(monkeypatch, 0.3)
    with refused(DataError, room.LIMIT):
        built(2, tmp_path)
    assert other.exists(), "nothing was removed for it"


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(room.LIMIT, text)
    with refused(DataError, f"{room.LIMIT}={text}"):
        built(1, tmp_path)


def test_a_full_disk_is_emptied_of_old_caches_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = closed(1, tmp_path, 100), closed(2, tmp_path, 200)
    real = room.shutil.disk_usage

    def nearly_full(path: Any) -> Any:
        total, busy, _ = real(path)
        return type(real(path))(total, busy, 100_000 if a.exists() else 10_000_000)

    monkeypatch.setattr(room.shutil, "disk_usage", nearly_full)
    assert torch.equal(built(3, tmp_path)[1], Large(3)[1])
    assert (a.exists(), b.exists()) == (False, True)


def test_what_a_killed_builder_left_goes_with_the_next_cache(tmp_path: Path) -> None:
    left = tmp_path / f"{room.DRAFT}gone"
    left.mkdir()
    (left / "leaf.0.npy").write_bytes(b"x" * 1000)
    built(1, tmp_path)
    assert not left.exists()


def test_a_folder_that_another_process_removes_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, real = [], os.open

    def remove_at_first(path: Any, flags: int) -> int:
        if not opened and path.name.startswith(room.DRAFT):
            opened.append(path)
            path.rmdir()
        return real(path, flags)

    monkeypatch.setattr(column_store.os, "open", remove_at_first)
    with column_store.make_draft_folder(tmp_path / "columns") as draft:
        assert draft.is_dir()
    assert opened == [draft]


def test_two_that_build_at_once_keep_both_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_to(monkeypatch, 1.0)
    old = [closed(kind, tmp_path, kind) for kind in (1, 2)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda kind=kind: found.update({kind: built(kind, tmp_path)}))
        for kind in (7, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[kind][9], Large(kind)[9]) for kind in (7, 8))
    assert not all(path.exists() for path in old)


def test_caches_of_texts_are_listed_held_and_removed(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"some words\n" * 500)
    folder = tmp_path / "tokens"
    source = load_text(f"{tmp_path}/*.txt", kind="lines", cache_dir=str(folder), val_fraction=0.0)["train"]
    (entry,) = list_caches(list_cache_folders())
    assert "a.txt" in entry.source
    assert entry.num_bytes > 10_000
    assert not entry.remove()
    assert source[3][0].tolist() == list(b"some words")
    del source
    gc.collect()
    assert entry.remove()
    assert not entry.path.exists()
    again = load_text(f"{tmp_path}/*.txt", kind="lines", cache_dir=str(folder), val_fraction=0.0)["train"]
    assert len(again) == 1000


def test_the_command_lists_and_clears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = built(1, tmp_path / "a")
    other = closed(2, tmp_path / "b", 100)
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert str(used(kept, 100)) in shown
    assert str(other) in shown
    assert "Large, 40 samples" in shown
    assert "1970-01-01" in shown
    assert "2 caches" in shown
    assert main(["cache", "clear"]) == 0
    assert not other.exists()
    assert used(kept, 100).exists()
    assert torch.equal(kept[2], Large(1)[2])
    assert main(["cache", "--folder", str(tmp_path / "b")]) == 0
    assert "0 caches" in capsys.readouterr().out.splitlines()[-1]
    assert main(["cache", "--folder", str(tmp_path / "none")]) == 2


def test_other_kinds_of_samples_are_read_through_it_as_before(tmp_path: Path) -> None:
    kept = open_cache(Made("dict"), f"disk:{tmp_path}", "data.train")
    assert same(kept[3], Made("dict")[3])
    assert np.isfinite(list_caches([tmp_path])[0].used)


def test_caches_that_are_built_at_the_same_time_make_room_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_to(monkeypatch, 1.3)
    first = closed(1, tmp_path, 100)
    with (
        column_store.make_draft_folder(tmp_path / "b") as one,
        column_store.make_draft_folder(tmp_path / "c") as other,
    ):
        room.make_room(one, 500_000, "b", lambda line: None)
        assert first.exists()
        room.make_room(other, 500_000, "c", lambda line: None)
        assert not first.exists()
