"""A resume in the middle of an epoch whose order was made otherwise by the version that saved it."""

from __future__ import annotations

from pathlib import Path

import pytest
from approved import approve_error
from quiet_runs import QUIET

import trainrun as package
from trainrun.cli.main import main

SHORT = [*QUIET, "trainer.limit_val_batches=1"]


def test_an_order_that_changed_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as before:
        before.setattr("trainrun.training.components.ORDER", 1)
        package.train("trainer.max_steps=2", "output_dir=run", *SHORT)
    with monkeypatch.context() as large:
        large.setattr("trainrun.training.recovery.restore.LISTED", 1000)  # digits has 1,437 samples
        assert main(["resume", "run", "trainer.max_steps=3"]) == 2
        approve_error(capsys.readouterr().err)
    assert main(["resume", "run", "trainer.max_steps=3"]) == 0
