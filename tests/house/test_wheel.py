"""The wheel holds the whole package with its `conf/`, and works from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(*build, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_every_option(wheel: Path):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "trainrun").rglob("*.py")}
    options = {f"trainrun/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    others = [
        path
        for path in (ROOT / "trainrun").rglob("*")
        if path.suffix in (".md", ".png", ".svg", ".yaml", ".js", ".css")
    ]
    pages = {str(path.relative_to(ROOT)) for path in others}
    assert names == modules | options | pages | {"trainrun/data/readers/builtin/digits.npz"}
    assert {"trainrun/manual/data.md", "trainrun/manual/pictures/loss.png"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_an_installed_wheel_works_from_an_unrelated_folder(wheel: Path, tmp_path: Path):
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", str(target), str(wheel), cwd=elsewhere)
    path = str(target)
    where = run(sys.executable, "-c", "import trainrun.config.argv as c; print(c.find_conf_dir())",
                cwd=elsewhere, PYTHONPATH=path)  # fmt: skip
    assert Path(where.strip()) == target / "trainrun" / "conf"
    assert "fashion_mnist" in run(sys.executable, "-m", "trainrun", "--help", cwd=elsewhere, PYTHONPATH=path)
    words = ("--cfg", "job", "model=cnn", "optimizer.lr=0.25")
    composed = run(sys.executable, "-m", "trainrun", *words, cwd=elsewhere, PYTHONPATH=path)
    assert "lr: 0.25" in composed
    assert "trainrun.model.cnn.Cnn" in composed
