"""`trainrun autotune` as a user types it, on a model of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from approved import approve_error

from trainrun.benchmark.tune import autotune_session
from trainrun.benchmark.worker_process import WorkerPool, WorkerProcess
from trainrun.cli.main import main as cli
from trainrun.config.schema import RunConfig

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(64, width), torch.nn.Linear(width, 10)

    def forward(self, images):
        return self.out(torch.relu(self.hidden(images.flatten(1))))
"""
SETTINGS = ["model=my_net.Net", "model.width=9", "trainer.num_threads=1", "seed=1"]


@pytest.fixture
def own(workdir: Path) -> Path:
    (workdir / "my_net.py").write_text(NET)
    return workdir


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may take longer to start than a search of seconds has."""
    start = WorkerPool.start

    def patient(pool: WorkerPool, config: RunConfig, limit: float) -> WorkerProcess:
        return start(pool, config, 300.0)

    monkeypatch.setattr(WorkerPool, "start", patient)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__", "my_net.py"}


@pytest.mark.process
@pytest.mark.usefixtures("unhurried")
def test_a_search_of_seconds_on_a_model_of_ones_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["autotune", *SETTINGS, "--budget", "6", "--allow", "training"]) == 0
    printed = capsys.readouterr()
    assert "result: " in printed.out
    (folder,) = own.glob("outputs/*/*-autotune-digits-Net-*")
    assert left_in(folder) == {"autotune.json"}
    told = json.loads((folder / "autotune.json").read_text())
    assert told["words_typed"][-3:] == SETTINGS[-3:]
    assert told["speed"] > 0
    assert told["diagnoses"]
    assert left_in(own) <= {"outputs", "conf"}
    assert (own / "conf").exists() == told["claimed"]


@pytest.mark.process
@pytest.mark.usefixtures("unhurried")
def test_a_table_of_seconds(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["autotune", "--table", *SETTINGS, "--budget=6"]) == 0
    printed = capsys.readouterr()
    assert "mixed precision (fp16)" in printed.out
    assert "needs a GPU" in printed.out
    (folder,) = own.glob("outputs/*/*-autotune-digits-Net-*")
    assert left_in(folder) == {"autotune.json"}
    rows = {row["title"]: row for row in json.loads((folder / "autotune.json").read_text())["rows"]}
    assert all((row["alone"] is None) == bool(row["trial"]["reason"]) for row in rows.values())
    assert rows["channels-last layout"]["trial"]["reason"] == "the model has no convolutions"
    assert not (own / "conf").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--allow", "all"],
        ["--budget", "1"],
        ["--name", "a/b"],
        ["data.batch_sise=3"],
        ["--fast"],
        ["loop=my_net.Net"],
    ],
)
def test_wrong_arguments_are_refused_and_leave_nothing(
    own: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert cli(["autotune", *SETTINGS, *words]) == 2
    approve_error(capsys.readouterr().err)
    assert left_in(own) == set()


def test_an_interrupted_search_leaves_nothing(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(wish: object, typed: object, budget: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(autotune_session, "run_search", interrupted)
    assert cli(["autotune", *SETTINGS]) == 130
    assert left_in(own) == set()
