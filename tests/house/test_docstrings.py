"""A docstring begins with what its function does or its object is, as PEP 257 has it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def without_a_subject(root: Path) -> list[str]:
    """Docstrings whose first line begins with "Of ", as `file:line`."""
    found = []
    for path in sorted(item for folder in ("trainrun", "scripts") for item in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                told = ast.get_docstring(node)
                if told is not None and told.startswith("Of "):
                    found.append(f"{path.relative_to(root)}:{node.body[0].lineno}")
    return found


def test_no_docstring_begins_with_of():
    assert without_a_subject(ROOT) == [], "say what it does or is, as a whole phrase"


def test_the_check_sees_every_kind_of_docstring(tmp_path: Path):
    (tmp_path / "scripts").mkdir()
    text = '"""Of a file."""\n\n\nclass A:\n    """Of a run."""\n\n    def f(self):\n        """Often."""\n\n'
    text += '    async def g(self):\n        """\n        Of a batch.\n        """\n'
    (tmp_path / "scripts" / "a.py").write_text(text)
    assert without_a_subject(tmp_path) == [f"scripts/a.py:{line}" for line in (1, 5, 11)]
