"""`trainrun verify` on models that raise, draw, or name no type: a table comes, and says what was computed how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainrun.config.compose import compose_run
from trainrun.verify import run_checks
from trainrun.verify.certificate import FAIL, NONE, PASS, Certificate
from trainrun.verify.continuity import check_engines

WORDS = (
    "data.train._target_=subjects.samples", "data.val._target_=subjects.samples", "data.val.seed=2",
    "data.batch_size=8", "optimizer.lr=0.01", "trainer.num_threads=1",
)  # fmt: skip
TITLES = 13
Table = Callable[..., dict[str, Certificate]]


@pytest.fixture(autouse=True)
def subjects_can_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """The rows of a model; those named alone are made."""
    checks = run_checks.build_checks

    def chosen(model: str, *names: str) -> dict[str, Certificate]:
        def some(*about: Any) -> dict[str, run_checks.Check]:
            every = checks(*about)
            assert len(every) == TITLES
            return {name: every[name] for name in names or every}

        monkeypatch.setattr(run_checks, "build_checks", some)
        config = compose_run([*WORDS, *model.split()]).config
        return {one.name: one for one in run_checks.iterate_certificates(config, lambda about: None)}

    return chosen


def test_an_exception_of_the_users_code_is_a_row(table: Table) -> None:
    found = table("model=subjects.ForEights data.drop_last=true")
    assert len(found) == TITLES
    row = found["partial window"]
    assert row.state == FAIL
    assert "ValueError: eight samples, please" in row.text
    assert "subjects.py line" in row.text
    assert found["every sample once"].state == PASS
    assert found["engines"].state == PASS


def test_a_model_that_draws_gets_a_table(table: Table) -> None:
    cut = ("sum of losses", "accumulation", "partial window", "ranks")
    found = table("model=subjects.Noisy", *cut, "evaluation", "resume", "learning rate")
    for name in cut:
        assert found[name].state == NONE
        assert "draws random numbers in evaluation mode" in found[name].text
    assert found["evaluation"].state == FAIL  # its validation is a matter of luck
    assert found["resume"].state == found["learning rate"].state == PASS


def test_numbers_that_a_model_makes_itself_are_exact_too(table: Table) -> None:
    exact = ("sum of losses", "accumulation", "partial window", "ranks", "evaluation")
    found = table("model=subjects.Shifted", *exact)
    assert [found[name].state for name in exact] == [PASS] * len(exact)
    assert all("in float64" in found[name].text for name in exact)


def test_a_layer_that_moves_in_each_forward_is_not_taken_for_a_mean(table: Table) -> None:
    assert table("model=subjects.Moving", "sum of losses")["sum of losses"].state == PASS


def test_a_model_that_cannot_compute_in_float64_says_so(table: Table) -> None:
    doubles = ("sum of losses", "accumulation", "evaluation")
    found = table("model=subjects.Single", *doubles, "resume")
    for name in doubles:
        assert found[name].state == NONE
        assert "the trial in float64 on a CPU failed" in found[name].text
    assert found["resume"].state == PASS


def test_engines_read_the_same_data_where_it_is_drawn_as_it_is_built() -> None:
    words = ["data.train._target_=subjects.drawn", "data.val._target_=subjects.drawn", "data.num_classes=2"]
    found = check_engines(compose_run(["data=custom", *words, "seed=1"]).config)
    assert (found.state, found.text) == (PASS, "resident, workers, main process, threads read the same bits")
