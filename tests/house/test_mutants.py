"""The table of planted mistakes: each can be planted, and its tests exist; a kill is noticed, and a survivor too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import mutants  # noqa: E402


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_mistake_can_be_planted_and_its_tests_exist(mutant: mutants.Mutant) -> None:
    assert mutant.old in mutants.find_file(mutant, ROOT).read_text(encoding="utf-8")
    assert mutant.old != mutant.new
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        if name:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test


@pytest.mark.process
@pytest.mark.parametrize(("new", "survives"), [("x - y", False), ("y + x", True)])
def test_survivor_is_told_from_a_mistake_that_is_noticed(tmp_path: Path, new: str, survives: bool) -> None:
    (tmp_path / "sums.py").write_text("def add(x, y):\n    return x + y\n")
    (tmp_path / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    mutant = mutants.Mutant("sum", "sums.py", "x + y", new, ("test_sums.py",))
    assert mutants.survives(mutant, tmp_path) is survives
    assert (tmp_path / "sums.py").read_text().endswith("return x + y\n")
    with pytest.raises(RuntimeError, match="0 times"):
        mutants.survives(mutant._replace(old="x * y"), tmp_path)
