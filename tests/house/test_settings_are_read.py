"""Every setting of the schema is read by some code outside `config/`."""

from __future__ import annotations

import ast
from pathlib import Path

import trainrun
from trainrun.config.schema import settings

PACKAGE = Path(trainrun.__file__).parent


def names_that_are_read(package: Path) -> set[str]:
    """Attributes and texts of all code that is no part of `config/`."""
    found = set()
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(node.value.replace(".", " ").split())
    return found


def test_every_setting_is_read_by_some_code():
    read = names_that_are_read(PACKAGE)
    assert [key for key in settings() if key.rpartition(".")[2] not in read] == []


def test_a_name_that_no_code_uses_is_seen(tmp_path: Path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "schema.py").write_text("x = trainer.unread_setting\n")
    (tmp_path / "loop.py").write_text("x = trainer.max_steps\nwords = ('shuffle', 'trainer.seen')\n")
    assert {"max_steps", "shuffle", "seen"} <= names_that_are_read(tmp_path)
    assert "unread_setting" not in names_that_are_read(tmp_path)
