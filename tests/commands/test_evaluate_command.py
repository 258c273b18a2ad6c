"""What `trainrun evaluate` says where it cannot write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainrun.cli import main
from trainrun.commands import evaluate


def test_metrics_are_said_where_the_folder_takes_no_file(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer.max_steps=2", "monitor=none", "hydra.run.dir=run"]) == 0

    def refused(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(evaluate, "write_json", refused)
    assert main(["evaluate", "run"]) == 0
    told = capsys.readouterr()
    assert "val/acc" in told.out
    assert "not written (Read-only file system)" in told.err
