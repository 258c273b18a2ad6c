from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.checkpoint.manager import Entry, Ranking
from trainrun.train_state import SAVE_NOW

MakeRun = Callable[..., Any]


def best_steps(run: Any) -> list[int]:
    return [entry["step"] for entry in json.loads((run.folder / "best.json").read_text())["entries"]]


def test_nothing_is_due_without_a_reason(make_run: MakeRun) -> None:
    run = make_run(every_n_train_steps=3)
    assert [step for step in range(8) if run.go(step)] == [3, 6]
    assert run.go(7, stop="max_steps")
    assert not run.go(7, stop="max_steps")
    assert run.steps() == [6, 7]


def test_a_saved_state_says_that_it_is_saved(make_run: MakeRun) -> None:
    run = make_run(every_n_train_steps=2)
    run.go(1, acc=0.5)
    assert run.state.saved_step == 1
    run.go(2)
    assert run.state.saved_step == 2
    for step in (1, 2):
        state = read_checkpoint(run.folder / f"step-{step:08d}").shared["state"]
        assert state == {"step": step, "saved_step": step}


def test_the_time_interval(make_run: MakeRun) -> None:
    run = make_run(interval_seconds=60.0)
    assert run.keep.save_status() == 0
    run.now = 59.9
    assert run.keep.save_status() == 0
    run.now = 60.0
    assert run.keep.save_status() == SAVE_NOW
    assert run.go(5, save_request=SAVE_NOW)
    assert run.keep.save_status() == 0
    run.now = 119.0
    assert run.keep.save_status() == 0
    run.now = 120.0
    assert run.keep.save_status() == SAVE_NOW


def test_disabled_writes_nothing(make_run: MakeRun) -> None:
    run = make_run(enabled=False, every_n_train_steps=1, interval_seconds=0.0)
    assert not run.go(1, acc=0.5, save_request=SAVE_NOW)
    assert not run.go(2, stop="a signal", request=3)
    assert run.keep.save_status() == 0
    run.keep.close()
    assert not run.folder.exists()


def test_without_last_only_the_best_stay(make_run: MakeRun) -> None:
    run = make_run(save_last=False, save_top_k=2, interval_seconds=1.0)
    for step, acc in enumerate([0.1, 0.5, 0.3, 0.4, 0.2], start=1):
        run.now += 100.0
        assert run.keep.save_status() == 0
        assert run.go(step, acc=acc, save_request=SAVE_NOW) == (step != 5)
    assert not run.go(6, stop="max_steps")
    assert run.steps() == [2, 4]
    assert run.go(7, stop="a signal", request=2)
    assert run.steps() == [2, 4, 7]


def test_the_newest_and_the_best_are_kept(make_run: MakeRun) -> None:
    run = make_run(every_n_train_steps=1, keep_last=2, save_top_k=2)
    for step, acc in enumerate([0.1, 0.8, 0.2, 0.9, 0.3, 0.4, 0.5], start=1):
        run.go(step, acc=acc)
    assert run.steps() == [2, 4, 6, 7]
    assert best_steps(run) == [4, 2]
    assert run.hidden() == []
    assert resolve_checkpoint(run.folder, "best").name == "step-00000004"
    assert resolve_checkpoint(run.folder, "last").name == "step-00000007"


def test_other_names_are_never_touched(make_run: MakeRun) -> None:
    run = make_run(every_n_train_steps=1, keep_last=1, save_top_k=0)
    run.folder.mkdir()
    names = ["step-1", "step-00000001.backup", "xstep-00000001", "step-000000001", ".tmp-mine", "notes.txt"]
    for name in names:
        (run.folder / name).mkdir()
    for step in (1, 2, 3):
        run.go(step)
    make_run().keep.load_latest()
    assert sorted(path.name for path in run.folder.iterdir()) == sorted([*names, "step-00000003"])


@pytest.mark.parametrize(("mode", "expected"), [("max", [2, 4, 1]), ("min", [3, 5, 1])])
def test_top_k_in_both_modes_earlier_wins_ties(mode: str, expected: list[int]) -> None:
    ranking = Ranking(mode, 3, [])
    for step, value in enumerate([0.5, 0.9, 0.1, 0.9, 0.1, 0.5], start=1):
        ranking.add(Entry(step, value))
    assert [entry.step for entry in ranking.entries] == expected
    assert not ranking.admits_entry(Entry(7, 0.5))
    assert ranking.admits_entry(Entry(7, 0.51 if mode == "max" else 0.49))
    assert not ranking.admits_entry(Entry(1, 9.0 if mode == "max" else -9.0))
    assert not any(
        Ranking(mode, 3, []).admits_entry(Entry(1, value)) for value in (math.nan, math.inf, -math.inf)
    )


def test_a_metric_that_is_no_number_is_never_best(make_run: MakeRun) -> None:
    run = make_run()
    assert not run.go(1, acc=math.inf)
    run.go(2, acc=math.nan, stop="done")
    assert read_checkpoint(run.folder / "step-00000002").manifest.metric is None
    assert not (run.folder / "best.json").exists()


@pytest.mark.parametrize("async_save", [False, True])
def test_every_new_best_is_saved(make_run: MakeRun, async_save: bool) -> None:
    run = make_run(save_top_k=2, save_last=False, async_save=async_save)
    for step, acc in enumerate([0.1, 0.3, 0.2, 0.05, 0.4], start=1):
        run.go(step, acc=acc)
        assert (run.state.saved_step == step) == (acc != 0.05)
    run.keep.close()
    assert run.steps() == [2, 5]
    assert best_steps(run) == [5, 2]


def resumed(make_run: MakeRun, **options: Any) -> Any:
    run = make_run(**options)
    loaded = run.keep.load_latest()
    run.state.step = run.state.saved_step = run.state.validated_step = loaded.manifest.step
    return run


def test_a_resumed_run_does_not_save_again_at_once(make_run: MakeRun) -> None:
    first = make_run(every_n_train_steps=2)
    first.go(2, acc=0.5)
    run = resumed(make_run, every_n_train_steps=2)
    assert not run.go(2, acc=0.5)
    assert not run.go(2, acc=0.5, stop="max_steps")


def test_a_resume_restores_the_ranking(make_run: MakeRun) -> None:
    first = make_run(every_n_train_steps=1, save_top_k=2)
    for step, acc in enumerate([0.5, 0.9, 0.7, 0.1, 0.2], start=1):
        first.go(step, acc=acc)
    (first.folder / "best.json").unlink()
    run = resumed(make_run, save_top_k=2)
    assert not run.go(6, acc=0.7)
    assert run.go(7, acc=0.8)
    run.go(8, stop="done")
    assert best_steps(run) == [2, 7]
    assert run.steps() == [2, 7, 8]


def test_the_ranking_of_another_metric_does_not_count(make_run: MakeRun) -> None:
    make_run(every_n_train_steps=1).go(1, acc=0.5)
    run = resumed(make_run, monitor="val/loss", mode="min")
    run.go(2, acc=-0.9, stop="done")  # a loss of 0.9, to an accuracy of 0.5
    assert best_steps(run) == [2]
    assert resolve_checkpoint(run.folder, "best").name == "step-00000002"


def test_the_best_by_another_metric_stay(make_run: MakeRun) -> None:
    run = make_run(every_n_train_steps=1, keep_last=1)
    for step, acc in enumerate([0.1, 0.9, 0.5], start=1):
        run.go(step, acc=acc)
    other = resumed(make_run, every_n_train_steps=1, keep_last=1, monitor="val/loss", mode="min")
    assert other.steps() == [2, 3]
    assert other.keep.best is None
    for step, acc in ((4, 0.7), (5, 0.6)):
        other.go(step, acc=acc)
    assert other.steps() == [2, 4, 5]
    assert other.keep.best == (4, -0.7)
    assert resumed(make_run).keep.best == (2, 0.9)


def test_a_metric_that_a_resume_adds_is_not_missed(make_run: MakeRun) -> None:
    make_run(every_n_train_steps=1).go(1, acc=0.5)
    run = resumed(make_run, monitor="val/f1")
    run.state.last_metrics = {"val/acc": 0.5}
    assert not run.keep.is_due(run.state)


def test_leftovers_are_swept_only_by_who_goes_on(make_run: MakeRun) -> None:
    run = make_run(every_n_train_steps=1)
    (run.folder / ".tmp-step-00000002-0123abcd").mkdir(parents=True)
    run.keep.start(run.parts, run.state)  # who begins again, where nothing was committed
    assert run.hidden() == []
    run.go(1)
    for name in (".tmp-step-00000002-0123abcd", ".trash-step-00000000-0123abcd", ".tmp-best-0123abcd"):
        (run.folder / name).mkdir()
        (run.folder / name / "state.json").touch()
    reader = make_run()
    resolve_checkpoint(reader.folder, "last")
    assert len(run.hidden()) == 3
    make_run(enabled=False).keep.load_latest()
    assert len(run.hidden()) == 3
    reader.keep.load_latest()
    assert run.hidden() == []
