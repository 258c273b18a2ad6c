"""Saves that are written while the training goes on: what is promised of them, one test a promise."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused

from trainrun.checkpoint.load import read_checkpoint
from trainrun.errors import EXIT_FAILED, CheckpointError, SaveError
from trainrun.train_state import SAVE_BUSY, SAVE_FAILED, SAVE_NONE, SAVE_NOW

MakeRun = Callable[..., Any]
Ranks = Callable[[int, Callable[[Any], Any]], list[Any]]


class SlowDisk:
    """Holds every operation back until `go` is set; `reached` once one waits."""

    def __init__(self, at: str = "open") -> None:
        self.at = at
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, operation: str, path: Path) -> None:
        if operation == self.at and threading.current_thread().name == "trainrun checkpoint":
            self.reached.set()
            assert self.go.wait(20)


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def weights(run: Any, step: int) -> Any:
    return read_checkpoint(run.folder / f"step-{step:08d}").shared["model"]["w"]


def test_the_training_goes_on_and_what_is_written_is_the_state_of_the_step(make_run: MakeRun) -> None:
    disk = SlowDisk()
    run = make_run(faults=disk, async_save=True, every_n_train_steps=2)
    assert run.go(2)
    assert run.state.saved_step == 2
    assert disk.reached.wait(20)
    run.parts.weight.fill_(99)  # as an optimizer does: in place
    assert run.steps() == []
    assert run.keep.save_status() == SAVE_BUSY
    assert not run.go(3, save_request=SAVE_BUSY)
    disk.go.set()
    run.keep.close()
    assert run.steps() == [2]
    assert torch.equal(weights(run, 2), torch.full((2, 3), 2.0))


def test_both_ways_write_the_same_bytes(make_run: MakeRun, tmp_path: Path) -> None:
    found = []
    for async_save in (False, True):
        run = make_run(folder=tmp_path / str(async_save), async_save=async_save, save_top_k=2)
        for step, acc in enumerate([0.1, 0.5, 0.3, 0.4], start=1):
            run.go(step, acc=acc, save_request=SAVE_NOW * (step % 2))
        run.go(5, stop="done")
        run.keep.close()
        found.append(
            {p.relative_to(run.folder): p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
        )
    assert found[0] == found[1]
    assert len(found[0]) == 10


def test_a_fault_of_the_thread_is_raised_at_the_next_step(make_run: MakeRun, faults: Any) -> None:
    run = make_run(faults=faults(at=4, error=disk_full), async_save=True, every_n_train_steps=2)
    run.go(2)
    run.keep._in_progress.written.exception()
    assert run.keep.save_status() == SAVE_FAILED
    with refused(SaveError) as raised:
        run.go(3, save_request=SAVE_FAILED)
    assert raised.value.exit_code == EXIT_FAILED
    assert run.state.saved_step == -1
    assert run.hidden() == []
    assert run.go(4)
    run.keep.close()
    assert run.steps() == [4]


def test_a_fault_of_the_last_save_is_raised_by_close(make_run: MakeRun, faults: Any) -> None:
    run = make_run(faults=faults(at=4, error=disk_full), async_save=True)
    run.go(2, acc=0.5, stop="done")
    with refused(SaveError):
        run.keep.close()
    run.keep.close()  # once is enough
    assert list(run.folder.iterdir()) == []


def test_a_second_save_waits_for_the_first_and_says_so(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainrun.checkpoint.manager.LONG_WAIT_SECONDS", 0.2)
    disk = SlowDisk()
    run = make_run(faults=disk, async_save=True, every_n_train_steps=1)
    finish_save = run.keep.finish_save

    def finish_in_a_while(state: Any) -> Any:
        if run.keep._in_progress is not None and not disk.go.is_set():
            threading.Timer(0.3, disk.go.set).start()
        return finish_save(state)

    monkeypatch.setattr(run.keep, "finish_save", finish_in_a_while)
    run.go(1)
    run.go(2)
    assert run.steps()[0] == 1
    assert len(run.notes) == 1
    assert re.fullmatch(r"waited \d+\.\d s until the checkpoint of step 1 was written", run.notes[0])
    run.keep.close()
    assert run.steps() == [1, 2]


def test_without_memory_for_a_copy_the_training_waits_and_it_is_said_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainrun.checkpoint.save.LARGE_BYTES", 1)
    run = make_run(async_save=True, every_n_train_steps=1)
    run.free_bytes = 10
    for step in (1, 2):
        run.go(step)
        assert run.steps()[-1] == step
    assert len(run.notes) == 1
    assert "memory has no room for a copy of the state" in run.notes[0]
    run.free_bytes = 10**6
    run.go(3)
    assert run.keep._in_progress is not None
    run.keep.close()


def test_after_a_failure_a_second_one_is_said(make_run: MakeRun, faults: Any) -> None:
    run = make_run(async_save=True, every_n_train_steps=1, faults=faults(at=4, error=disk_full))
    run.go(1)
    run.keep.finish_after_failure()
    assert len(run.notes) == 1
    assert "the checkpoint of step 1 that was being written is lost: " in run.notes[0]
    assert "No space left on device" in run.notes[0]


def test_a_save_that_the_ranks_did_not_agree_on_is_reported_as_lost(
    make_run: MakeRun, ranks: Ranks, tmp_path: Path
) -> None:
    def work(parallel: Any) -> list[str]:
        run = make_run(parallel=parallel, async_save=True, every_n_train_steps=1)
        run.go(1)
        run.keep.finish_after_failure()
        return list(run.notes)

    assert all("the checkpoint of step 1" in notes[0] for notes in ranks(2, work))
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_settle_when_the_last_of_them_is_done(make_run: MakeRun, ranks: Ranks, slow: int) -> None:
    disk = SlowDisk()

    def work(parallel: Any) -> Any:
        run = make_run(
            parallel=parallel,
            async_save=True,
            every_n_train_steps=4,
            faults=disk if parallel.rank == slow else None,
        )
        run.go(4)
        agreed = []
        for step in (5, 6):
            if step == 6:
                disk.go.set()
                run.keep._in_progress.written.exception()
            requests = parallel.gather(run.keep.save_status())
            agreed.append((max(requests), run.go(step, save_request=max(requests))))
        return agreed, run.keep._in_progress is None

    first, second = ranks(2, work)
    assert first == second == ([(SAVE_BUSY, False), (SAVE_NONE, True)], True)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_fault_of_one_ranks_thread_is_raised_by_all(
    make_run: MakeRun, ranks: Ranks, faults: Any, tmp_path: Path, broken: int
) -> None:
    def work(parallel: Any) -> None:
        at = {0: 6, 1: 4}[broken]  # of rank 1 its second file
        layer = faults(at=at, error=disk_full) if parallel.rank == broken else faults()
        run = make_run(parallel=parallel, async_save=True, every_n_train_steps=4, faults=layer)
        run.go(4)
        while True:
            agreed = max(parallel.gather(run.keep.save_status()))
            run.go(5, save_request=agreed)

    results = ranks(2, work)
    assert [type(result) for result in results] == [SaveError, SaveError]
    assert all("No space left on device" in str(result) for result in results)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_rank_that_never_reports_is_not_waited_for_forever(
    make_run: MakeRun, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trainrun.checkpoint.manager.LEAVE_SECONDS", 0.2)
    disk = SlowDisk()  # rank 1 hangs, as if it were dead

    def work(parallel: Any) -> list[str]:
        layer = disk if parallel.rank == 1 else None
        run = make_run(parallel=parallel, async_save=True, every_n_train_steps=4, faults=layer)
        run.go(4)
        run.keep.finish_after_failure()
        return list(run.notes)

    results = ranks(2, work)
    left = [thread for thread in threading.enumerate() if thread.name == "trainrun checkpoint"]
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    disk.go.set()
    for thread in left:  # whose fsync the next test would count
        thread.join(20)
    assert all("step 4 that was being written is lost: " in notes[0] for notes in results)
    assert "it did not end in time" in results[1][0]


def test_an_error_in_the_trainings_own_thread_leaves_no_half_save(make_run: MakeRun, faults: Any) -> None:
    run = make_run(async_save=True, every_n_train_steps=1, faults=faults(at=2, error=disk_full))
    with pytest.raises(CheckpointError):
        run.go(1)  # the temporary folder is made before the training goes on
    assert run.keep._in_progress is None
    assert run.state.saved_step == -1
    assert run.go(1)
    run.keep.close()
    assert run.steps() == [1]


def test_new_bests_in_quick_succession_are_written_once(make_run: MakeRun) -> None:
    run = make_run(async_save=True)
    run.go(1, acc=0.1)
    run.keep.finish_save(run.state)
    assert run.steps() == [1]
    run.go(2, acc=0.2)
    run.go(3, acc=0.3)
    run.parts.weight.fill_(99)
    assert (run.state.saved_step, run.keep.save_status(), run.steps()) == (3, SAVE_NONE, [1])
    run.keep.close()
    assert (run.steps(), run.keep.best) == ([1, 3], (3, 0.3))
    assert torch.equal(weights(run, 3), torch.full((2, 3), 3.0))


def test_new_best_is_written_when_the_seconds_are_over(make_run: MakeRun) -> None:
    run = make_run(async_save=True)
    run.go(1, acc=0.1)
    run.go(2, acc=0.2)
    assert not run.go(3)
    run.now = 6.0
    assert run.go(4)
    run.keep.close()
    assert run.steps() == [1, 2]


def test_new_best_in_memory_is_written_before_another_save(make_run: MakeRun) -> None:
    run = make_run(async_save=True, every_n_train_steps=10, keep_last=1)
    run.go(1, acc=0.1)
    run.go(2, acc=0.2)
    run.go(10)
    run.keep.close()
    assert run.steps() == [2, 10]


def test_second_best_is_written_too_where_two_stay(make_run: MakeRun) -> None:
    run = make_run(async_save=True, save_top_k=2, keep_last=1)
    for step, acc in enumerate([0.1, 0.2, 0.3, 0.4], start=1):
        run.go(step, acc=acc)
    run.keep.close()
    assert run.steps() == [3, 4]


def test_several_ranks_write_each_new_best(make_run: MakeRun, ranks: Ranks) -> None:
    def work(parallel: Any) -> list[int]:
        run = make_run(parallel=parallel, async_save=True, keep_last=3)
        for step in (1, 2, 3):
            run.go(step, acc=step / 10)
        run.keep.close()
        steps: list[int] = run.steps()
        return steps

    assert ranks(2, work) == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("operation", ["mkdir", "open"])
def test_fault_of_a_best_in_memory_is_raised_and_nothing_counts_as_saved(
    make_run: MakeRun, operation: str
) -> None:
    faulty = False

    def disk(name: str, path: Path) -> None:
        if faulty and name == operation:
            raise disk_full()

    run = make_run(faults=disk, async_save=True)
    run.go(1, acc=0.1)
    run.keep.finish_save(run.state)
    run.go(2, acc=0.2)
    faulty = True
    with pytest.raises(SaveError):
        run.keep.finish_save(run.state)
    assert (run.state.saved_step, run.steps()) == (1, [1])


@pytest.mark.parametrize("operation", ["mkdir", "open", ""])
def test_failing_run_writes_the_best_in_memory(make_run: MakeRun, operation: str) -> None:
    faulty = False

    def disk(name: str, path: Path) -> None:
        if faulty and name == operation:
            raise disk_full()

    run = make_run(faults=disk, async_save=True)
    run.go(1, acc=0.1)
    run.keep.finish_save(run.state)
    run.go(2, acc=0.2)
    faulty = True
    run.keep.finish_after_failure()
    assert run.steps() == ([1] if operation else [1, 2])
    assert bool(run.notes) == bool(operation)
