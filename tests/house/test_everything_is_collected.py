"""Every file of tests is collected: pytest passes over folders of certain names (`build` among them) without a word."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def skipped(root: Path, patterns: list[str]) -> list[Path]:
    """The files of tests below `root` that lie in a folder whose name fits one of `patterns`."""
    files = (path.relative_to(root) for path in root.rglob("test_*.py"))
    return sorted(
        file for file in files if any(fnmatch(part, name) for part in file.parts[:-1] for name in patterns)
    )


def test_no_file_of_tests_lies_in_a_folder_that_pytest_skips(pytestconfig: pytest.Config) -> None:
    assert skipped(TESTS, pytestconfig.getini("norecursedirs")) == []


def test_a_skipped_folder_is_found(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "room" / "build").mkdir(parents=True)
    (tmp_path / "room" / "build" / "test_it.py").touch()
    assert skipped(tmp_path, pytestconfig.getini("norecursedirs")) == [Path("room/build/test_it.py")]
