"""What a trial did to a model's buffers and the random states is undone, in the same memory."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import Tensor, nn

from trainrun.training.without_trace import copy_obstacle, snapshot, stand_ins


class Moody(nn.Module):
    """Writes into a buffer, puts another in the place of a second, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("replaced", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + torch.rand(2)
        return self.last(self.norm(self.first(x)).relu()) + random.random() + numpy.random.random()


def test_buffers_and_draws_are_undone() -> None:
    model = Moody()
    weight, kept = model.first.weight, model.norm.running_mean
    before = (kept.tolist(), torch.get_rng_state().tolist())
    with snapshot(model):
        model(torch.ones(5, 3))
        with torch.no_grad():
            weight.add_(1.0)
        changed = weight.tolist()
    assert (model.norm.running_mean.tolist(), torch.get_rng_state().tolist()) == before
    assert model.norm.running_mean is kept
    assert model.replaced.tolist() == [0.0, 0.0]
    assert weight.tolist() == changed


def test_stand_ins_share_what_the_originals_share() -> None:
    class Task:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    copied, task = stand_ins(model, Task(model))
    assert task.model is copied is not model
    assert not copied[1].training  # or it would wait for the other ranks
    assert model[1].training


def test_what_cannot_be_copied_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert copy_obstacle(nn.Linear(2, 2), cpu) == ""
    assert copy_obstacle(nn.LazyLinear(2), cpu) == "the model has layers whose shape is not known yet"
    monkeypatch.setattr("trainrun.training.without_trace.free_bytes", lambda device: 90)
    assert copy_obstacle(nn.Linear(2, 2), cpu) == "the model fills the memory"
