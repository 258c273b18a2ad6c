"""Weights of classes in whole runs: as a list of the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from approved import approve_error
from quiet_runs import QUIET, losses, train

from trainrun.cli.main import main
from trainrun.data.facts import describe_source
from trainrun.data.readers.builtin.digits import load
from trainrun.task.losses import compute_balanced_weights

WORDS = ("task.class_weights=balanced", "precision=64", "data.batch_size=48", *QUIET)


def test_balanced_is_a_list_of_numbers(workdir: Path) -> None:
    counts = describe_source(load(0.2, 0)["train"]).class_counts
    assert len(counts) == 10
    listed = ",".join(map(repr, compute_balanced_weights(counts)))
    whole = train("whole", 6, *WORDS)
    assert losses(train("listed", 6, *WORDS, f"task.class_weights=[{listed}]")) == losses(whole)
    assert losses(train("plain", 6, *WORDS, "task.class_weights=null")) != losses(whole)


@pytest.mark.parametrize(
    "words",
    [
        ("task.class_weights=balanced", "data=synthetic", "task=regression"),
        ("task.class_weights=[1,2]",),
        ("task.class_weights=even",),
        ("task.class_weights=[1,-2]",),
    ],
)
def test_a_mistake_is_answered(
    workdir: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main([*words, *QUIET, "trainer.max_steps=2"]) != 0
    approve_error(capsys.readouterr().err)
