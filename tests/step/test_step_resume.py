"""A run whose steps are one graph: stopped anywhere, it goes on bit for bit; the summary says what compiling cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_resume import WORDS, facts_of, own, same, stop_at

from trainrun.cli.main import main

__all__ = ["own"]  # the fixture


@pytest.mark.process
@pytest.mark.parametrize(
    ("step", "backend"), [(1, "eager"), (4, "eager"), pytest.param(8, "inductor", marks=pytest.mark.slow)]
)
def test_a_run_stopped_anywhere_ends_with_the_same_bits(own: Path, step: int, backend: str) -> None:
    words = [*WORDS, "trainer.compile=step", f"trainer.compile.backend={backend}"]
    assert main([*words, *stop_at(-1, "SIGINT"), "output_dir=whole"]) == 0
    assert main([*words, *stop_at(step, "SIGINT"), "output_dir=stopped"]) == 130
    assert main(["resume", "stopped"]) == 0
    whole, resumed = facts_of(own / "whole"), facts_of(own / "stopped")
    same(whole[0], resumed[0])
    assert whole[1] == resumed[1]
    status = json.loads((own / "whole" / "status.json").read_text())
    assert status["compiled_graphs"] >= 1
    assert status["compile_seconds"] > 0
