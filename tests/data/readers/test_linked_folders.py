"""Folders that links lead to: each is read once, and a link to a folder above is no loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from trainrun.data.readers.paths import list_files
from trainrun.data.readers.pictures import image_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("data/0.csv", "data/a/1.csv", "data/b/[c]/2.csv", "data/.hidden/3.csv", "outside/4.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    root = tmp_path / "data"
    for link, target in (("a/up", ".."), ("a/top", "../.."), ("b/all", root), ("b/self", "."), ("a/b", "../b"),
                         ("linked", tmp_path / "outside"), ("nowhere", "nothing")):  # fmt: skip
        (root / link).symlink_to(target, target_is_directory=True)
    return root


@pytest.mark.parametrize("pattern", ["", "**/*.csv", "**/**/*.csv", "../d*/**"])
def test_each_folder_is_read_once(root: Path, pattern: str) -> None:
    found = list_files(str(root / pattern), "data.path", [".csv"])
    names = [file.resolve().relative_to(root.parent).as_posix() for file in found if file.suffix == ".csv"]
    assert names == ["data/0.csv", "data/a/1.csv", "data/b/[c]/2.csv", "outside/4.csv"]


def test_a_link_to_a_folder_above_is_neither_class_nor_pictures(tmp_path: Path) -> None:
    for name in ("cats/1.png", "cats/young/2.png", "dogs/3.png"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / "p" / name)
    for link, target in (("all", "."), ("up", ".."), ("cats/young/up", ".."), ("dogs/top", "../..")):
        (tmp_path / "p" / link).symlink_to(target, target_is_directory=True)
    data = image_folder.load(str(tmp_path / "p"), val_fraction=0.0, shape=[1, 2, 2])["train"]
    assert data is not None
    assert list(data.class_names) == ["cats", "dogs"]
    files = [Path(data.sample_file(i)).relative_to(tmp_path / "p").as_posix() for i in range(len(data))]
    assert files == ["cats/1.png", "cats/young/2.png", "dogs/3.png"]
