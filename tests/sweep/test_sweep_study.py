"""A search by Optuna without trainings: each job's result is written down as if the job had ended."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from approved import refused

from trainrun.errors import ConfigError
from trainrun.sweep.jobs import Sweep, open_sweep
from trainrun.sweep.options import read_options, split_options
from trainrun.sweep.results import Job, Result, apply_objective
from trainrun.sweep.run_sweep import resume_sweep, run_sweep
from trainrun.sweep.table import job_table, jobs_csv

optuna = pytest.importorskip("optuna")
from trainrun.sweep.search.study import SweepStudy  # noqa: E402
from trainrun.sweep.search.study_file import JOURNAL, StudyFile  # noqa: E402

Command = Callable[[list[str], Path], list[str]]
SPACE = [
    "sweep=optuna", "lr=tag(log, interval(1e-4, 1e-1))", "model=mlp,cnn", "depth=int(interval(1,8))",
    "model=mlp: drop=interval(0,0.5)",
]  # fmt: skip


def value_of(job: Job) -> float:
    settings = job.settings
    return (
        -abs(math.log10(float(settings["lr"])) + 2)
        - int(settings["depth"]) / 8
        - float(settings.get("drop", 0))
    )


class Search:
    """A search in a folder, as one call of it sees it."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.sweep = open_sweep([list(words)], folder)
        with self.sweep.register_worker():  # alone, as each call of these tests
            pass
        self.study = SweepStudy(self.sweep, read_options(split_options(words)[0]))
        self.study.open()

    def finish(self, num: int, **about: object) -> None:
        job = self.sweep.jobs[num]
        result = Result("done", value_of(job), "val/acc", "max")
        self.sweep.note(num, replace(result, **about))  # type: ignore[arg-type]
        self.study.tell(num)

    def run(self, count: int) -> None:
        for _ in range(count):
            for num in self.study.ask():
                self.finish(num)


def points(sweep: Sweep) -> list[tuple[str, ...]]:
    return [sweep.jobs[numbers[0]].words for numbers in sweep.trials]


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "nsga2", "cmaes"])
def test_a_search_that_was_killed_asks_the_same_points(tmp_path: Path, sampler: str) -> None:
    """Also where the journal is gone, ends in half a line, or lacks the last point."""
    words = [*SPACE, f"sweep.sampler={sampler}", "sweep.trials=18"]
    whole = Search(tmp_path / "whole", words)
    whole.run(18)
    assert len(set(points(whole.sweep))) == 18
    assert whole.study.has_all_points
    folder = tmp_path / "killed"
    journal = folder / JOURNAL
    Search(folder, words).run(5)
    journal.unlink()
    Search(folder, words).run(5)
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    search = Search(folder, words)
    search.run(3)
    search.study._ask(search.study._study, 13)  # killed before the sweep knew of the point
    search = Search(folder, words)
    (num,) = search.study.ask()  # killed while its job ran: it is the next to end
    search = Search(folder, words)
    assert search.sweep.wanted[-1] == num
    search.finish(num)
    search.run(4)
    assert points(search.sweep) == points(whole.sweep)
    opened = StudyFile(search.sweep, "").read()
    assert opened is not None
    study = opened[0]
    assert [trial.number for trial in study.trials] == list(range(18))
    assert [trial.value for trial in study.trials] == [-value_of(job) for job in search.sweep.jobs.values()]
    another = Search(tmp_path / "other", [*words, "sweep.seed=1"])
    another.run(2)
    assert points(another.sweep) != points(whole.sweep)[:2]


def test_workers_of_a_search_ask_for_each_point_once(tmp_path: Path) -> None:
    """Also where one was killed before the sweep had its point, or before the study had its result."""
    words = [*SPACE, "sweep.trials=12"]
    whole = Search(tmp_path / "whole", words)
    whole.run(12)
    workers = [Search(tmp_path / "shared", words) for _ in range(3)]
    for number in range(9):
        workers[number % 3].run(1)
    workers[0].study._ask(workers[0].study._study, 9)
    workers[1].run(1)
    (num,) = workers[1].study.ask()
    result = Result("done", value_of(workers[1].sweep.jobs[num]), "val/acc", "max")
    workers[1].sweep.note(num, result)
    workers[2].run(1)
    assert [worker.study.ask() for worker in workers] == [[], [], []]
    assert points(workers[0].sweep) == points(whole.sweep)
    for worker in workers:
        assert [trial.number for trial in worker.study._study.trials] == list(range(12))
        assert [trial.value for trial in worker.study._study.trials[:11]] == [
            -value_of(worker.sweep.jobs[num]) for num in range(11)
        ]


def test_a_job_that_failed_is_tried_again_once_all_workers_have_ended(tmp_path: Path) -> None:
    words = [["lr=1,2"]]
    first = open_sweep(words, tmp_path)
    with first.register_worker():
        first.note(0, Result("failed", error="no memory"))
        second = open_sweep(words, tmp_path)
        with second.register_worker():
            assert second.has_ended(second.jobs[0])
            claim = first.locks.lock_job(1)
            assert claim is not None
            assert second.locks.lock_job(1) is None
            os.close(claim)
            second.note(1, Result("done", 0.5))
        first.refresh()
        assert first.has_ended(first.jobs[1])
    third = open_sweep(words, tmp_path)
    with third.register_worker():
        assert not third.has_ended(third.jobs[0])
        assert third.has_ended(third.jobs[1])


def test_a_worker_with_another_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_sweep([["lr=1,2"]], tmp_path).register_worker():
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        joining = open_sweep([["lr=1,2"]], tmp_path)
        with refused(ConfigError, "output_dir"), joining.register_worker():
            pass
    with open_sweep([["lr=1,2"]], tmp_path).register_worker():  # alone
        pass


def test_a_study_lies_in_a_database(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/studies.db"
    words = ["lr=interval(0,1)", "depth=1", "sweep=optuna", "sweep.trials=3", f"sweep.storage={address}"]
    search = Search(tmp_path / "a", words)
    search.run(1)
    optuna.delete_study(study_name=search.sweep.name, storage=search.study._storage)
    search.run(1)
    again = Search(tmp_path / "a", words)
    again.run(1)
    assert [trial.value for trial in search.study._study.trials] == [
        -value_of(job) for job in again.sweep.jobs.values()
    ]
    assert not (tmp_path / "a" / JOURNAL).exists()


@pytest.mark.parametrize("address", ["sqlite:////nowhere/of.db", "nodatabase://x", "oracle://me:secret@x/y"])
def test_a_storage_that_cannot_be_reached_is_one_message(tmp_path: Path, address: str) -> None:
    with refused(ConfigError, "sweep.storage") as caught:
        Search(tmp_path, [*SPACE, "sweep.trials=2", f"sweep.storage={address}"])
    assert "secret" not in str(caught.value)


def test_a_journal_damaged_anywhere_is_made_anew(tmp_path: Path) -> None:
    words = [*SPACE, "sweep.trials=9"]
    Search(tmp_path, words).run(6)
    journal, generator = tmp_path / JOURNAL, random.Random(0)
    good = journal.read_bytes()
    for _ in range(30):
        place = generator.randrange(len(good))
        journal.write_bytes(good[:place] + generator.choice([b"", b"x", b"\n", good[place + 9 :]]))
        search = Search(tmp_path, words)
        trials = search.study._study.trials
        assert [(trial.number, trial.value) for trial in trials] == [
            (number, -value_of(search.sweep.jobs[number])) for number in range(6)
        ]


def test_a_point_is_the_mean_of_its_seeds_and_fails_with_one(tmp_path: Path) -> None:
    search = Search(
        tmp_path, ["sweep=optuna", "sweep.trials=2", "lr=interval(0,1)", "seed=range(3)", "depth=1"]
    )
    first, second = search.study.ask(), search.study.ask()
    assert [search.sweep.jobs[num].settings["seed"] for num in first] == ["0", "1", "2"]
    assert len({search.sweep.jobs[num].settings["lr"] for num in first}) == 1
    for num, value in zip(first, (1.0, 2.0, 6.0), strict=True):
        assert search.study._study.trials[0].state.name == "RUNNING"
        search.finish(num, value=value)
    for num in second[1:]:
        search.finish(num)
    search.finish(second[0], state="failed", value=9.0, error="no memory")
    one, two = search.study._study.trials
    assert (one.state.name, one.value) == ("COMPLETE", -3.0)  # written so that smaller is better
    assert (two.state.name, two.values) == ("FAIL", None)
    again = Search(
        tmp_path, ["sweep=optuna", "sweep.trials=2", "lr=interval(0,1)", "seed=range(3)", "depth=1"]
    )
    assert again.study._study.trials[1].state.name == "RUNNING"  # it is tried once more
    assert again.sweep.num_jobs == 6


def test_a_search_shares_its_folder_with_no_other_words(tmp_path: Path) -> None:
    words = [*SPACE, "sweep.trials=2"]
    Search(tmp_path, words).run(2)
    Search(tmp_path, [*SPACE, "sweep.trials=3", "sweep.jobs=2"]).run(1)
    for other in ([*words, "more=1,2"], ["lr=1,2"], [*words, "sweep.objective=val/loss"]):
        with refused(ConfigError, "output_dir"):
            open_sweep([other], tmp_path)
    open_sweep([["lr=1,2"]], tmp_path / "grid")
    with refused(ConfigError, "output_dir"):
        open_sweep([words], tmp_path / "grid")


def test_secrets_of_a_search_are_in_no_file(tmp_path: Path) -> None:
    words = [*SPACE, "sweep.trials=2", "model.api_key=typed-1"]
    Search(tmp_path, words).run(2)
    open_sweep([[*words, "sweep.storage=postgresql://me:typed-1@host/name"]], tmp_path)
    assert "typed-1" not in (tmp_path / "sweep.json").read_text() + (tmp_path / JOURNAL).read_text()
    assert all("model.api_key=typed-1" in job.words for job in Search(tmp_path, words).sweep.jobs.values())


def test_the_objective_is_read_where_the_job_reports_it(tmp_path: Path) -> None:
    rows = '{"kind": "eval", "step": 5, "val/f1": 0.4}\n{"kind": "eval", "step": 9, "val/f1": 0.3}\n{"kind": "eval"'
    (tmp_path / "metrics.jsonl").write_text(rows)
    (tmp_path / "status.json").write_text('{"state": "done", "best_step": 5, "num_parameters": 7}')
    done = Result("done", 0.9, "val/acc", "max", seconds=3.0)
    objective = ("val/f1", "-seconds", "-num_parameters")
    result = apply_objective(done, tmp_path, objective)
    assert (result.value, result.monitor, result.mode) == (0.4, "val/f1", "max")
    assert result.scores == [-0.4, 3.0, 7.0]
    assert done.scores == [-0.9]
    lacking = apply_objective(done, tmp_path, ("val/none",))
    assert (lacking.state, lacking.value) == ("failed", None)


@pytest.mark.parametrize("sampler", ["nsga2", "tpe"])
def test_several_objectives_are_searched_and_shown_together(tmp_path: Path, sampler: str) -> None:
    words = [*SPACE, f"sweep.sampler={sampler}", "sweep.trials=12", "sweep.objective=[val/acc,-seconds]"]

    def run(search: Search, count: int) -> None:
        for _ in range(count):
            (num,) = search.study.ask()
            value = value_of(search.sweep.jobs[num])
            search.finish(num, value=value, values={"val/acc": value, "-seconds": 3.0 + num})

    whole = Search(tmp_path / "whole", words)
    run(whole, 12)
    run(Search(tmp_path / "killed", words), 7)
    (tmp_path / "killed" / JOURNAL).unlink()
    search = Search(tmp_path / "killed", words)
    run(search, 5)
    assert points(search.sweep) == points(whole.sweep)
    assert search.study._study.trials[11].values == [-value_of(search.sweep.jobs[11]), 14.0]
    head, *rows = job_table(list(search.sweep.jobs.values()), search.sweep.swept_keys())
    assert head[3] == "-seconds"
    assert rows[0][11][3] == "14"
    assert "-seconds" in jobs_csv(search.sweep).splitlines()[0]


@pytest.mark.process
def test_a_job_fails_alone_and_an_unknown_objective_ends_the_sweep(tmp_path: Path, command: Command) -> None:
    words = ["lr=interval(0,1)", "do=train,fail", "sweep=optuna", "sweep.sampler=qmc", "sweep.trials=6"]
    assert run_sweep([words], tmp_path / "a", command) == 1
    sweep = open_sweep([words], tmp_path / "a")
    states = [(job.settings["do"], job.result.state) for job in sweep.jobs.values()]
    assert set(states) == {("train", "done"), ("fail", "failed")}
    assert len(states) == 6
    with refused(ConfigError, "sweep.objective=val/f1"):
        run_sweep([["lr=1,2,3", "sweep.objective=val/f1"]], tmp_path / "b", command)
    assert (tmp_path / "b" / "ran.txt").read_text().split() == ["0-lr=1"]


@pytest.mark.process
def test_resume_goes_on_with_every_call(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grid and random points of two seeds in one folder: none of them is forgotten."""
    monkeypatch.setattr("trainrun.sweep.run_sweep.check_words", lambda calls: None)
    monkeypatch.setattr("trainrun.sweep.run_sweep.run_sweep", partial(run_sweep, command=command))
    random_words = ["lr=interval(0,1)", "do=fail", "sweep=random", "sweep.trials=2"]
    for words in (["lr=1,2"], random_words, [*random_words, "sweep.seed=5"]):
        run_sweep([words], tmp_path, command)
    (tmp_path / "ran.txt").unlink()
    assert resume_sweep(tmp_path, False, []) == 1
    assert len((tmp_path / "ran.txt").read_text().split()) == 4
    assert resume_sweep(tmp_path, False, ["sweep.trials=3"]) == 1
    assert len(open_sweep([["lr=1,2"]], tmp_path).jobs) == 8
    with refused(ConfigError, "sweep.seed"):
        resume_sweep(tmp_path, False, ["sweep.seed=9"])


@pytest.mark.process
def test_a_search_ends_once_its_space_has_no_other_point(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["lr=1,2", "do=train,fail", "sweep=optuna", "sweep.max_time=100s"]
    assert run_sweep([words], tmp_path / "a", command) == 1  # two jobs fail
    assert len((tmp_path / "a" / "ran.txt").read_text().split()) == 4  # each once
    out = capsys.readouterr().out
    assert "sweep: 4 jobs in" in out
    assert "sweep=optuna: the space has 4 points, and no other is trained" in out
    monkeypatch.setattr("trainrun.sweep.jobs.MOST_REPEATED", 5)
    monkeypatch.setattr(SweepStudy, "_point", lambda self, trial: ("lr=1",))
    assert run_sweep([["lr=int(interval(1,9))", *words[2:]]], tmp_path / "b", command) == 0
    assert (tmp_path / "b" / "ran.txt").read_text().split() == ["0-lr=1"]
    assert "sweep=optuna: no other point in 5 asks" in capsys.readouterr().out


@pytest.mark.process
def test_a_search_that_asks_for_known_points_alone_ends_in_time(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainrun.sweep.jobs.MOST_REPEATED", 10**9)
    monkeypatch.setattr(SweepStudy, "_point", lambda self, trial: ("lr=1",))
    assert (
        run_sweep([["lr=int(interval(1,9))", "sweep=optuna", "sweep.max_time=1s"]], tmp_path, command) == 75
    )


def test_equal_values_of_a_search_are_one_point(tmp_path: Path) -> None:
    search = Search(tmp_path, ["sweep=optuna", "sweep.trials=3", "lr=0.1,0.1", "depth=1", "seed=1,2"])
    assert search.sweep.num_jobs == 2
    for num in search.study.ask():
        search.finish(num)
    assert search.study.has_all_points
    assert search.sweep.num_jobs == 2


def test_a_search_that_its_number_of_points_ends_says_no_more(tmp_path: Path) -> None:
    Search(tmp_path, [*SPACE, "sweep.trials=2"]).run(2)
    assert Search(tmp_path, [*SPACE, "sweep.trials=1"]).sweep.reason_search_ended() == ""
