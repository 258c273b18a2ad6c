"""The stack of where the time went."""

from __future__ import annotations

from typing import Any

import pytest

from trainrun.plots.history import read_history
from trainrun.plots.time_stack import draw_phase_shares, phase_seconds_by_block
from trainrun.timing.phases import ACCOUNTS


def row(**seconds: float) -> dict[str, Any]:
    return {"kind": "ledger", "seconds": {name.replace("_", "-"): value for name, value in seconds.items()}}


def test_blocks_are_differences_and_a_resume_counts_anew() -> None:
    rows = [row(start_up=2.0), row(start_up=2.0, data=1.0, forward=3.0), row(start_up=1.0), row(start_up=1.0)]
    assert phase_seconds_by_block(rows)[:, [0, 1, 3]].tolist() == [
        [2.0, 0.0, 0.0],
        [0.0, 1.0, 3.0],
        [1.0, 0.0, 0.0],
    ]
    assert phase_seconds_by_block([]).shape == (0, len(ACCOUNTS))


def test_the_picture_names_what_is_large(make_run: Any, tmp_path: Any) -> None:
    picture = draw_phase_shares(read_history(make_run(tmp_path / "run")))
    assert picture is not None
    (ax,) = picture.axes
    legend = [text.get_text() for text in picture.legends[0].get_texts()]
    assert legend == ["forward 60.0 % (3.0 s)", "start-up 40.0 % (2.0 s)"]
    assert ax.get_ylim() == (0, 100)
    assert max(max(shape.get_data().values) for shape in ax.patches) == pytest.approx(100)
