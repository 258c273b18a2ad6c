"""Weights of classes in whole runs: as a list of the same numbers, over micro-batches and ranks, and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quiet_runs import QUIET, losses, resumable, train, weights

from trainrun.cli.main import main
from trainrun.data.facts import facts_of
from trainrun.data.readers.builtin.digits import load
from trainrun.task.losses import balanced_weights

WORDS = ("task.class_weights=balanced", "precision=64", "data.batch_size=48", *QUIET)


def test_balanced_is_a_list_of_numbers_and_a_resume_changes_no_bit(workdir: Path) -> None:
    counts = facts_of(load(0.2, 0)["train"]).class_counts
    assert len(counts) == 10
    listed = ",".join(map(repr, balanced_weights(counts)))
    whole = resumable(*WORDS)
    assert losses(train("listed", 6, *WORDS, f"task.class_weights=[{listed}]")) == losses(whole)
    assert losses(train("plain", 6, *WORDS, "task.class_weights=null")) != losses(whole)


def test_micro_batches_change_nothing(workdir: Path) -> None:
    one = train("one", 6, *WORDS)
    cut = train("cut", 6, *WORDS, "data.batch_size=16", "trainer.accumulate_grad_batches=3")
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(cut)[name], rtol=1e-9, atol=1e-12)


@pytest.mark.process
def test_two_ranks_are_one(workdir: Path) -> None:
    one = train("one", 6, *WORDS)
    two = train("two", 6, *WORDS, "data.batch_size=24", "parallel=ddp")
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(two)[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("task.class_weights=balanced", "data=synthetic", "task=regression"), "task.class_weights"),
        (("task.class_weights=[1,2]",), "2 numbers, but the model gives 10 classes"),
        (("task.class_weights=even",), "task.class_weights=even: must be"),
        (("task.class_weights=[1,-2]",), "task.class_weights"),
    ],
)
def test_a_mistake_is_answered(
    workdir: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], answer: str
) -> None:
    assert main([*words, *QUIET, "trainer.max_steps=2"]) != 0
    assert answer in capsys.readouterr().err
