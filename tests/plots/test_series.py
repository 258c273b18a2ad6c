"""Averages and thinning keep what a person must see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.plots.series import (
    Series,
    moving_average,
    names_in,
    series_of,
    thinned,
    window_steps,
)


def series(*values: float) -> Series:
    return Series(np.arange(1.0, len(values) + 1), np.array(values, dtype=np.float64))


def test_a_column_is_sorted_by_step_and_rows_without_it_are_left_out() -> None:
    rows = [{"step": 4, "a": 4}, {"step": 2, "a": 2.0}, {"step": 3, "b": 1}, {"step": 5, "a": "text"}]
    found = series_of(rows, "a")
    assert found.steps.tolist() == [2, 4]
    assert found.values.tolist() == [2, 4]
    assert len(series_of(rows, "missing")) == 0
    assert names_in(rows) == ["step", "a", "b"]


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e3, 1e3), st.sampled_from([np.nan, np.inf])), max_size=30),
    st.integers(1, 9),
)
def test_moving_average_is_the_mean_of_the_finite_neighbours(values: list[float], window: int) -> None:
    means = moving_average(series(*values), window).values
    width = min(window, len(values))
    for i, value in enumerate(values):
        first = i - width // 2
        near = [other for other in values[max(0, first) : first + width] if np.isfinite(other)]
        if np.isfinite(value):
            assert means[i] == pytest.approx(np.mean(near), abs=1e-9)
        else:
            assert not np.isfinite(means[i])


def test_a_spike_does_not_spoil_the_means_behind_it() -> None:
    means = moving_average(series(0.1, 1e30, 0.1, 0.1, 0.1, 0.1), 2).values
    assert means[-1] == pytest.approx(0.1)


def test_a_speed_is_averaged_as_items_over_seconds() -> None:
    steps, items = np.array([10.0, 20.0, 21.0]), np.array([100.0, 100.0, 10.0])
    step_seconds = Series(steps, np.array([0.1, 0.1, 9.0]))
    seconds = step_seconds.values * window_steps(step_seconds)
    assert seconds.tolist() == [1.0, 1.0, 9.0]
    means = moving_average(Series(steps, items / seconds), 3, seconds)
    assert means.values[1] == pytest.approx(items.sum() / seconds.sum())


def test_thinning_keeps_extremes_ends_and_order() -> None:
    values = np.sin(np.arange(300_000) / 5000)
    values[123_456], values[200_001] = 50.0, -50.0
    values[7] = np.nan
    thin = thinned(Series(np.arange(300_000.0), values), most=2000)
    assert 1000 < len(thin) <= 2000
    assert thin.steps[thin.values.argmax()] == 123_456
    assert thin.steps[thin.values.argmin()] == 200_001
    assert (thin.steps[0], thin.steps[-1]) == (0, 299_999)
    assert (np.diff(thin.steps) > 0).all()
    assert np.isfinite(thin.values).all()
