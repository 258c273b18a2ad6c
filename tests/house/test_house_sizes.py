"""Functions have at most 80 lines; a longer one is listed with its reason. The top level of the project is short."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FUNCTION_LINES = 80

# "folder/file.py:function" -> why it is better long than split
ALLOWED: dict[str, str] = {}


def too_long(root: Path) -> dict[str, int]:
    found = {}
    for path in sorted(item for folder in ("trainrun", "scripts") for item in (root / folder).rglob("*.py")):
        name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found[f"{name}:{node.name}"] = lines
    return found


def test_nothing_is_too_long_without_a_reason():
    long = {name: lines for name, lines in too_long(ROOT).items() if name not in ALLOWED}
    assert not long, "split it, or give the reason in ALLOWED: " + ", ".join(
        f"{k} ({v} lines)" for k, v in long.items()
    )


def test_the_measure_sees_what_is_too_long(tmp_path: Path):
    (tmp_path / "trainrun").mkdir()
    (tmp_path / "trainrun" / "a.py").write_text("x = 0\n" * 239 + "def f():\n" + "    y = 0\n" * 80)
    assert too_long(tmp_path) == {"trainrun/a.py:f": 81}


@pytest.mark.process
@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a checkout")
def test_the_top_level_holds_what_belongs_there() -> None:
    told = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip(told.stderr)  # of another user's checkout, for instance
    names = {line.partition("/")[0] for line in told.stdout.splitlines()}
    assert {name for name in names if name[:1] != "."} == {
        "CHANGELOG.md", "LICENSE", "README.md", "conf", "mkdocs.yml", "pyproject.toml", "scripts", "tests", "trainrun",
    }  # fmt: skip
