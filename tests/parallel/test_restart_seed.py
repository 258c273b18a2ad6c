"""torchrun starts the ranks anew: the run goes on as itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.cli import main as cli
from trainrun.config.saved_config import load_config
from trainrun.runs import run as runner
from trainrun.runs.run_folder import RunDir

pytestmark = pytest.mark.train


def test_a_seed_that_was_drawn_is_kept(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["seed=null", "trainer.max_steps=2", "monitor=none", "hydra.run.dir=run"]
    assert cli.main(words) == 0
    run = RunDir(workdir / "run")
    drawn = load_config(run.config, []).seed
    assert drawn is not None
    monkeypatch.setattr(cli, "earlier_life", lambda: run)
    seen = []
    monkeypatch.setattr(runner, "execute", lambda run, config, order: seen.append(config.seed) or 0)
    assert cli.train_one(words, []) == 0
    assert seen == [drawn]
