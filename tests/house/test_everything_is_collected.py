"""Every file of tests is collected (pytest passes over folders of certain names, `build` among them), in its lane."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
from lanes import LANE_OF, LANES, PROCESS, TRAIN, UNIT, Watch

TESTS = Path(__file__).parents[1]


def skipped(root: Path, patterns: list[str]) -> list[Path]:
    """The files of tests below `root` that lie in a folder whose name fits one of `patterns`."""
    files = (path.relative_to(root) for path in root.rglob("test_*.py"))
    return sorted(
        file for file in files if any(fnmatch(part, name) for part in file.parts[:-1] for name in patterns)
    )


def test_no_file_of_tests_lies_in_a_folder_that_pytest_skips(pytestconfig: pytest.Config) -> None:
    assert skipped(TESTS, pytestconfig.getini("norecursedirs")) == []


def test_a_skipped_folder_is_found(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "room" / "build").mkdir(parents=True)
    (tmp_path / "room" / "build" / "test_it.py").touch()
    assert skipped(tmp_path, pytestconfig.getini("norecursedirs")) == [Path("room/build/test_it.py")]


def test_every_folder_of_the_lanes_is_there(pytestconfig: pytest.Config) -> None:
    assert [folder for folder in LANE_OF if not (TESTS / folder).is_dir()] == []
    assert {*LANES} <= {line.partition(":")[0] for line in pytestconfig.getini("markers")}


@pytest.mark.parametrize(
    ("lane", "reason"), [(UNIT, "starts a process"), (TRAIN, "starts a process"), (PROCESS, "")]
)
def test_a_process_belongs_to_its_lane(lane: str, reason: str) -> None:
    watch = Watch()

    def start(name: str) -> None:
        with watch.of_lane(lane):
            watch.note_calls(lambda words: None)([name])

    start("git")
    if not reason:
        start("bash")
        return
    with pytest.raises(pytest.fail.Exception, match=reason):
        start("bash")


def test_a_unit_does_not_train() -> None:
    watch = Watch()
    with pytest.raises(pytest.fail.Exception, match="trains"), watch.of_lane(UNIT):
        watch.trainings += 1
