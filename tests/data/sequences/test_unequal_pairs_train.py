"""A task that reads pairs trains the same whether their lengths are equal or not, with workers and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from quiet_runs import QUIET, losses, train

pytestmark = pytest.mark.process
PIECES = '''
import torch
from torch import nn
from torch.nn import functional as F
from trainrun.interfaces import StepOutput, batch_fields

class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        length = 5 + index % 3
        return torch.arange(length) % 7, torch.arange(1, length + 1) % 7

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, x):
        return self.o(self.e(x))

class Task:
    def count(self, batch):
        assert int(batch_fields(batch)["attention_mask"].sum()) == int((batch[1] >= 0).sum())
        return int((batch[1] >= 0).sum())

    def step(self, model, batch):
        logits, target = model(batch[0]).flatten(0, 1), batch[1].flatten()
        return StepOutput(F.cross_entropy(logits, target, reduction="sum", ignore_index=-100))
'''  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
def test_pairs_of_unequal_length_train_and_count_their_real_positions(workdir: Path, workers: int) -> None:
    (workdir / "pieces.py").write_text(PIECES)
    words = ["model=pieces.Net", "task=pieces.Task", "data.train=pieces.Pairs", "data.val=pieces.Pairs"]
    more = ["data.batch_size=8", f"data.num_workers={workers}", "data.shuffle=false", "optimizer.lr=0"]
    found = losses(train(f"run{workers}", 3, *words, *more, *QUIET))
    values = [loss for _, loss in found]
    assert len(values) >= 3
    assert all(1.0 < value < 3.5 for value in values)  # of seven classes, untrained: about log(7)
