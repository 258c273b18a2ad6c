"""Several validation sets by name: each has metrics of its own, in training, evaluation, prediction and a resume."""

import csv
import json
import re
import sys

import pytest
from approved import approve, approve_error

from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError

pytestmark = pytest.mark.process
WORDS = [
    "data=custom", "data.train._target_=named_sets.make", "data.val.day._target_=named_sets.make",
    "data.val.day.n=33", "data.val.day.seed=1", "data.val.night._target_=named_sets.make", "data.val.night.seed=2",
    "trainer.val_check_interval=2", "monitor.plots=false", "monitor.hardware=false",
]  # fmt: skip
ALONE = [word for word in WORDS if "night" not in word and "data.val" not in word]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "named_sets.py").write_text(
        "import torch\n\n"
        "def make(n=50, seed=0):\n"
        "    draws = torch.Generator().manual_seed(seed)\n"
        "    return torch.randn(n, 1, 8, 8, generator=draws), torch.randint(0, 10, (n,), generator=draws)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("named_sets", None)


def rows(folder, name):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if any(key.startswith("val/") for key in row)]


def test_each_has_metrics_of_its_own_and_the_first_is_the_default(folder, capsys):
    assert main([*WORDS, "trainer.max_steps=4", "hydra.run.dir=both"]) == 0
    said = capsys.readouterr().out
    assert (
        "validation: val/day, val/night; best is by val/day/acc (the default, as of early stopping)" in said
    )
    assert re.search(r"best +val/day/acc", said)
    sets = {"day": ["n=33", "seed=1"], "night": ["seed=2"]}
    for name, arguments in sets.items():
        own = [f"data.val.{one}" for one in ("_target_=named_sets.make", *arguments)]
        assert main([*ALONE, *own, "trainer.max_steps=4", f"hydra.run.dir={name}"]) == 0
        expected = [(row["step"], row["val/loss"], row["val/acc"]) for row in rows(folder, name)]
        got = [(row["step"], row[f"val/{name}/loss"], row[f"val/{name}/acc"]) for row in rows(folder, "both")]
        assert got == expected
        assert len(got) == 2
    assert not any("val/loss" in row for row in rows(folder, "both"))


def test_evaluation_prediction_and_a_resume(folder, capsys, refuses):
    words = [*WORDS, "scheduler=plateau"]  # listens to the first set
    assert main([*words, "trainer.max_steps=2", "hydra.run.dir=r"]) == 0
    assert main(["resume", "r", "trainer.max_steps=4"]) == 0
    assert main([*words, "trainer.max_steps=4", "hydra.run.dir=whole"]) == 0
    keys = ("val/day/loss", "val/night/loss")
    assert [[row[key] for key in keys] for row in rows(folder, "r")] == [
        [row[key] for key in keys] for row in rows(folder, "whole")
    ]
    last = rows(folder, "r")[-1]
    assert main(["evaluate", "r", "--which", "last"]) == 0
    found = json.loads((folder / "r" / "evaluation-val.json").read_text())
    assert {key: found[key] for key in keys} == pytest.approx({key: last[key] for key in keys})
    assert main(["evaluate", "r", "--split", "val/night", "--which", "last"]) == 0
    alone = json.loads((folder / "r" / "evaluation-val-night.json").read_text())
    assert alone["val/night/loss"] == found["val/night/loss"]
    assert "val/day/loss" not in alone
    assert main(["predict", "r", "--split", "val/day", "--out", "day.csv"]) == 0
    with open("day.csv") as file:
        assert len(list(csv.reader(file))) == 1 + 33
    capsys.readouterr()
    refuses(["predict", "r", "--split", "val"])
    refuses(["predict", "r", "--split", "val/dusk"], "data.val.dusk")


def test_two_ranks_have_the_same_and_the_best_is_that_of_the_named_set(folder):
    words = [*WORDS, "trainer.max_steps=6", "precision=64", "checkpoint.monitor=val/night/acc"]
    assert main([*words, "data.batch_size=24", "hydra.run.dir=one"]) == 0
    assert main([*words, "data.batch_size=12", "parallel.devices=2", "hydra.run.dir=two"]) == 0
    for one, two in zip(rows(folder, "one"), rows(folder, "two"), strict=True):
        for name in ("val/day/loss", "val/day/acc", "val/night/loss", "val/night/acc"):
            assert one[name] == pytest.approx(two[name], rel=1e-9)
    found = [json.loads((folder / name / "status.json").read_text()) for name in ("one", "two")]
    best = max(row["val/night/acc"] for row in rows(folder, "one"))
    assert [(status["monitor"], status["value"]) for status in found] == [
        ("val/night/acc", pytest.approx(best))
    ] * 2


@pytest.mark.parametrize("word", ["checkpoint.monitor=val/loss", "data.val.day.n=x.y", "data.val.dusk=3"])
def test_wrong_words_are_refused_by_their_key(word, capsys):
    if word.startswith("data.val.dusk"):
        with pytest.raises(ConfigError) as caught:
            compose_run([*WORDS, word])
        approve(str(caught.value))
    else:
        assert main([*WORDS, word, "trainer.max_steps=1", "hydra.run.dir=w"]) != 0
        approve_error(capsys.readouterr().err)
