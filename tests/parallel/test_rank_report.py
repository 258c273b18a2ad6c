"""A rank that cannot even write down why it fails still ends with its code and says the reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainrun.errors import EXIT_FAILED, SaveError
from trainrun.folder.run_folder import RunDir
from trainrun.parallel import rank_place as rank
from trainrun.runtime.signals import StopFlag


def test_a_full_disk_hides_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*rest: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work() -> int:
        raise SaveError("checkpoint step-00000004: no space")

    monkeypatch.setattr(rank, "write_json", full)
    assert rank.run_rank(RunDir(tmp_path), 1, work, StopFlag()) == EXIT_FAILED
    assert capsys.readouterr().err == "rank 1: checkpoint step-00000004: no space\n"
