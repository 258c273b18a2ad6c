"""Models with a task or data that they cannot be trained with: one message, and the way out."""

from __future__ import annotations

import pytest

from trainrun.compose import compose_run
from trainrun.errors import ConfigError, DataError
from trainrun.record import train


def test_an_autoencoder_without_its_task_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="model=vae: .*its task is task=vae"):
        compose_run(["model=vae"])
    compose_run(["model=vae", "task=vae"])
    compose_run(["model=vae", "task=my_task.Own"])  # the user's own task may know what to do with it


@pytest.mark.parametrize("model", ["gpt", "lstm"])
def test_a_model_of_tokens_on_pictures_says_what_it_reads(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the model reads tokens.*data=text task=language_modeling"):
        train(f"model={model}", "trainer.max_steps=1", "monitor.plots=false", "monitor.hardware=false")
