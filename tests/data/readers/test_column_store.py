"""The column store: a table is parsed once, by one process, and a store that is damaged or has no room stops nobody."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused

from trainrun.data.cache import room
from trainrun.data.cache.room import list_cache_folders, list_caches
from trainrun.data.pipeline import open_batches
from trainrun.data.readers import column_store, mapped_rows
from trainrun.data.readers.column_store import ColumnWriter, load_columns, make_draft_folder, open_columns
from trainrun.data.readers.tables import csv_files
from trainrun.data.readers.tables.csv_files import load
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

N = 500


@pytest.fixture(autouse=True)
def small_sources_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(column_store, "STORED_FROM", 0)


@pytest.fixture
def table(tmp_path: Path) -> str:
    rows = [f"{i},{i / 3},{'cat' if i % 3 else 'dog'},p{i // 5}" for i in range(N)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,kind,patient", *rows]) + "\n")
    return str(tmp_path / "table.csv")


ARGUMENTS: dict[str, Any] = {"inputs": ["a", "b"], "target": "kind", "groups": "patient"}


def folders() -> list[Path]:
    return [cache.path for cache in list_caches(list_cache_folders())]


def tensors_of(source: Any) -> list[torch.Tensor]:
    if hasattr(source, "tensors"):
        return list(source.tensors)
    return [torch.stack(column) for column in zip(*(source[i] for i in range(len(source))), strict=True)]


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_file_of_the_same_size_and_time_of_modification_is_read_again(table, is_moved):
    first, before = load(table, **ARGUMENTS)["train"], os.stat(table)
    text = Path(table).read_bytes().replace(b"cat", b"cow")
    place = Path(table).with_name("other") if is_moved else Path(table)
    place.write_bytes(text)
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(place, table)
    after, again = os.stat(table), load(table, **ARGUMENTS)["train"]
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    assert (first.class_names, again.class_names) == (("cat", "dog"), ("cow", "dog"))


@pytest.mark.parametrize("copied_bytes", [0, 2**30])
@pytest.mark.parametrize("split", ["train", "val"])
def test_stored_columns_are_those_in_memory(table, monkeypatch, copied_bytes, split):
    monkeypatch.setattr(column_store, "STORED_FROM", 2**30)
    memory = load(table, **ARGUMENTS)[split]
    assert not folders()
    monkeypatch.setattr(column_store, "STORED_FROM", 0)
    monkeypatch.setattr(mapped_rows, "COPIED_BYTES", copied_bytes)
    stored = load(table, **ARGUMENTS)[split]
    assert hasattr(stored, "tensors") == (copied_bytes > 0)
    for one, other in zip(tensors_of(memory), tensors_of(stored), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert (stored.class_names, stored.num_classes) == (memory.class_names, memory.num_classes)
    assert stored.groups.tolist() == memory.groups.tolist()
    assert stored.column("a").tolist() == memory.column("a").tolist()
    assert stored.column("c") is None
    assert stored.describe(3).partition(":")[0] == memory.describe(3).partition(":")[0]
    assert dict(stored.input_columns) == dict(memory.input_columns)


def test_mapped_rows_come_in_the_same_batches(table, monkeypatch):
    options = StreamOptions("data.train", True, 32, 7)
    batches = []
    for copied_bytes in (2**30, 0):
        monkeypatch.setattr(mapped_rows, "COPIED_BYTES", copied_bytes)
        opened, _ = open_batches(load(table, **ARGUMENTS)["train"], options)
        batches.append([batch.data for batch in opened.epoch(0)])
    for first, second in zip(*batches, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_table_is_parsed_once_until_it_changes(table, monkeypatch):
    train = load(table, **ARGUMENTS)["train"]
    with monkeypatch.context() as patch:
        patch.setattr(csv_files, "iterate_cell_blocks", lambda *_: pytest.fail("parsed again"))
        again = load(table, **ARGUMENTS)["train"]
        assert len(load(table, **ARGUMENTS)["val"].tensors[0]) == N - len(train.tensors[0])
    assert torch.equal(train.tensors[0], again.tensors[0])
    Path(table).write_text(Path(table).read_text().replace("cat", "cow"))
    assert load(table, **ARGUMENTS)["train"].class_names == ("cow", "dog")
    assert len(folders()) == 2
    assert load(table, **{**ARGUMENTS, "inputs": "b"})["train"].tensors[0].shape[1] == 1
    assert len(folders()) == 3


@pytest.mark.parametrize("damage", ["cut array", "no array", "cut facts", "empty facts"])
def test_damaged_columns_are_built_again(table, damage, capsys):
    first = tensors_of(load(table, **ARGUMENTS)["train"])
    gc.collect()
    (folder,) = folders()
    if damage == "no array":
        (folder / "target.npy").unlink()
    else:
        file = folder / ("inputs.npy" if damage == "cut array" else "meta.json")
        os.truncate(file, 0 if damage == "empty facts" else file.stat().st_size - 9)
    assert capsys.readouterr().err == ""
    again = tensors_of(load(table, **ARGUMENTS)["train"])
    assert capsys.readouterr().err.count("\n") == 1
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_a_file_that_is_cut_while_it_is_mapped_is_an_error_and_no_signal(table, monkeypatch):
    monkeypatch.setattr(mapped_rows, "COPIED_BYTES", 0)
    options = StreamOptions("data.train", True, 32, 7)
    opened, _ = open_batches(load(table, **ARGUMENTS)["train"], options)
    os.truncate(folders()[0] / "inputs.npy", 200)
    with refused(DataError):
        list(opened.epoch(0))


def build_small(writer: ColumnWriter) -> dict[str, Any]:
    for begin in range(3):
        writer.add("x", np.full((2, 3), begin, np.float32))
        writer.add_ragged_column("words", np.arange(begin + 1, dtype=np.int64), np.array([begin, 1]))
    return {"names": ["ä", "b"]}


def test_blocks_become_columns():
    memory, stored = (load_columns("key", "a source", size, build_small) for size in (-1, 1))
    assert stored.is_mapped
    assert not memory.is_mapped
    for columns in (memory, stored, load_columns("key", "a source", 1, pytest.fail)):
        assert columns.arrays["x"].tolist() == [[i // 2] * 3 for i in range(6)]
        assert columns.arrays["words.values"].tolist() == [0, 0, 1, 0, 1, 2]
        assert columns.arrays["words.ends"].tolist() == [0, 1, 2, 3, 5, 6]
        assert columns.facts == {"names": ["ä", "b"]}
    array = stored.arrays["x"]
    assert len(pickle.dumps(array)) < 300
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(array)), array)


def test_what_a_killed_builder_left_is_taken_over(tmp_path):
    left = tmp_path / "home" / "trainrun" / "columns" / ".making-key"
    left.mkdir(parents=True)
    (left / "x.npy").write_bytes(b"half")
    (left / "old.npy").write_bytes(b"half")
    columns = load_columns("key", "a source", 1, build_small)
    assert len(columns.arrays["x"]) == 6
    assert not left.exists()
    assert not (folders()[0] / "old.npy").exists()


def test_a_full_disk_keeps_the_columns_in_memory(monkeypatch, capsys):
    def fail(self: Any, values: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(column_store.GrowingFile, "append", fail)
        columns = load_columns("key", "a source", 1, build_small)
    assert not columns.is_mapped
    assert columns.arrays["words.ends"].tolist() == [0, 1, 2, 3, 5, 6]
    assert "a source" in capsys.readouterr().err
    assert not list((Path(os.environ["XDG_CACHE_HOME"]) / "trainrun" / "columns").iterdir())


@pytest.mark.parametrize("cause", ["limit", "free"])
def test_columns_without_room_stay_in_memory(monkeypatch, capsys, cause):
    if cause == "limit":
        monkeypatch.setenv(room.LIMIT, "0.000001")
    else:
        full = SimpleNamespace(total=2**40, used=2**40, free=100)
        monkeypatch.setattr(column_store.shutil, "disk_usage", lambda folder: full)
    columns = load_columns("key", "a source", 10_000, build_small)
    assert not columns.is_mapped
    assert capsys.readouterr().err.count("\n") == 1
    assert not folders()


def test_a_fault_of_the_data_leaves_no_folder(table):
    Path(table).write_text(Path(table).read_text() + "x,1,cat,p1\n")
    with refused(DataError, f"line {N + 2}", "'a'", "'x'"):
        load(table, **ARGUMENTS)["train"]
    assert not list((Path(os.environ["XDG_CACHE_HOME"]) / "trainrun" / "columns").iterdir())


def build_slowly(path: str, begun: Any, go_on: Any) -> None:
    def build(writer: ColumnWriter) -> dict[str, Any]:
        begun.set()
        go_on.wait()
        with open(path, "a") as log:
            log.write("built\n")
        return build_small(writer)

    load_columns("key", "a source", 1, build)


@pytest.mark.process
def test_two_processes_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    begun, go_on, log = context.Event(), context.Event(), str(tmp_path / "log")
    processes = [context.Process(target=build_slowly, args=(log, begun, go_on)) for _ in range(3)]
    for process in processes:
        process.start()
    begun.wait()
    go_on.set()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert Path(log).read_text() == "built\n"


def test_columns_in_use_are_not_removed_to_make_room():
    columns = load_columns("key", "a source", 1, build_small)
    (cache,) = list_caches(list_cache_folders())
    assert cache.source == "a source"
    assert cache.is_in_use()
    assert not cache.remove()
    del columns
    gc.collect()
    assert not cache.is_in_use()
    assert cache.remove()
    assert not folders()


def test_a_draft_is_locked_while_it_is_built(tmp_path):
    with make_draft_folder(tmp_path / "key") as draft:
        room.remove_unfinished_folders(tmp_path)
        os.utime(draft, (0, 0))
        room.remove_unfinished_folders(tmp_path)
        assert draft.is_dir()
    assert not draft.exists()


def test_a_folder_that_is_no_store_is_named(tmp_path):
    with refused(DataError, str(tmp_path)):
        open_columns(tmp_path)
