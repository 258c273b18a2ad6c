"""The reference models in whole runs: resume, 16 bits, and every preset."""

from __future__ import annotations

from pathlib import Path

import pytest
from quiet_runs import QUIET

import trainrun as package
from trainrun.config.argv import find_conf_dir, list_options
from trainrun.config.compose import compose_run

TEXT = ["data=text", "data.train.max_bytes=60000", "data.train.block_size=32", "task=language_modeling"]
MODELS = {
    "mlp": [],
    "cnn": ["model.width=4"],
    "resnet": ["model.width=8"],
    "mobilenet": ["model.width=4"],
    "vae": ["task=vae", "model.width=4", "model.hidden=[16]"],
    "sequence_vae": ["data=text", *TEXT[1:3], "task=vae", "model.width=16", "model.latent_dim=4"],
    "gpt": [*TEXT, "model.layers=1", "model.width=32", "model.heads=2"],
    "lstm": [*TEXT, "model.width=16"],
}
VAE = ["model=vae", *MODELS["vae"], "optimizer=sgd", "optimizer.lr=1e-3", *QUIET]


def test_the_bound_of_a_vae_does_not_depend_on_how_it_is_validated(workdir: Path) -> None:
    run = package.train(*VAE, "precision=64", "trainer.max_steps=3")
    found = [row for row in run.metrics if row["kind"] == "eval"][-1]
    again = package.train(*VAE, "precision=64", "trainer.max_steps=3", "data.val_batch_size=7")
    row = [row for row in again.metrics if row["kind"] == "eval"][-1]
    for name in ("val/loss", "val/kl", "val/reconstruction"):
        assert row[name] == pytest.approx(found[name], rel=1e-12)
    assert found["val/loss"] == pytest.approx(found["val/kl"] + found["val/reconstruction"])


PRESETS = list_options("preset", [find_conf_dir()])
LARGE = ("gpt", "cnn")  # with every preset; the others with one each


@pytest.mark.parametrize(
    ("preset", "model"),
    [(preset, model) for number, preset in enumerate(PRESETS) for place, model in enumerate(MODELS)
     if model in LARGE or place == number % len(MODELS)],
)  # fmt: skip
def test_every_preset_trains_every_model(workdir: Path, preset: str, model: str) -> None:
    words = [f"preset={preset}", f"model={model}", *MODELS[model], *QUIET]
    run = package.train(*words, "trainer.max_steps=1", "trainer.limit_val_batches=1")
    assert (run.status["state"], run.status["step"]) == ("done", 1)
    config = compose_run(words).config
    fast = preset in ("fast", "max-perf")
    assert (config.precision.mode, config.trainer.channels_last) == (
        "auto" if fast or preset == "memory-limited" else "32-true", fast,
    )  # fmt: skip
