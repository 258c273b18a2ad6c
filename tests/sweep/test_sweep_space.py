"""Settings of a sweep itself, and the points that random sweeps draw."""

from __future__ import annotations

import pytest
from approved import refused

from trainrun.errors import ConfigError
from trainrun.sweep.options import SweepOptions, read_options
from trainrun.sweep.run_sweep import check_words, describe_excess_trials
from trainrun.sweep.space import (
    draw_points,
    list_overrides_to_check,
    list_points,
    num_points,
    parse_dimensions,
)

SPACE = ["lr=tag(log, interval(1e-4, 1e-1))", "width=int(interval(16, 20))", "model=mlp,cnn", "fixed=1"]


def draw(words: list[str], count: int, seed: int) -> list[tuple[str, ...]]:
    return [job for (job,) in draw_points(words, count, seed)]


def test_options_are_read() -> None:
    assert read_options([]) == SweepOptions()
    words = [
        "sweep=random",
        "sweep.trials=8",
        "sweep.seed=3",
        "sweep.jobs=auto",
        "sweep.per_device=2",
        "sweep.max_time=2min",
    ]
    assert read_options(words) == SweepOptions("random", 8, 3, jobs=None, per_device=2, max_seconds=120.0)


@pytest.mark.parametrize(
    "words",
    [
        ["sweep=tpe"],
        ["sweep=random"],
        ["sweep.trials=8"],
        ["sweep=random", "sweep.trials=0"],
        ["sweep.jobs=0"],
        ["sweep.jobs=many"],
        ["sweep.job=2"],
        ["sweep.max_time=soon"],
        ["sweep.max_time=0"],
        ["sweep.per_device=1.5"],
        ["sweep=optuna"],
        ["sweep=optuna", "sweep.trials=8", "sweep.sampler=grid"],
        ["sweep=random", "sweep.trials=8", "sweep.sampler=tpe"],
        ["sweep=optuna", "sweep.trials=8", "sweep.objective=[val/acc,]"],
        ["sweep=optuna", "sweep.trials=8", "sweep.objective=[val/acc,-seconds]", "sweep.sampler=cmaes"],
    ],
    ids=" ".join,
)
def test_wrong_options_are_refused(words: list[str]) -> None:
    with refused(ConfigError, "sweep"):
        read_options(words)


@pytest.mark.parametrize("word", ["lr=interval(1)", "lr=interval(2,1)", "lr=tag(log, interval(0,1))"])
def test_spaces_that_cannot_be_drawn_from_are_refused(word: str) -> None:
    with refused(ConfigError, "lr"):
        draw_points([word], 2, 0)


def test_a_point_depends_on_the_seed_and_its_number_alone() -> None:
    points = draw(SPACE, 20, 0)
    assert draw(SPACE, 5, 0) == points[:5]
    assert draw(SPACE, 20, 1) != points
    with_more = draw([*SPACE, "more=interval(0,1)"], 20, 0)
    assert [point[:-1] for point in with_more] == points
    assert draw(SPACE[::-1], 20, 0) == [point[::-1] for point in points]


def test_values_are_of_their_kind_and_reach_all_of_the_space() -> None:
    points = [dict(word.split("=") for word in point) for point in draw(SPACE, 200, 0)]
    rates = [float(point["lr"]) for point in points]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert 60 < sum(rate < 10**-2.5 for rate in rates) < 140  # a decade is as likely as another
    assert {point["width"] for point in points} == {"16", "17", "18", "19", "20"}
    assert {point["model"] for point in points} == {"mlp", "cnn"}
    assert {point["fixed"] for point in points} == {"1"}


def test_each_point_is_trained_with_all_seeds() -> None:
    points = list_points(["lr=interval(0,1)", "seed=range(3)", "sweep=random", "sweep.trials=2"])
    assert [[job[1] for job in jobs] for jobs in points] == [["seed=0", "seed=1", "seed=2"]] * 2
    assert [len({job[0] for job in jobs}) for jobs in points] == [1, 1]
    assert points[0][0][0] != points[1][0][0]


def test_the_points_of_a_discrete_space_differ_until_all_are_drawn() -> None:
    words = ["a=1,2,3", "b=int(interval(1,4))", "fixed=0", "seed=0,1"]
    assert num_points(parse_dimensions(words)) == 12
    few, all_of_them = draw_points(words, 7, 0), draw_points(words, 99, 0)
    assert all_of_them[:7] == few
    assert len({jobs[0] for jobs in all_of_them}) == len(all_of_them) == 12


@pytest.mark.parametrize("values", ["1e-3,1e-3", "choice(1e-3,1e-3)", "1e-3,0.001,1e-3"])
def test_equal_values_are_one_choice(values: str) -> None:
    words = [f"lr={values}"]
    assert num_points(parse_dimensions(words)) == 1
    assert draw(words, 5, 0) == [("lr=0.001",)]


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (["lr=interval(0.1, 0.100002)"], 3),  # points have six digits
        (["lr=1,2", "lr=1,2"], 4),  # draws of one key are equal
        (["width=int(tag(log, interval(1, 20)))", "depth=int(tag(log, interval(1, 20)))"], 400),
    ],
)
def test_drawing_ends_where_no_draw_is_new(words: list[str], most: int) -> None:
    points = draw(words, 500, 0)
    assert len(points) == len(set(points)) == most
    assert draw(words, most - 1, 0) == points[:-1]
    (note,) = describe_excess_trials([[*words, "sweep=random", "sweep.trials=500"]])
    assert f"{most} points" in note


BRANCHES = ["model=mlp,cnn,none", "model=mlp: width=16,32", "model=cnn: width=8,9", "width=32: drop=0.1,0.2"]


def test_a_word_of_a_branch_is_in_its_points_alone() -> None:
    points = [" ".join(word.partition("=")[2] for word in jobs[0]) for jobs in list_points(BRANCHES)]
    assert points == ["mlp 16", "mlp 32 0.1", "mlp 32 0.2", "cnn 8", "cnn 9", "none"]
    assert num_points(parse_dimensions(BRANCHES)) == 6
    drawn = draw(BRANCHES, 6, 0)
    assert {jobs[0] for jobs in list_points(BRANCHES)} == set(drawn)


def test_every_branch_is_checked_before_the_first_job() -> None:
    words = [*BRANCHES, "sweep=random", "sweep.trials=1"]
    checked = list_overrides_to_check(words)
    assert set(checked) <= {jobs[0] for jobs in list_points(BRANCHES)}
    assert {word for job in checked for word in job} == {word for job in draw(BRANCHES, 6, 0) for word in job}


@pytest.mark.parametrize("word", ["model=mlpp: width=1,2", "width=1: model=mlp"])
def test_a_branch_that_no_point_has_is_refused(word: str) -> None:
    with refused(ConfigError, word.partition(":")[0]):
        list_points(["model=mlp,cnn", word])


def test_a_space_of_many_settings_is_checked_one_value_at_a_time() -> None:
    words = [f"s{number}=1,2,3,4" for number in range(30)]
    checked = list_overrides_to_check([*words, "sweep=random", "sweep.trials=1"])
    assert len(checked) == 1 + 30 * 3
    assert {len(job) for job in checked} == {30}


def test_three_values_of_an_interval_and_all_choices_are_checked() -> None:
    checked = list_overrides_to_check([*SPACE, "sweep=random", "sweep.trials=1"])
    assert {word for job in checked for word in job} == {
        "lr=0.0001", "lr=0.0382618", "lr=0.1", "width=16", "width=20", "model=mlp", "model=cnn", "fixed=1",
    }  # fmt: skip


@pytest.mark.parametrize("interval", ["interval(16,64)", "tag(log, interval(16,64))"])
def test_fractions_of_a_whole_number_are_refused_with_the_way_to_whole_ones(interval: str) -> None:
    with refused(ConfigError, "data.batch_size"):
        check_words([[f"data.batch_size={interval}", "sweep=random", "sweep.trials=2"]])
    check_words([[f"data.batch_size=int({interval})", "sweep=random", "sweep.trials=2"]])
