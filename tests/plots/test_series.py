"""Averages and thinning keep what a person must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.plots.series import (
    Series,
    column_names,
    column_series,
    exponential_mean,
    moving_average,
    thin_curve,
)


def series(*values: float) -> Series:
    return Series(np.arange(1.0, len(values) + 1), np.array(values, dtype=np.float64))


def test_a_column_is_sorted_by_step_and_rows_without_it_are_left_out() -> None:
    rows = [{"step": 4, "a": 4}, {"step": 2, "a": 2.0}, {"step": 3, "b": 1}, {"step": 5, "a": "text"}]
    found = column_series(rows, "a")
    assert found.steps.tolist() == [2, 4]
    assert found.values.tolist() == [2, 4]
    assert len(column_series(rows, "missing")) == 0
    assert column_names(rows) == ["step", "a", "b"]


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e3, 1e3), st.sampled_from([np.nan, np.inf])), max_size=30),
    st.integers(1, 9),
)
def test_mean_is_of_the_finite_values_up_to_the_point(values: list[float], window: int) -> None:
    means = exponential_mean(series(*values), window).values
    for i, value in enumerate(values):
        last = [other for other in values[max(0, i - window + 1) : i + 1] if np.isfinite(other)]
        if np.isfinite(value):
            assert min(last) - 1e-9 <= means[i] <= max(last) + 1e-9
        else:
            assert not np.isfinite(means[i])


def test_mean_does_not_know_what_comes() -> None:
    values = np.random.default_rng(0).normal(size=300)
    whole = exponential_mean(series(*values), 20).values
    part = exponential_mean(series(*values[:250]), 20).values
    assert whole[:250] == pytest.approx(part, abs=1e-12)
    assert whole[0] == values[0]


def noisy(count: int, seed: int = 0) -> Series:
    steps = np.arange(1.0, count + 1)
    return Series(steps, 2.0 / steps + np.random.default_rng(seed).uniform(0.01, 0.02, count))


def test_few_values_are_shown_as_they_are() -> None:
    assert moving_average(noisy(199), 20) is None
    assert moving_average(noisy(200), 20) is not None


@pytest.mark.parametrize(
    "curve",
    [
        lambda x: 0.5 * (1 + np.cos(np.pi * x)), lambda x: 1 - x, lambda x: 0.1 ** np.floor(4 * x),
        lambda x: np.minimum(10 * x, 1 - x), lambda x: 0.99 ** (1000 * x), np.ones_like, lambda x: (5 * x) % 1,
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [200, 1000, 5000])
def test_schedules_are_never_averaged(curve: Callable[[Any], Any], count: int) -> None:
    x = np.arange(count) / count
    assert moving_average(Series(np.arange(count), curve(x)), 20) is None


def test_spike_hides_nothing_on_a_logarithmic_axis() -> None:
    curve = noisy(400)
    curve.values[100] = 1e8
    mean = moving_average(curve, 20, log=True)
    assert mean is not None
    assert mean.values[105] < 10
    assert mean.values[125] < 0.1


def test_thinning_keeps_extremes_ends_and_order() -> None:
    values = np.sin(np.arange(300_000) / 5000)
    values[123_456], values[200_001] = 50.0, -50.0
    values[7] = np.nan
    thin = thin_curve(Series(np.arange(300_000.0), values))
    assert 1000 < len(thin) <= 2000
    assert thin.steps[thin.values.argmax()] == 123_456
    assert thin.steps[thin.values.argmin()] == 200_001
    assert (thin.steps[0], thin.steps[-1]) == (0, 299_999)
    assert (np.diff(thin.steps) > 0).all()
    assert np.isfinite(thin.values).all()
