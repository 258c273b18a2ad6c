"""Balanced, weighted and mixed training data, and folds, as settings: resumes, refusals, the means of a sweep."""

import json
import sys

import pytest
import torch
from approved import approve_error

from trainrun import load_model
from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError

POINTS = """
import pathlib

import torch

def points(n=60, seed=0, weights=False):
    draws = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 4, generator=draws), (torch.arange(n) % 6 == 0).long()
    return {"x": x, "y": y, "often": 1.0 + torch.arange(n) % 3} if weights else (x, y)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, n=60, parts=4, mine=None):
        self.n, self.num_shards, self.mine, self.place = n, parts, range(parts) if mine is None else mine, 0

    def shard(self, num_shards, index):
        return type(self)(self.n, self.num_shards, self.mine[index::num_shards])

    def state_dict(self):
        return {"place": self.place, "of": [torch.tensor(self.n), None]}

    def load_state_dict(self, state):
        self.place = state["place"]
        pathlib.Path("loaded").touch()

    def __iter__(self):
        x, y = points(self.n)
        for i in range(self.place, self.n):
            self.place = i + 1
            if i % 7 % self.num_shards in self.mine:
                yield x[i] + torch.rand(4) * 0.1, y[i]
        self.place = 0
"""
TRAIN, NAMED = ["data.train._target_=sampled.points"], ["data.train.a._target_=sampled.points",
                "data.train.b._target_=sampled.points", "data.train.b.n=20", "data.train.b.seed=3"]  # fmt: skip
WAYS = {
    "balanced": [*TRAIN, "data.sampling=balanced"],
    "weighted": [*TRAIN, "data.sampling=weighted", "data.weights=often.npy"],
    "mixed": [*NAMED, "data.mix={a: 1, b: 3}"],
    "named": NAMED,
    "stream": ["data.train._target_=sampled.Stream", "data.shuffle_buffer=8"],
    "parts": ["data.train._target_=sampled.Stream", "data.num_workers=2", "data.shuffle_buffer=4"],
    "fold": [*TRAIN, "data.folds=3", "data.fold=2", "data.stratified=true", "data.sampling=balanced"],
}
WORDS = [
    "data=custom", "data.batch_size=4", "model=mlp", "model.hidden=[8]", "trainer.num_threads=1",
    "trainer.accumulate_grad_batches=2", "monitor.plots=false", "monitor.hardware=false", "monitor.log_every_n_steps=1",
    "data.val._target_=sampled.points", "data.val.seed=1", "data.val.n=12", "data.shape=[4]", "data.num_classes=2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    import numpy as np

    (tmp_path / "sampled.py").write_text(POINTS)
    np.save(tmp_path / "often.npy", 1.0 + np.arange(60) % 3)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("sampled", None)


def losses(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows if row["kind"] == "train"}


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_a_resume_in_the_middle_of_an_epoch_changes_nothing(way, folder):
    words = [*WORDS, *WAYS[way]]
    assert main([*words, "trainer.max_steps=13", "hydra.run.dir=whole"]) == 0
    assert main([*words, "trainer.max_steps=10", "hydra.run.dir=parts"]) == 0
    other = [] if "sampled.Stream" in words[-2] + words[-3] else ["data.engine=workers", "data.num_workers=0"]
    assert main(["resume", "parts", "trainer.max_steps=13", *other]) == 0
    assert losses(folder / "parts") == losses(folder / "whole")
    one, other = (load_model(folder / name, "last").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (folder / "loaded").exists() == (way in ("stream", "parts"))


CHANGES = {
    "balanced": ["data.sampling=none"],
    "weighted": ["data.weights=other.npy"],
    "mixed": ["data.mix={a: 1, b: 2}"],
    "stream": ["data.shuffle_buffer=9"],
    "fold": ["data.fold=1"],
    "named": ["seed=43"],
}


@pytest.mark.parametrize("way", CHANGES)
def test_another_order_is_not_gone_on_with_in_the_middle_of_an_epoch(way, folder, capsys):
    """By another word, or by another content of what the same word names."""
    import numpy as np

    np.save(folder / "other.npy", 2.0 + np.arange(60) % 3)
    assert main([*WORDS, *WAYS[way], "trainer.max_steps=3", "hydra.run.dir=r"]) == 0
    key = CHANGES[way][0].partition("=")[0]
    assert main(["resume", "r", "trainer.max_steps=5", *CHANGES[way]]) != 0
    said = capsys.readouterr().err
    assert "saved in the middle of an epoch with" in said
    if way == "weighted":
        np.save(folder / "often.npy", 2.0 + np.arange(60) % 3)
        assert main(["resume", "r", "trainer.max_steps=5"]) != 0
        approve_error(capsys.readouterr().err, "data.train")
    else:
        assert f"{key}=" in said
    if way == "named":  # an epoch has 20 micro-batches of 4, and a step two of them
        assert main([*WORDS, *NAMED, "trainer.max_steps=10", "hydra.run.dir=whole"]) == 0
        assert main(["resume", "whole", "trainer.max_steps=12", "seed=43"]) == 0


@pytest.mark.process
def test_a_divided_stream_is_not_gone_on_with_by_other_readers(folder, capsys):
    words = [*WORDS, *WAYS["parts"]]
    assert main([*words, "trainer.max_steps=3", "hydra.run.dir=r"]) == 0
    assert main(["resume", "r", "trainer.max_steps=5", "data.num_workers=0"]) != 0
    approve_error(capsys.readouterr().err, "parallel.devices")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([*TRAIN, "data.sampling=balnced"], "data.sampling=balnced: must be one of none, balanced, weighted."),
        ([*TRAIN, "data.sampling=weighted"], "data.sampling=weighted: needs data.weights"),
        ([*TRAIN, "data.weights=[1,-1]", "data.sampling=weighted"], "data.weights=[1,-1]: must be a text, or a list"),
        ([*TRAIN, "data.mix={a: 1}"], "data.mix={a: 1}: must name the sets of data.train, which are not named"),
        ([*NAMED, "data.mix={a: 1}"], "data.mix={a: 1}: must name the sets of data.train, which are a, b"),
        ([*NAMED, "data.mix={a: 1, b: 0}"], "data.mix={a: 1, b: 0}: must be numbers above 0"),
        ([*NAMED, "data.mix=0.5"], "data.mix=0.5: must be numbers above 0 by the names of data.train"),
        ([*NAMED, "data.mix={a: 1, b: 1}", "data.sampling=balanced"], "data.sampling=balanced: data.mix={a: 1, b: 1}"),
        ([*NAMED, "data.mix={a: 1, b: 1}", "data.folds=2", "data.fold=0"], "data.folds=2: data.mix={a: 1"),
        ([*TRAIN, "data.sampling=balanced", "data.shuffle=false"], "data.shuffle=false: data.sampling=balanced draws"),
        ([*TRAIN, "data.shuffle_buffer=1"], "data.shuffle_buffer=1: must be a whole number, 2 or more, or null"),
        ([*TRAIN, "data.shuffle_buffer=9", "data.shuffle=false"], "data.shuffle=false: data.shuffle_buffer=9 shuffles"),
        ([*TRAIN, "data.sampling=balanced", "data.padding=pack"], "data.padding=pack: groups samples only once"),
        ([*TRAIN, "data.sampling=balanced", "data.truncate=drop", "data.max_sequence_length=3"],
         "data.truncate=drop: groups"),
        ([*TRAIN, "data.sampling=balanced", "task.class_weights=balanced"], "already corrects the frequencies"),
        ([*TRAIN, "data.folds=3"], "data.folds=3: needs data.fold, the part for validation"),
        ([*TRAIN, "data.fold=3"], "data.fold=3: has no effect without data.folds"),
        ([*TRAIN, "data.folds=3", "data.fold=3"], "data.fold=3: is not a fold of data.folds=3"),
        ([*TRAIN, "data.folds=1", "data.fold=0"], "data.folds=1: must be a whole number, 2 or more, or null"),
        ([*TRAIN, "data.stratified=true"], "data.stratified=true: has no effect without data.folds"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(words, line):
    with pytest.raises(ConfigError) as caught:
        compose_run([*WORDS, *words])
    assert any(line in fault for fault in caught.value.faults), caught.value.faults


@pytest.mark.process
def test_a_sweep_over_folds_ends_with_their_mean(folder, capsys):
    words = [*WORDS, *TRAIN, "data.folds=2", "data.fold=range(2)", "trainer.max_steps=1", "output_dir=s"]
    assert main(["--multirun", *words]) == 0
    table = (folder / "s" / "sweep.csv").read_text().splitlines()
    values = [float(line.split(",")[2]) for line in table[1:]]
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if line.startswith("all jobs")]
    assert " ".join(row[2:6]) == f"{sum(values) / 2:.4g} ({min(values):.4g} to {max(values):.4g})"
    head, row = (folder / "s" / "sweep-means.csv").read_text().splitlines()
    assert head == "mean,half,count,missing"
    assert [float(cell) for cell in row.split(",")] == pytest.approx(
        [sum(values) / 2, 12.706 * abs(values[0] - values[1]) / 2, 2, 0], rel=1e-3
    )
