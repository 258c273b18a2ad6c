"""Damaged checkpoints, hostile files and bad input: the short sets of the corpora, and that each of them can fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

import trainrun.runs.resume as existing
from faults import corpus_damage, corpus_folder, corpus_hostile, corpus_inputs
from trainrun.checkpoint import load

# What the suite has time for; scripts/faults.py checks all.
DAMAGES, FOLDERS, SHARE = 75, 12, 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Also the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("corpora")
        (folder / "home").mkdir()
        patch.setenv("HOME", str(folder / "home"))
        patch.chdir(folder)
        corpus_damage.with_base(folder)  # its short run is what the others copy from
        patch.setattr(corpus_hostile, "train_base", lambda _: None)
        corpus_hostile.with_base(folder)
        corpus_folder.with_base(folder)
        yield folder


def faults_of(corpus: ModuleType, cases: list[corpus_damage.Case], place: Path) -> list[str]:
    assert cases
    return [f"{case.name}: {fault}" for case in cases if (fault := corpus.check(case, place))]


def test_a_damaged_checkpoint_is_never_loaded(place: Path) -> None:
    assert faults_of(corpus_damage, corpus_damage.cases(DAMAGES), place) == []


def test_a_damaged_run_folder_goes_on_or_says_why_not(place: Path) -> None:
    assert faults_of(corpus_folder, corpus_folder.cases(FOLDERS), place) == []


def test_every_file_of_a_run_folder_is_damaged(place: Path) -> None:
    names = {path.name for path in (place / corpus_folder.BROKEN).iterdir()}
    patterns = [*corpus_folder.FILES, "checkpoints"]
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_nothing_of_a_stranger_runs(place: Path) -> None:
    assert faults_of(corpus_hostile, corpus_hostile.cases()[::SHARE], place) == []


def test_every_attack_can_be_prepared(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / corpus_hostile.BASE, tmp_path / corpus_hostile.BASE)
    for number, case in enumerate(corpus_hostile.cases()):
        (tmp_path / str(number)).mkdir()
        case.build(tmp_path / str(number))
        assert any((tmp_path / str(number)).iterdir()), case


def test_bad_input_is_one_short_message(place: Path) -> None:
    assert faults_of(corpus_inputs, corpus_inputs.cases()[::SHARE], place) == []


def test_the_corpora_can_fail(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that compares no hashes, and a run folder that is believed."""
    with monkeypatch.context() as patch:
        patch.setattr(load, "_check_hash", lambda *_: None)
        flips = [case for case in corpus_damage.cases(60) if "flip" in case.name]
        assert faults_of(corpus_damage, flips, place)
    with monkeypatch.context() as patch:
        patch.setattr(existing, "check_seal", lambda *_: None)
        planted = [
            case
            for case in corpus_hostile.cases()
            if case.name in ("target-planted", "target-shell-of-torch")
        ]
        assert len(faults_of(corpus_hostile, planted, place)) == 2
