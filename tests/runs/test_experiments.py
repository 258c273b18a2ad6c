"""Each experiment that ships trains on real data, and takes data of one's own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused
from PIL import Image
from quiet_runs import QUIET
from things import LateModule

import trainrun
from trainrun.config.argv import find_conf_dir
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError

sets = LateModule("sklearn.datasets")
TEN_STEPS = ("trainer.max_epochs=null", "trainer.max_steps=10", "monitor.log_every_n_steps=1", *QUIET)
EXPERIMENTS = {path.stem for path in (find_conf_dir() / "experiment").glob("*.yaml")} - {"none"}


def train(experiment: str, *words: str) -> Any:
    run = trainrun.train(f"experiment={experiment}", *words, *TEN_STEPS, f"output_dir=runs/{experiment}")
    assert (run.status["state"], run.status["step"]) == ("done", 10)
    losses = [row["train/loss"] for row in run.metrics if "train/loss" in row]
    assert min(losses[-3:]) < losses[0]
    assert any("val/loss" in row for row in run.metrics)
    return run


def write_wine(path: Path) -> None:
    """Write the UCI wines, chemical measures of 178 wines and their grower."""
    wine = sets.load_wine()
    with path.open("w", newline="") as opened:
        table = csv.writer(opened)
        table.writerow([*wine.feature_names, "grower"])
        for row, label in zip(wine.data.tolist(), wine.target.tolist(), strict=True):
            table.writerow([*row, f"grower {label}"])


def write_digits(folder: Path) -> None:
    """Write some of the digits as pictures in class folders."""
    digits = sets.load_digits()
    for index in range(100):
        path = folder / str(digits.target[index]) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[index] * 15).astype(np.uint8)).save(path)


def test_image_classification(workdir: Path) -> None:
    write_digits(workdir / "photos")
    words = ("data.path=photos", "data.shape=[1,8,8]", "model.width=8")
    run = train("image_classification", *words)
    assert run.load_model()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_tabular(workdir: Path) -> None:
    write_wine(workdir / "wine.csv")
    run = train("tabular", "data.path=wine.csv", "data.train.target=grower")
    assert run.config.data.name == "csv"


def test_text(workdir: Path) -> None:
    small = ("model.layers=1", "model.width=32", "model.heads=2", "data.train.max_bytes=100000")
    train("text", *small, "data.train.block_size=32", "data.batch_size=8", "model.context=32")


def test_vae(workdir: Path) -> None:
    run = train("vae", "hook.vae.num_samples=64")
    assert any("val/kl" in row for row in run.metrics)


def test_fine_tuning_with_lora(workdir: Path) -> None:
    base = train("image_classification", "model=mlp")
    run = train("lora", f"init_from={base.folder}", "data.train.seed=1")
    adapted, before = run.load_model(), base.load_model().state_dict()
    frozen = {
        name.replace(".base", ""): value
        for name, value in adapted.state_dict().items()
        if "lora_" not in name
    }
    assert all(torch.equal(value, before[name]) for name, value in frozen.items())
    trained = [value for name, value in adapted.state_dict().items() if name.endswith("lora_b")]
    assert trained
    assert all(value.abs().max() > 0 for value in trained)


def test_each_experiment_is_here_and_lora_names_what_it_needs(workdir: Path) -> None:
    assert {"image_classification", "tabular", "text", "vae", "lora"} == EXPERIMENTS
    with refused(ConfigError, "init_from"):
        compose_run(["experiment=lora"])


@pytest.mark.parametrize("path", ["table.csv", "table.parquet"])
def test_tabular_reads_the_table_that_is_named(workdir: Path, path: str) -> None:
    (workdir / path).touch()
    assert compose_run(["experiment=tabular", f"data.path={path}"]).choices["data"] == Path(path).suffix[1:]
