"""An annealed VAE in whole runs: beta is a function of the step, however it is cut, and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quiet_runs import QUIET, resumable, train, weights

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


@pytest.mark.parametrize(
    "cut",
    [
        ("data.batch_size=16", "trainer.accumulate_grad_batches=3"),
        pytest.param(("data.batch_size=24", "parallel=ddp"), marks=pytest.mark.process),
    ],
    ids=["micro-batches", "ranks"],
)
def test_a_step_in_parts_changes_neither_beta_nor_the_weights(workdir: Path, cut: tuple[str, ...]) -> None:
    one = train("one", 6, *WORDS, "precision=64")
    parts = train("parts", 6, *WORDS, "precision=64", *cut)
    assert betas(one) == pytest.approx(betas(parts), abs=1e-12)
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(parts)[name], rtol=1e-9, atol=1e-12)
