"""Models with a task or data that they cannot be trained with: one message, and the way out."""

from __future__ import annotations

import pytest

from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError, DataError
from trainrun.runs.api import train


def test_an_autoencoder_without_its_task_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="model=vae: .*its task is task=vae"):
        compose_run(["model=vae"])
    compose_run(["model=vae", "task=vae"])
    compose_run(["model=vae", "task=my_task.Own"])  # the user's own task may know what to do with it


@pytest.mark.parametrize("model", ["gpt", "lstm"])
def test_a_model_of_tokens_on_pictures_says_what_it_reads(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="the model reads tokens.*data=text task=language_modeling"):
        train(
            f"model={model}",
            "task.class_dim=-1",
            "trainer.max_steps=1",
            "monitor.plots=false",
            "monitor.hardware=false",
        )


@pytest.mark.parametrize("words", [["model=gpt"], ["model=gpt", "data=text"], ["model=lstm", "data=text"]])
def test_classes_of_every_token_are_not_looked_for_where_the_tokens_are(words):
    """A text of as many tokens as classes (256 bytes, blocks of 256) would train, on nothing."""
    with pytest.raises(
        ConfigError, match=f"{words[0]}: reads tokens .*data=text task=language_modeling.*class_dim=-1"
    ):
        compose_run(words)
    compose_run([*words, "task.class_dim=-1"])
    compose_run([*words, "task=language_modeling"])
    compose_run(["model=lstm", "model.outputs=last"])  # one class of a text
