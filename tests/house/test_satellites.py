"""A training does without the satellites: without one of their folders it goes on, and says what is missing."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainrun"

SATELLITES = (
    "plots", "summary", "benchmark", "verify", "sweep", "launch", "convert", "autotune", "sampling", "export",
    "embedding", "smaller", "watch", "live", "starter", "race",
    "prediction", "vae_health", "comparison", "mirror", "distillation",
)  # fmt: skip
COMMANDS = PACKAGE / "cli"  # each belongs to the satellite that it calls
TOLD = (
    "trainrun.plots is not installed: no pictures are drawn",
    "trainrun.summary is not installed: nothing is measured after the training",
    "trainrun.autotune is not installed: what is left open is chosen by rules alone, and no memory is forecast",
)


def imports_at_the_top(path: Path) -> list[str]:
    """The modules that a file imports when it is imported itself."""
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def test_what_trains_imports_no_satellite():
    others = [COMMANDS, *(PACKAGE / name for name in SATELLITES)]
    modules = [f"trainrun.{name}" for name in SATELLITES]
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not any(path.is_relative_to(folder) for folder in others)
        for name in imports_at_the_top(path)
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    ]
    assert wrong == []


def run_without(
    folders: tuple[str, ...], words: list[str], tmp_path: Path
) -> subprocess.CompletedProcess[str]:
    """The command, of a copy of the package without these folders."""
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    left_out = {str(PACKAGE / folder) for folder in folders}
    skip = shutil.ignore_patterns("__pycache__")

    def ignored(folder: str, names: list[str]) -> set[str]:
        return skip(folder, names) | {name for name in names if str(Path(folder, name)) in left_out}

    shutil.copytree(PACKAGE, copy / "trainrun", ignore=ignored)
    shutil.copytree(ROOT / "conf", copy / "conf")
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "trainrun", *words]
    return subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=300)


def test_without_them_a_training_goes_on_and_says_what_is_missing(tmp_path: Path):
    words = ["trainer.max_steps=5", "hydra.run.dir=run"]
    done = run_without(SATELLITES, words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended at step 5" in done.stdout
    run = tmp_path / "elsewhere" / "run"
    log = (run / "run.log").read_text()
    told = [line.removeprefix("  chosen").strip() for line in log.splitlines() if "is not installed" in line]
    assert sorted(told) == sorted(TOLD)
    assert (run / "checkpoints").is_dir()
    assert not list((run / "plots").glob("*"))


def test_a_command_whose_folder_is_missing_says_so(tmp_path: Path):
    done = run_without(("benchmark",), ["autotune"], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == (
        "trainrun: trainrun.benchmark is not installed: this command needs it; install the whole package again\n"
    )
