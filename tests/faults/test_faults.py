"""The harness in small: runs are broken on purpose and lose nothing; with a defect planted they do, and it is seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from faults import judges
from faults.judges import Tally
from faults.plan import Case
from faults.referee import Outcome, Referee

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills and forks as Linux has them")


def faults(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of `scripts/faults.py`."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "faults.py"), *words, "--judges=1", f"--folder={folder}"],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONWARNINGS": "default"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "suites",
    [
        ["F1", "F3", "F7", "F8", "F9", "F10", "F16", "F24", "--size=0.0025"],
        ["F4", "F17", "F19", "--size=0.03"],
    ],
    ids=["single", "ranks"],
)
def test_no_run_is_lost_and_none_has_other_bits(tmp_path: Path, suites: list[str]) -> None:
    code, output = faults(tmp_path, *suites)
    assert code == 0, output
    last = output.splitlines()[-1]
    told = re.fullmatch(r"all +\d+ +(\d+) +0 +0 +0 +0 +\d+  seed 1", last)
    assert told is not None, output
    assert int(told[1]) >= 4


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, for suites that take no time."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = spec_from_file_location("faults_script", ROOT / "scripts" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_suite_that_breaks_down_is_told_and_stops_no_other(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(folder: Path, rng: object, size: float, tally: Tally) -> None:
        tally.cases = 7
        raise OSError("no room")

    def is_fine(folder: Path, rng: object, size: float, tally: Tally) -> None:
        tally.cases = 35

    monkeypatch.setattr(script, "OWN", {"F6": ("one", breaks), "F21": ("other", is_fine)})
    monkeypatch.setattr(sys, "argv", ["faults.py", "F6", "F21", f"--folder={tmp_path}", "--seed=3"])
    assert script.main() == 1
    said = capsys.readouterr().out
    assert "failed: F6 F6\n    the suite itself: OSError: no room" in said
    assert re.search(r"^F21 +35 .* other$", said, re.MULTILINE)
    assert re.fullmatch(r"all +42 +0 +0 +0 +0 +1 +0  seed 3", said.splitlines()[-1])


def test_what_a_judge_leaves_that_dies_or_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plays:
        def reference(self, name: str) -> None: ...

        def play(self, case: Case) -> Outcome:
            if case.subject == "dies":
                os._exit(3)
            if case.subject == "hangs":
                time.sleep(60)
            return Outcome(case, struck=1)

    monkeypatch.setattr(judges, "HUNG_SECONDS", 5.0)
    monkeypatch.setattr(judges, "TICK_SECONDS", 0.1)
    tally = Tally("F0", "")
    cases = [Case(name, ()) for name in ("a", "b", "dies", "hangs", "c", "d")]  # every other one to each
    judges.judge(cast(Referee, Plays()), cases, 2, tally.add)
    assert (tally.cases, tally.faults, tally.lost) == (6, 2, 4)
    assert sorted(tally.failed) == [
        ("c", "not played: its judge died before"),
        ("d", "not played: its judge said nothing for 5 s before"),
        ("dies", "its judge died"),
        ("hangs", "its judge said nothing for 5 s"),
    ]


def test_some_planted_defects_are_found(tmp_path: Path) -> None:
    code, output = faults(tmp_path, "--controls", "--size=0")
    assert code == 0, output
    assert "MISSED" not in output
    assert len(re.findall(r"^found ", output, re.MULTILINE)) == 7
