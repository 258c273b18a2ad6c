"""What compiling cost, and which graphs came from the cache of inductor, which lies where restarts find it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from things import LateModule

from trainrun.assemble.backends import set_compile_cache
from trainrun.transform.compile_log import CompileLog

dynamo = LateModule("torch._dynamo.utils")
HIT, MISS = ("inductor", "fxgraph_cache_hit"), ("inductor", "fxgraph_cache_miss")


@pytest.mark.parametrize(
    ("changes", "is_cached"), [([HIT], True), ([MISS], False), ([HIT, MISS], False), ([], False)]
)
def test_a_graph_is_from_the_cache_if_no_part_of_it_was_compiled(
    changes: list[tuple[str, str]], is_cached: bool, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    log = CompileLog(lines.append, nullcontext)
    counters = dynamo.counters
    counters["inductor"][HIT[1]] += 3  # of graphs before
    log.begin()
    for group, name in changes:
        counters[group][name] += 1
    log.end("graph 1", again=False)
    assert log.summary()["graphs_from_cache"] == is_cached
    assert ("from the cache" in lines[0]) == is_cached


def test_compiled_code_outlives_the_machines_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    set_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    set_compile_cache()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == tmp_path / "trainrun/compiled"
