"""Settings of a sweep itself, and the points that random sweeps draw."""

from __future__ import annotations

import pytest
from approved import refused

from trainrun.errors import ConfigError
from trainrun.sweep.options import SweepOptions, read_options
from trainrun.sweep.space import combinations_of, draw_points, words_to_check

SPACE = ["lr=tag(log, interval(1e-4, 1e-1))", "width=int(interval(16, 20))", "model=mlp,cnn", "fixed=1"]


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
    assert read_options(words) == SweepOptions("random", 8, 3, None, 2, 120.0)


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
    ],
    ids=" ".join,
)
def test_wrong_options_are_refused(words: list[str]) -> None:
    with refused(ConfigError, "sweep"):
        read_options(words)


@pytest.mark.parametrize(
    "word",
    ["lr=interval(1)", "lr=interval(2,1)", "lr=tag(log, interval(0,1))", "lr=glob(*)", "lr=interval(a,b)"],
)
def test_spaces_that_cannot_be_drawn_from_are_refused(word: str) -> None:
    with refused(ConfigError, "lr"):
        draw_points([word], 2, 0)


def test_a_point_depends_on_the_seed_and_its_number_alone() -> None:
    points = draw_points(SPACE, 20, 0)
    assert draw_points(SPACE, 5, 0) == points[:5]
    assert draw_points(SPACE, 20, 1) != points
    with_more = draw_points([*SPACE, "more=interval(0,1)"], 20, 0)
    assert [point[:-1] for point in with_more] == points
    assert draw_points(SPACE[::-1], 20, 0) == [point[::-1] for point in points]


def test_values_are_of_their_kind_and_reach_all_of_the_space() -> None:
    points = [dict(word.split("=") for word in point) for point in draw_points(SPACE, 200, 0)]
    rates = [float(point["lr"]) for point in points]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert 60 < sum(rate < 10**-2.5 for rate in rates) < 140  # a decade is as likely as another
    assert {point["width"] for point in points} == {"16", "17", "18", "19", "20"}
    assert {point["model"] for point in points} == {"mlp", "cnn"}
    assert {point["fixed"] for point in points} == {"1"}


def test_each_point_is_trained_with_all_seeds() -> None:
    jobs = combinations_of(["lr=interval(0,1)", "seed=range(3)", "sweep=random", "sweep.trials=2"])
    assert len(jobs) == 6
    assert len({job[0] for job in jobs}) == 2
    assert [job[1] for job in jobs] == ["seed=0", "seed=1", "seed=2"] * 2


def test_a_space_of_many_settings_is_checked_one_value_at_a_time() -> None:
    words = [f"s{number}=1,2,3,4" for number in range(30)]
    checked = words_to_check([*words, "sweep=random", "sweep.trials=1"])
    assert len(checked) == 1 + 30 * 3
    assert {len(job) for job in checked} == {30}


def test_both_ends_and_all_choices_are_checked() -> None:
    checked = words_to_check([*SPACE, "sweep=random", "sweep.trials=1"])
    assert {word for job in checked for word in job} == {
        "lr=0.0001", "lr=0.1", "width=16", "width=20", "model=mlp", "model=cnn", "fixed=1",
    }  # fmt: skip
