"""Rooms that one person can hold: few files in a folder, each named in its README, and no name twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from re import findall

import pytest

PACKAGE = Path(__file__).parents[2] / "trainrun"
MOST_FILES, MOST_README_LINES = 12, 20
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE})

# Still too many files; smaller each time, then out of this table.
CROWDED: dict[str, int] = {}
# Two options of two groups that mirror each other.
MIRRORS = {"vae", "Vae"}


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_a_folder_has_few_files_and_a_readme_that_names_each(folder: Path):
    files, name = files_in(folder), str(folder.relative_to(PACKAGE))
    if not files:
        return  # a folder of folders
    assert len(files) <= CROWDED.get(name, MOST_FILES)
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_README_LINES
    named = findall(r"`([\w*]+\.py)`", text)
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in named)] == []
    assert [pattern for pattern in named if not any(fnmatch(file, pattern) for file in files)] == []


def test_no_folder_is_called_crowded_that_is_not():
    crowded = {str(folder.relative_to(PACKAGE)): len(files_in(folder)) for folder in FOLDERS}
    assert {name: count for name, count in crowded.items() if count > MOST_FILES} == CROWDED


def test_no_two_modules_have_one_name():
    modules = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in ("__init__", "__main__"):
            modules[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1 and name not in MIRRORS} == {}


def test_no_two_classes_have_one_name():
    classes = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in classes.items() if len(paths) > 1 and name not in MIRRORS} == {}
