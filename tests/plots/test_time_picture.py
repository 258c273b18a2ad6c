"""The stack of where the time went."""

from __future__ import annotations

from typing import Any

import pytest

from trainrun.plots.history import read_history
from trainrun.plots.time_stack import StackBlock, blocks_of, ledger_picture, merged


def row(**seconds: float) -> dict[str, Any]:
    return {"kind": "ledger", "seconds": {name.replace("_", "-"): value for name, value in seconds.items()}}


def test_blocks_are_differences_and_a_resume_counts_anew() -> None:
    rows = [row(start_up=2.0), row(start_up=2.0, data=1.0, forward=3.0), row(start_up=1.0), row(start_up=1.0)]
    assert blocks_of(rows) == [
        StackBlock(0.0, 2.0, {"start-up": 2.0}),
        StackBlock(2.0, 4.0, {"start-up": 0.0, "data": 1.0, "forward": 3.0}),
        StackBlock(6.0, 1.0, {"start-up": 1.0}),
    ]


def test_merging_keeps_every_second() -> None:
    blocks = [StackBlock(float(i), 1.0, {"data" if i % 2 else "forward": 1.0}) for i in range(7)]
    joined = merged(blocks, most=3)
    assert [(block.start, block.width) for block in joined] == [(0.0, 3.0), (3.0, 3.0), (6.0, 1.0)]
    assert sum(sum(block.seconds.values()) for block in joined) == pytest.approx(7.0)
    assert joined[0].seconds == {"forward": 2.0, "data": 1.0}


def test_the_picture_names_what_is_large(make_run: Any, tmp_path: Any) -> None:
    picture = ledger_picture(read_history(make_run(tmp_path / "run")), "title")
    assert picture is not None
    (ax,) = picture.axes
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["forward 60.0 % (3.0 s)", "start-up 40.0 % (2.0 s)"]
    assert ax.get_ylim() == (0, 100)
    assert max(max(shape.get_data().values) for shape in ax.patches) == pytest.approx(100)
