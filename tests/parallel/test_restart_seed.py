"""torchrun starts the ranks anew: the run goes on as itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.cli import train_command
from trainrun.cli.main import main
from trainrun.config.compose import prepare_command_line
from trainrun.config.saved_config import load_config
from trainrun.folder.run_folder import RunDir, read_json, write_json
from trainrun.runs import run as runner
from trainrun.runs import torchrun

pytestmark = pytest.mark.train
RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
WORDS = ["trainer.max_steps=2", "monitor=none"]


def test_a_seed_that_was_drawn_is_kept(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["seed=null", *WORDS]
    assert main([*words, "output_dir=run"]) == 0
    run = RunDir(workdir / "run")
    drawn = load_config(run.config, []).seed
    assert drawn is not None
    write_json(run.status, read_json(run.status) | {"state": "running"})
    for name, value in (RANK | {"TORCHELASTIC_RESTART_COUNT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "find_earlier_folder", lambda: str(run.root))
    seen = []
    monkeypatch.setattr(
        runner,
        "train_in_ranks",
        lambda run, config, order: seen.append((run, config.seed, order.resume)) or 0,
    )
    assert train_command.train_single_run(words, [], *prepare_command_line(words, workdir)) == 0
    assert seen == [(run, drawn, True)]


def test_no_folder_of_another_job_is_believed(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank died at its start, and an earlier job had the same name."""
    assert main([*WORDS, "output_dir=first"]) == 0
    note = workdir / "outputs" / ".elastic" / "job"
    note.parent.mkdir(parents=True)
    note.write_text(str(workdir / "first"))
    before = (workdir / "first" / "config.yaml").read_bytes()
    for name, value in {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    assert main([*WORDS, "seed=5", "output_dir=second"]) == 0
    assert (workdir / "first" / "config.yaml").read_bytes() == before
    assert (workdir / "second" / "checkpoints").is_dir()
