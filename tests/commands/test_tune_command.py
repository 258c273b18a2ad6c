"""`trainrun tune` and `trainrun ladder` as a user types them, on a model of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainrun import cli
from trainrun.commands import tune
from trainrun.config import RunConfig
from trainrun.lab.contender import RealContender, RealStand
from trainrun.lab.journal import NAME, Journal

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(64, width), torch.nn.Linear(width, 10)

    def forward(self, images):
        return self.out(torch.relu(self.hidden(images.flatten(1))))
"""
WORDS = ["model=my_net.Net", "model.width=9", "trainer.num_threads=1", "seed=1"]


@pytest.fixture
def own(workdir: Path) -> Path:
    (workdir / "my_net.py").write_text(NET)
    return workdir


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under test may start for longer than a search of seconds has."""

    def start(stand: RealStand, config: RunConfig, limit: float) -> RealContender:
        return RealContender(stand._bench.start(config, 300.0), 300.0)

    monkeypatch.setattr(RealStand, "start", start)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__", "my_net.py"}


@pytest.mark.usefixtures("unhurried")
def test_a_search_of_seconds_on_a_model_of_ones_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *WORDS, "--budget", "6", "--allow", "numeric", "--explain"]) == 0
    said = capsys.readouterr().out
    assert "noise: your words against themselves" in said
    assert "result: " in said
    (folder,) = own.glob("outputs/*/*-tune-digits-Net-*")
    assert left_in(folder) == {"tune.json", "ladder.png", NAME}
    told = json.loads((folder / "tune.json").read_text())
    assert told["words_typed"][-3:] == WORDS[-3:]
    assert {trial["knob"] for trial in told["trials"]} >= {"loader", "numbers", "micro-batch", "compile"}
    assert left_in(own) <= {"outputs", "conf"}
    assert (own / "conf").exists() == told["claimed"]


@pytest.mark.usefixtures("unhurried")
def test_a_ladder_of_seconds(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ladder", *WORDS, "--budget=6"]) == 0
    said = capsys.readouterr().out
    assert "mixed precision (fp16)" in said
    assert "needs a GPU" in said
    (folder,) = own.glob("outputs/*/*-ladder-digits-Net-*")
    assert left_in(folder) == {"ladder.json", "ladder.png"}
    rungs = {rung["title"]: rung for rung in json.loads((folder / "ladder.json").read_text())["rungs"]}
    assert all((rung["alone"] is None) == bool(rung["reason"]) for rung in rungs.values())
    assert rungs["validation 4x as rare"]["alone"]["low"] > 1
    assert rungs["channels-last layout"]["reason"] == "the model has no convolutions"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--allow", "all"], "argument --allow: invalid choice: 'all'"),
        (["--budget", "1"], "--budget 1: must be 5 seconds or more"),
        (["--name", "a/b"], "--name a/b: a preset is named with"),
        (["data.batch_sise=3"], "data.batch_sise"),
        (["--fast"], "--fast: no such flag"),
        (["loop=my_net.Net"], "loop: is your own"),
    ],
)
def test_wrong_words_are_refused_and_leave_nothing(
    own: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert cli.main(["tune", *WORDS, *words]) == 2
    assert told in capsys.readouterr().err
    assert left_in(own) == set()


def interrupted(kinds: list[str]):
    """In place of the search: so much was written when Ctrl-C came."""

    def measured(wish, typed, journal: Journal):
        for kind in kinds:
            journal.write(kind, seconds=1.0)
        raise KeyboardInterrupt

    return measured


def test_an_interrupted_search_leaves_its_journal_and_goes_on(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "measured", interrupted(["look", "noise", "stage"]))
    assert cli.main(["tune", *WORDS]) == 130
    assert "the same words go on from outputs/" in capsys.readouterr().err
    (journal,) = own.glob(f"outputs/*/*/{NAME}")
    assert left_in(journal.parent) == {NAME}
    assert cli.main(["tune", *WORDS]) == 130
    assert "goes on from outputs/" in capsys.readouterr().out
    assert len(list(own.glob(f"outputs/*/*/{NAME}"))) == 1
    assert cli.main(["tune", *WORDS, "--fresh"]) == 130
    assert len(list(own.glob(f"outputs/*/*/{NAME}"))) == 2


@pytest.mark.parametrize("kinds", [[], ["look"]])
def test_an_interrupt_before_anything_was_measured_leaves_nothing(
    own: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str]
) -> None:
    monkeypatch.setattr(tune, "measured", interrupted(kinds))
    assert cli.main(["tune", *WORDS]) == 130
    assert left_in(own) == set()
    (own / "mine.txt").write_text("mine")  # what else is in the folder stays there
    assert cli.main(["tune", *WORDS, "hydra.run.dir=."]) == 130
    assert left_in(own) == {"mine.txt"}


def test_nothing_is_written_before_something_is_known(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may end the process on the spot until the first run under test is started."""

    def ended(wish, typed, journal: Journal):
        raise SystemExit(130 if left_in(own) == set() else "something was written")

    monkeypatch.setattr(tune, "measured", ended)
    with pytest.raises(SystemExit, match="130"):
        cli.main(["tune", *WORDS])
