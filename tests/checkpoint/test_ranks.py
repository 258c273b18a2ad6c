"""Two ranks, as threads that meet in `gather`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainrun.checkpoint.load import IncompatibleCheckpoint
from trainrun.errors import CheckpointError, SaveError
from trainrun.train_state import SAVE_NOW

MakeRun = Callable[..., Any]
Ranks = Callable[[int, Callable[[Any], Any]], list[Any]]
FILES = ["MANIFEST.json", "rank-00001.json", "rank-00001.safetensors", "shared.safetensors", "state.json"]


def story(run: Any) -> int:
    run.go(1, acc=0.5)
    run.go(2, acc=0.4, save_request=SAVE_NOW)
    run.go(3, acc=0.6)
    run.go(4, stop="done")
    run.keep.close()
    return int(run.state.saved_step)


def test_every_rank_writes_and_gets_its_own(make_run: MakeRun, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, lambda parallel: story(make_run(parallel=parallel))) == [4, 4]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in (folder / "step-00000004").iterdir()) == FILES
    assert sorted(path.name for path in folder.iterdir()) == ["best.json", "step-00000003", "step-00000004"]
    loaded = ranks(2, lambda parallel: make_run(parallel=parallel).keep.load_latest())
    for rank in (0, 1):
        assert loaded[rank].own["rank"] == rank
        assert loaded[rank].own["rng"].tolist() == [rank, 4]
        assert float(loaded[rank].shared["model"]["w"][0, 0]) == 4
    assert loaded[0].manifest.world_size == 2


def test_the_clock_of_rank_zero_decides(make_run: MakeRun, ranks: Ranks) -> None:
    def work(parallel: Any) -> list[int]:
        run = make_run(parallel=parallel, interval_seconds=1.0)
        run.now = 100.0 if parallel.rank == 1 else 0.0
        assert run.keep.save_status() == 0
        run.go(1)
        parallel.gather(None)
        return list(run.steps())

    assert ranks(2, work) == [[], []]


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_one_rank_is_the_fault_of_all(
    make_run: MakeRun, ranks: Ranks, faults: Any, tmp_path: Path, rank: int, async_save: bool
) -> None:
    """Each operation fails once: of a full disk or a broken one, in turn."""

    def one(n: int) -> int:
        folder, number = tmp_path / str(n), (errno.ENOSPC, errno.EIO)[(n + rank + async_save) % 2]
        layers = [faults(), faults()]
        layers[rank] = faults(at=n, error=lambda: OSError(number, os.strerror(number)))

        def work(parallel: Any) -> int:
            layer = layers[parallel.rank]
            return story(make_run(folder=folder, parallel=parallel, faults=layer, async_save=async_save))

        results = ranks(2, work)
        failed = [isinstance(result, CheckpointError) for result in results]
        assert failed in ([True, True], [False, False]), (n, results)
        assert all(
            os.strerror(number) in str(result) for result in results if isinstance(result, CheckpointError)
        )
        kinds = {type(result) for result in results if isinstance(result, CheckpointError)}
        assert kinds <= {SaveError}  # one exit code on all ranks
        assert not list(folder.glob(".tmp-*"))
        loaded = ranks(2, lambda parallel: make_run(folder=folder, parallel=parallel).keep.load_latest())
        assert [type(one) for one in loaded] in ([type(None)] * 2, [type(loaded[0])] * 2)
        return len(layers[rank].seen)

    n = 1
    while one(n) >= n:
        n += 1
    assert n > 15


def test_a_bug_on_one_rank_does_not_leave_the_other_waiting(
    make_run: MakeRun, ranks: Ranks, faults: Any
) -> None:
    def work(parallel: Any) -> None:
        broken = faults(at=1, error=lambda: ZeroDivisionError("a bug")) if parallel.rank == 1 else None
        make_run(parallel=parallel, faults=broken).go(1, stop="done")

    first, second = ranks(2, work)
    assert isinstance(first, CheckpointError)
    assert "rank 1: ZeroDivisionError: a bug" in str(first)
    assert isinstance(second, ZeroDivisionError)


@pytest.mark.parametrize("name", FILES)
def test_all_ranks_step_back_together(make_run: MakeRun, ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks(2, lambda parallel: story(make_run(parallel=parallel)))
    path = tmp_path / "checkpoints" / "step-00000004" / name
    path.write_bytes(path.read_bytes()[:-3] + b"???")
    runs = []

    def work(parallel: Any) -> int:
        run = make_run(parallel=parallel)
        runs.append((parallel.rank, run))
        return int(run.keep.load_latest().manifest.step)

    assert ranks(2, work) == [3, 3]
    assert [len(run.notes) for _, run in sorted(runs, key=lambda one: one[0])] == [1, 0]


def test_a_rank_that_does_not_see_the_folder_sets_nothing_aside(
    make_run: MakeRun, ranks: Ranks, tmp_path: Path
) -> None:
    """As on a machine where the shared disk is not mounted."""
    ranks(2, lambda parallel: story(make_run(parallel=parallel)))
    folder = tmp_path / "checkpoints"
    before = sorted(folder.iterdir())

    def work(parallel: Any) -> None:
        make_run(
            folder=folder if parallel.rank == 0 else tmp_path / "none", parallel=parallel
        ).keep.load_latest()

    found = ranks(2, work)
    assert [type(one) for one in found] == [IncompatibleCheckpoint] * 2
    assert "rank 1: " in str(found[0])
    assert "all ranks need this folder" in str(found[1])
    assert sorted(folder.iterdir()) == before


def test_nothing_left_is_said_by_all(make_run: MakeRun, ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, lambda parallel: make_run(parallel=parallel).go(1, stop="done"))
    (tmp_path / "checkpoints" / "step-00000001" / "state.json").unlink()
    results = ranks(2, lambda parallel: make_run(parallel=parallel).keep.load_latest())
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert str(results[0]) == str(results[1])
