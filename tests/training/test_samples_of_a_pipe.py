"""What a program sends through a pipe comes once, so no trial before the training may read it."""

from __future__ import annotations

from pathlib import Path

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

def net():
    return torch.nn.Linear(2, 2)
"""


def test_every_sample_of_a_pipe_is_trained_on(workdir: Path) -> None:
    (workdir / "pipe_code.py").write_text(CODE)
    data = ("data.train=pipe_code.Numbers", "data.train.count=40", "data.val=null", "data.num_classes=2")
    words = ("data.batch_size=4", "model=pipe_code.net", "trainer.max_epochs=1", "output_dir=run")
    measured = "trainer.num_threads=auto"
    assert package.train(*data, *words, *QUIET, measured).status["step"] == 10
