"""The races of `scripts/bench_race.py` are of settings that compose; none is run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from trainrun.race.race_command import race_parser
from trainrun.race.racers import Racer, read_racers

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.unit


@pytest.fixture
def bench(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import bench_race

    (workdir / "book.txt").write_text("In the beginning")
    return bench_race


def racers_of(words: list[str]) -> list[Racer]:
    typed = race_parser().parse_args(words)
    return read_racers(typed.racers, [word for several in typed.common for word in several])


@pytest.mark.parametrize("work", ["fashion", "gpt"])
def test_the_works_are_races(bench: object, work: str, workdir: Path) -> None:
    race_of = sys.modules["bench_race"].race_of
    words, until = race_of(argparse.Namespace(work=work, only=["recipe"], tuned=False, usual=False), workdir)
    racers = racers_of(words)
    assert [racer.name for racer in racers] == ["A", "B"]
    assert "data.batch_size=1" in racers[0].words
    assert until.startswith("val/")


@pytest.mark.parametrize("pair", ["threads", "ranks", "pinned", "load", "length"])
def test_the_pairs_are_races(bench: object, pair: str) -> None:
    common, until, racers = sys.modules["bench_race"].PAIRS[pair]
    assert len(racers_of([*racers, "--with", *common.split()])) == len(racers)
    assert until.startswith("val/")


def test_presets_are_raced_beside_the_usual_settings(bench: object, workdir: Path) -> None:
    race_of = sys.modules["bench_race"].race_of
    about = argparse.Namespace(work="fashion", only=None, tuned=False, usual=True)
    words, until = race_of(about, workdir)
    first, *others = racers_of(words)
    assert not any(word.startswith(("preset=", "data.batch_size")) for word in first.words)
    presets = {word for racer in others for word in racer.words if word.startswith("preset=")}
    assert presets == {"preset=fast", "preset=max-perf", "preset=memory-limited"}
    assert until == "val/acc"  # a run of the first racer fixes the target


def test_a_technique_replaces_what_the_start_has(bench: object, workdir: Path) -> None:
    race_of = sys.modules["bench_race"].race_of
    words, _ = race_of(argparse.Namespace(work="techniques", only=["batch 4"]), workdir)
    first, second = racers_of(words)
    assert [word for word in second.words if word not in first.words] == ["data.batch_size=4"]
