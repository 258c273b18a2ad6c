"""An annealed VAE in whole runs: beta is a function of the step, also after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from quiet_runs import QUIET, resumable

import trainrun as package

WORDS = (
    "model=vae", "task=vae", "task.beta=2", "task.beta_schedule=cyclical", "task.beta_steps=12", "task.beta_cycles=2",
    "task.free_bits=0.01", "model.hidden=[16]", "model.latent_dim=4", "data.batch_size=48", *QUIET,
)  # fmt: skip


def betas(folder: str) -> list[float]:
    return [row["train/beta"] for row in package.load_run(folder).metrics if row["kind"] == "train"]


def test_a_resume_in_the_middle_of_a_cycle_changes_no_bit(workdir: Path) -> None:
    rise = [0, 2 / 3, 4 / 3, 2, 2, 2]
    assert betas(resumable(*WORDS, steps=14, at=5)) == pytest.approx([*rise, *rise, 2, 2])
