"""Models with a task or data that they cannot be trained with: one message, and the way out."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from approved import refused
from quiet_runs import QUIET
from torch import nn

from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.runs.api import train
from trainrun.runs.rank import WHOLE_INPUTS


def test_an_autoencoder_without_its_task_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(PluginError):
        train("model=vae", "trainer.max_steps=1", *QUIET)


@pytest.mark.parametrize("model", ["gpt", "lstm"])
def test_a_model_of_tokens_on_pictures_says_what_it_reads(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    with refused(DataError):
        train(f"model={model}", "task.class_dim=-1", "trainer.max_steps=1", *QUIET)


@pytest.mark.parametrize("words", [["model=gpt"], ["model=gpt", "data=text"], ["model=lstm", "data=text"]])
def test_classes_of_every_token_are_not_looked_for_where_the_tokens_are(words):
    """A text of as many tokens as classes (256 bytes, blocks of 256) would train, on nothing."""
    with refused(ConfigError):
        compose_run(words)
    compose_run([*words, "task.class_dim=-1"])
    compose_run([*words, "task=language_modeling"])
    compose_run(["model=lstm", "model.outputs=last"])  # one class of a text


def test_regression_takes_no_rows_of_several_samples():
    with refused(ConfigError, "data.padding"):
        compose_run(["task=regression", "data.padding=pack"])


def test_bytes_for_a_model_that_computes_with_fractions_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((20, 1, 8, 8), np.uint8), np.arange(20) % 2
    np.savez("x.npz", x_train=x, y_train=y, x_val=x, y_val=y)
    for model in (
        ["model=cnn"],
        ["model._target_=torch.nn.LSTM", "model.input_size=8", "model.hidden_size=2"],
    ):
        with pytest.raises(
            DataError, match="the inputs are whole numbers, but the model computes with fract"
        ):
            train("data=arrays", "data.path=x.npz", *model, "trainer.max_steps=1", "data.batch_size=4")
        x = x[:, 0]
        np.savez("x.npz", x_train=x, y_train=y, x_val=x, y_val=y)


def test_a_last_batch_of_one_sample_for_a_batch_norm_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((9, 1, 8, 8), np.float32), np.arange(9) % 2
    np.savez("x.npz", x_train=x, y_train=y, x_val=x, y_val=y)
    words = (
        "data=arrays",
        "data.path=x.npz",
        "model=mlp",
        "model.norm=batch",
        "data.batch_size=4",
        "trainer.max_epochs=1",
    )
    with refused(DataError, "data.drop_last"):
        train(*words)


def test_inputs_by_name_for_a_model_of_one_tensor_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"a": [0.5] * 20, "l": [[1, 2]] * 20, "y": [0, 1] * 10}), "t.parquet")
    with refused(DataError):
        train("data=parquet", "data.path=t.parquet", "model=mlp", "model.in_shape=[1]", "trainer.max_steps=1",
              "data.batch_size=4")  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.int64])
@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 2), nn.Conv1d(1, 2, 3), nn.LSTM(8, 2), nn.Conv2d(1, 2, 3, bias=False)]
)
def test_what_torch_says_of_whole_inputs_is_known(layer, dtype):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        layer(torch.zeros([1, 1, 8, 8] if isinstance(layer, nn.Conv2d) else [1, 1, 8], dtype=dtype))
    found = re.search(WHOLE_INPUTS, str(caught.value)) is not None
    assert found == ("scalar type Long" not in str(caught.value)), "which is said of a loss's target too"
