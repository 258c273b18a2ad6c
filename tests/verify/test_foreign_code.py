"""`trainrun verify` on models that raise, draw, or name no type: a table comes, and says what was computed how."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.config.compose import compose_run
from trainrun.verify.certificate import FAIL, NONE, PASS, Certificate
from trainrun.verify.continuity import engines
from trainrun.verify.run_checks import certificates

WORDS = (
    "data.train._target_=subjects.samples", "data.val._target_=subjects.samples", "data.val.seed=2",
    "data.batch_size=8", "optimizer.lr=0.01", "trainer.num_threads=1",
)  # fmt: skip
TITLES = 12


@pytest.fixture(autouse=True)
def subjects_can_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


def table(model: str, *words: str) -> dict[str, Certificate]:
    config = compose_run([*WORDS, f"model=subjects.{model}", *words]).config
    found = {one.name: one for one in certificates(config, lambda about: None)}
    assert len(found) == TITLES
    return found


def test_an_exception_of_the_users_code_is_a_row() -> None:
    found = table("ForEights", "data.drop_last=true")
    row = found["partial window"]
    assert row.state == FAIL
    assert "ValueError: eight samples, please" in row.text
    assert "subjects.py line" in row.text
    assert found["every sample once"].state == PASS
    assert found["engines"].state == PASS


def test_a_model_that_draws_gets_a_table() -> None:
    found = table("Noisy")
    for name in ("sum of losses", "accumulation", "partial window", "ranks"):
        assert found[name].state == NONE
        assert "draws random numbers in evaluation mode" in found[name].text
    assert found["evaluation"].state == FAIL  # its validation is a matter of luck
    assert found["resume"].state == found["learning rate"].state == PASS


def test_numbers_that_a_model_makes_itself_are_exact_too() -> None:
    found = table("Shifted")
    exact = ("sum of losses", "accumulation", "partial window", "ranks", "evaluation")
    assert [found[name].state for name in exact] == [PASS] * len(exact)
    assert all("in float64" in found[name].text for name in exact)


def test_a_layer_that_moves_in_each_forward_is_not_taken_for_a_mean() -> None:
    assert table("Moving")["sum of losses"].state == PASS


def test_a_model_that_cannot_compute_in_float64_says_so() -> None:
    found = table("Single")
    for name in ("sum of losses", "accumulation", "evaluation"):
        assert found[name].state == NONE
        assert "the trial in float64 on a CPU does not run" in found[name].text
    assert found["resume"].state == PASS


def test_engines_read_the_same_data_where_it_is_drawn_as_it_is_built() -> None:
    words = ["data.train._target_=subjects.drawn", "data.val._target_=subjects.drawn", "data.num_classes=2"]
    found = engines(compose_run(["data=custom", *words, "seed=1"]).config)
    assert (found.state, found.text) == (PASS, "resident, workers, threads read the same bits")
