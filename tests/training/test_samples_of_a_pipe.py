"""What a program sends through a pipe comes once, so no trial before the training may read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from quiet_runs import QUIET

import trainrun as package

CODE = """
import os

import torch
from torch.utils.data import IterableDataset

class Numbers(IterableDataset):
    def __init__(self, count):
        self.reading, writing = os.pipe()
        os.write(writing, bytes(range(count)))
        os.close(writing)

    def __iter__(self):
        while byte := os.read(self.reading, 1):
            yield torch.full((2,), byte[0] / 100), byte[0] % 2

class OddBegin(Numbers):
    def __iter__(self):
        for x, _ in super().__iter__():
            yield x, int(x[0] < 0.039)

def net():
    return torch.nn.Linear(2, 2)

def zero():
    network = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(network.weight)
    torch.nn.init.constant_(network.bias[:1], 1.0)
    torch.nn.init.constant_(network.bias[1:], 0.0)
    return network
"""


def test_every_sample_of_a_pipe_is_trained_on(workdir: Path) -> None:
    (workdir / "pipe_code.py").write_text(CODE)
    data = ("data.train=pipe_code.Numbers", "data.train.count=40", "data.val=null", "data.num_classes=2")
    words = ("data.batch_size=4", "model=pipe_code.net", "trainer.max_epochs=1", "output_dir=run")
    measured = "trainer.num_threads=auto"
    assert package.train(*data, *words, *QUIET, measured).status["step"] == 10


def test_every_sample_of_a_pipe_is_validated_on(workdir: Path) -> None:
    """The first four of forty samples are of another class, which a network predicts that never learns."""
    (workdir / "pipe_code.py").write_text(CODE)
    data = ("data.train=pipe_code.Numbers", "data.train.count=40", "data.val=pipe_code.OddBegin")
    words = (
        "data.val.count=40",
        "data.num_classes=2",
        "data.batch_size=4",
        "model=pipe_code.zero",
        "output_dir=run",
    )
    outcome = package.train(*data, *words, *QUIET, "trainer.max_epochs=1", "optimizer.lr=1e-9")
    assert [row["val/acc"] for row in outcome.metrics if "val/acc" in row] == [pytest.approx(0.9)]
