"""Texts for people are approved in one file, which holds those of today's tests alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import approved
import pytest
from approved import FILE, approve, approve_error, masked, read_texts, refused, write_texts

from trainrun.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]


def test_every_approved_text_is_of_a_test_that_is_there() -> None:
    sources: dict[str, str] = {}
    gone = []
    for name in read_texts():
        file, function = re.split(r"::|\[| ", name)[:2]
        if file not in sources:
            sources[file] = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
        if f"def {function}(" not in sources[file]:
            gone.append(name)
    assert gone == [], "python scripts/messages.py writes the file anew"


def test_the_file_is_as_the_script_writes_it(tmp_path: Path) -> None:
    write_texts(read_texts(), tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text(encoding="utf-8") == FILE.read_text(encoding="utf-8")


@pytest.fixture
def own_texts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, str]:
    """The approved texts of this test, and no others."""
    texts: dict[str, str] = {}
    monkeypatch.setattr(approved, "_texts", texts)
    monkeypatch.setattr(approved, "_counts", type(approved._counts)())
    monkeypatch.delenv(approved.REWRITE, raising=False)
    texts[request.node.nodeid] = "ConfigError: data.path=x: is missing\n"
    return texts


def test_another_text_class_or_key_fails(own_texts: dict[str, str]) -> None:
    (name,) = own_texts
    with refused(ConfigError, "data.path"):
        raise ConfigError("data.path=x: is missing")
    own_texts[f"{name} 2"] = own_texts[name]
    with pytest.raises(pytest.fail.Exception, match="not the approved text"), refused(ConfigError):
        raise ConfigError("data.path=x: is not there")
    with pytest.raises(DataError), refused(ConfigError):
        raise DataError("data.path=x: is missing")
    with pytest.raises(AssertionError), refused(ConfigError, "model.width"):
        raise ConfigError("data.path=x: is missing")
    with pytest.raises(pytest.fail.Exception, match="nothing"):
        approve("a text that nobody approved")


def test_folders_are_masked_and_the_message_of_a_command_is_its_own(
    own_texts: dict[str, str], workdir: Path
) -> None:
    assert masked(f"{workdir}/run: {ROOT}/conf\n") == "./run: TRAINRUN/conf\n"
    (name,) = own_texts
    own_texts[name] = "trainrun: a=1: no\n  did you mean b?\n"
    approve_error("note: read\ntrainrun: a=1: no\n  did you mean b?\n", "a=1")


@pytest.mark.process
def test_texts_stay_if_the_tests_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = FILE.read_bytes()
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    try:
        done = subprocess.run([sys.executable, ROOT / "scripts/messages.py", __file__], capture_output=True)
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert FILE.read_bytes() == before
    finally:
        FILE.write_bytes(before)
