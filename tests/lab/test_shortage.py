"""What is left out of a diagnosis where steps are long."""

import pytest

from trainrun.lab.shortage import affordable, times_larger

NAMES = ["cached", "silent", "without_update", "cached+silent", "cached+forward_only", "saving", "threads=2"]


def test_nothing_is_left_out_where_there_is_time() -> None:
    assert affordable(NAMES, {"cached", "silent"}, 0.3, 2 * 12 * 0.3, 2) == NAMES


def test_what_tells_least_goes_first_and_what_the_ledger_told_before_that() -> None:
    assert affordable(NAMES, {"silent"}, 1.0, 2 * 9, 2) == [
        "cached", "saving", "threads=2", "without_update", "cached+silent"
    ]  # fmt: skip
    assert affordable(NAMES, {"silent"}, 1.0, 12, 2) == ["cached", "saving", "threads=2"]
    assert affordable(NAMES, {"cached", "silent"}, 1.0, 0.0, 2) == ["saving"]


@pytest.mark.parametrize(
    ("batch_size", "step_seconds", "peak_bytes", "times"),
    [
        (1, 0.005, 10**6, 8),
        (8, 0.03, 10**6, 8),
        (8, 0.3, 10**6, 2),
        (9, 0.005, 10**6, 2),
        (1, 0.005, 10**9, 2),
    ],
)
def test_a_tiny_batch_is_compared_with_a_far_larger_one_where_that_is_quick(
    batch_size: int, step_seconds: float, peak_bytes: int, times: int
) -> None:
    assert times_larger(batch_size, step_seconds, peak_bytes, memory_bytes=10**10) == times
