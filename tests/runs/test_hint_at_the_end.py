"""One line at the end on what took long."""

from __future__ import annotations

import pytest

from trainrun.summary.at_end import hint

FINE = {"start-up": 50.0, "plots": 30.0, "forward": 40.0, "backward": 50.0, "data": 5.0, "validation": 5.0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ""),
        ({"data": 30.0}, "waiting for data took 24 % after start-up; what could be won is measured by: "
                              "trainrun autotune model=mlp 'data.path=a b'"),
        ({"data": 30.0, "validation": 31.0}, "validation took 21 % after"),
        ({"data": 30.0, "device": 25.0}, ""),  # a GPU worked meanwhile
        ({"logging": 20.0}, "logging took 17 % after"),
        ({"checkpoint": 20.0}, "saving checkpoints took 17 % after"),
    ],
)  # fmt: skip
def test_one_hint_where_something_takes_over_a_tenth(change, expected):
    line = hint(FINE | change, ["model=mlp", "hydra.run.dir=x", "data.path=a b", "run_name=me"])
    assert line.startswith(expected) if expected else line == ""
    assert "hydra" not in line
