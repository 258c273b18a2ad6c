"""A run that goes on with another number of ranks computes what it would have computed with the same number."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.monitor.metric_rows import read_metric_rows

pytestmark = pytest.mark.process

WORDS = ["precision=64-true", "parallel.accelerator=cpu", "seed=1",
         "monitor.log_every_n_steps=1", "monitor.plots=false"]  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    rows = read_metric_rows(RunDir(folder).metrics)
    return {row["step"]: row["train/loss"] for row in rows if row.get("kind") == "train"}


def test_the_global_batch_is_kept_from_two_ranks_to_one(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = ["parallel=ddp", "parallel.devices=2"]
    assert main([*WORDS, "data.batch_size=64", "trainer.max_steps=4", "output_dir=whole"]) == 0
    assert main([*WORDS, *two, "trainer.max_steps=2", "output_dir=parts"]) == 0
    one = ["parallel=single", "parallel.devices=1"]
    assert main(["resume", "parts", *one, "trainer.max_steps=3"]) == 0
    assert "the global batch stays 64" in capsys.readouterr().out
    assert main(["resume", "parts", "trainer.max_steps=4"]) == 0  # the batch is still that of two ranks
    assert read_identity(RunDir(workdir / "parts"))["batch"]["global_batch"] == 64
    assert losses(workdir / "parts") == pytest.approx(losses(workdir / "whole"), rel=1e-12)
    assert set(losses(workdir / "parts")) == {1, 2, 3, 4}
