"""A finished run stays as it is also where torchrun starts its ranks again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from faults.forks import ForkedCommand

from trainrun.cli.main import main as cli

pytestmark = pytest.mark.process

WORDS = ["trainer.max_steps=1", "monitor=none", "output_dir=run"]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def test_every_rank_of_a_finished_run_ends_at_once(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(WORDS) == 0
    files = {path: path.stat().st_mtime_ns for path in (workdir / "run").rglob("*") if path.name != ".lock"}
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "LOCAL_RANK": "0"}
    other = ForkedCommand(*WORDS, env=env | {"RANK": "1"})
    for name, value in (env | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    try:
        assert cli(WORDS) == 0
        said = other.communicate()
        assert other.returncode == 0, said
    finally:
        other.kill()
        other.communicate()
    assert "finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in files} == files
