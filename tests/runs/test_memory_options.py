"""What saves memory: off and on give the same run, a stopped run goes on bit for bit, illegal pairs are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from approved import refused
from quiet_runs import QUIET, losses, resumable, train

import trainrun as package
from trainrun.errors import ConfigError

SHORT = (*QUIET, "checkpoint.keep_last=9")
CNN = ("model=cnn", "model.width=4", "model.dropout=0.2", "data.batch_size=16", *SHORT)
GPT = (
    "data=text", "data.train.max_bytes=20000", "data.train.block_size=16", "data.train.cache_dir=cache",
    "model=gpt", "model.layers=2", "model.width=16", "model.heads=2", "model.context=16", "model.dropout=0.1",
    "task=language_modeling", "trainer.val_check_interval=4", "trainer.limit_val_batches=2", *SHORT,
)  # fmt: skip
# words, those of the plain run where they differ, and the relative difference that is allowed
TECHNIQUES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], float]] = {
    "recompute cnn": (CNN, (), ("trainer.gradient_checkpointing=full",), 0),
    "recompute gpt": (GPT, (), ("trainer.gradient_checkpointing=selective",), 0),
    "a share, accumulation": (
        (*GPT, "trainer.accumulate_grad_batches=2"), (), ("trainer.gradient_checkpointing=0.5",), 0,
    ),
    "loss in chunks": (GPT, (), ("task.loss_chunks=5",), 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("kind", TECHNIQUES)
def test_on_equals_off_and_a_resumed_run_equals_one_that_never_stopped(workdir: Path, kind: str) -> None:
    common, off, on, tolerance = TECHNIQUES[kind]
    plain = train("plain", 6, *common, *off)
    whole = resumable(*common, *on)
    found, wanted = losses(whole), losses(plain)
    assert len(found) == len(wanted) > 6
    if tolerance:
        assert found == [(step, pytest.approx(value, rel=tolerance)) for step, value in wanted]
    else:
        assert found == wanted


REFUSED = [
    (["trainer.gradient_checkpointing=ful"], "must be none, auto, full, selective, or a number"),
    (["trainer.gradient_checkpointing=1.5"], "more than 0 and below 1"),
    (["trainer.gradient_checkpointing=full", "trainer.compile.enabled=true"], "use one of the two"),
    (["trainer.gradient_checkpointing=full", "parallel.sync_batchnorm=true"], "exchange the statistics"),
    (["trainer.gradient_checkpointing=full", "trainer.cuda_graphs=true"], "cannot repeat its random numbers"),
    (["trainer.activation_offload=true", "trainer.cuda_graphs=true"], "host memory cannot be allocated"),
    (["trainer.activation_offload=true", "parallel.accelerator=cpu"], "moves tensors from a GPU"),
    (["trainer.activation_offload=true", "trainer.gradient_checkpointing=full"], "none are left to move"),
    (["trainer.activation_offload=true", "trainer.compile.enabled=auto"], "trainer.compile.scope=off"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_illegal_pairs_are_refused_before_anything_starts(
    workdir: Path, words: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        package.train(*words)
    text = str(refused.value)
    assert reason in text
    assert text.count("trainer.gradient_checkpointing=true") <= 1
    assert not list(workdir.iterdir())


def test_without_a_gpu_offloading_is_refused_with_the_reason(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(ConfigError):
        package.train("trainer.activation_offload=true", "trainer.max_steps=1", *SHORT)


def test_a_model_without_blocks_is_told_and_auto_says_so(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused(ConfigError):
        package.train("trainer.gradient_checkpointing=full", "trainer.max_steps=1", *SHORT)
    package.train(
        "trainer.gradient_checkpointing=auto", "trainer.max_steps=1", "monitor.summary=true", *SHORT
    )
    assert "trainer.gradient_checkpointing: off, the model has no blocks (auto)" in capsys.readouterr().out
