"""Another Python process finds its own modules where the working directory has one of the same name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainrun.runtime.child import module_command

pytestmark = pytest.mark.process


@pytest.mark.parametrize("first", [True, False])
def test_the_working_directory_comes_first_only_where_it_does_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    (tmp_path / "argparse.py").write_text("taken = True")
    (tmp_path / "child_of_test.py").write_text(
        "import argparse, sys\nassert __name__ == '__main__'\nprint(hasattr(argparse, 'taken'), *sys.argv[1:])"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path] if first else ["/nowhere", *sys.path])
    command = module_command("child_of_test", "a word", "-x")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(first), "a", "word", "-x"], done.stderr


def test_a_file_named_like_one_that_python_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "types.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/nowhere", *sys.path])
    assert subprocess.run(module_command("json.tool", "--help"), capture_output=True).returncode == 0
