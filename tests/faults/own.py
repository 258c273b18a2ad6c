"""What the faulted runs train: data, models and a task as a user might write them, which leave a trace.

Every random number that a run can draw is drawn: in the samples (torch, Python, NumPy), in dropout. Every
micro-batch of the training writes which samples it saw and the bits of its loss to the history.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from faults.history import write_line
from trainrun.interfaces import StepOutput

SIDE, COUNT = 6, 61
VOCABULARY = 11
# called with the number of the micro-batch in this process (from 1), and what the loss is multiplied with
on_batch: list[Callable[[int], float]] = []
num_batches = 0


class Noisy:
    """Small pictures with noise; a target holds the number of its sample and its class."""

    num_classes = 2

    def __init__(self, count: int = COUNT, seed: int = 0) -> None:
        self.x, self.y = tensors_of(count, seed)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        perish(index)
        noise = torch.randn(1, SIDE, SIDE) * 0.1 + random.random() * 0.1 + numpy.random.rand() * 0.1
        return self.x[index] + noise, self.y[index]


class Drawn(Noisy):
    """The same, with noise from a generator of its own: threads may read it."""

    thread_safe = True

    def __getitem__(self, index: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:  # type: ignore
        return self.x[index] + torch.randn(1, SIDE, SIDE, generator=generator) * 0.1, self.y[index]


class Sequences:
    """Token lists of different lengths."""

    num_classes = 2

    def __init__(self, count: int = COUNT, seed: int = 0) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        tokens = torch.randint(1, VOCABULARY, (1 + index % 7,), generator=generator)
        tokens[torch.rand(len(tokens)) < 0.1] = 1  # words that are dropped at random
        return {"input_ids": tokens, "label": 2 * torch.tensor(index) + tokens[0] % 2}


def tensors_of(count: int = COUNT, seed: int = 0) -> tuple[Tensor, Tensor]:
    """All samples at once, for the engines that keep them in memory."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return x, 2 * torch.arange(count) + (x.mean(dim=(1, 2, 3)) > 0).long()


def perish(index: int) -> None:
    """In a loader's worker, once: `FAULTS_WORKER` names the sample, the signal, and the file that says it was."""
    told = os.environ.get("FAULTS_WORKER")
    if told is None:
        return
    sample, number, note = told.split(":", 2)
    if index == int(sample) and torch.utils.data.get_worker_info() is not None and not os.path.exists(note):
        open(note, "w").close()
        os.kill(os.getpid(), int(number))


class Net(nn.Module):
    """Averages of BatchNorm move with every micro-batch, so also in the middle of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Reader(nn.Module):
    """The mean of what attention makes of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        hidden, _ = self.attention(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)
        mask = attention_mask.unsqueeze(-1)
        return self.last((hidden * mask).sum(1) / mask.sum(1))


class Watched:
    """Two classes; a target is twice the number of the sample, plus its class."""

    monitor = "loss"

    def count(self, batch: Any) -> int:
        return len(target_of(batch))

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        target = target_of(batch)
        if isinstance(batch, dict):
            logits = model(batch["input_ids"], batch["attention_mask"])
        else:
            logits = model(batch[0])
        loss = cross_entropy(logits.float(), target % 2, reduction="sum")
        if not model.training:
            return StepOutput(loss, {"acc": (logits.argmax(1) == target % 2).sum()})
        global num_batches
        num_batches += 1
        ids = ",".join(map(str, (target // 2).tolist()))
        write_line(f"batch {ids} {float(loss.detach()).hex()}")
        for hook in on_batch:
            loss = loss * hook(num_batches)
        return StepOutput(loss)


def target_of(batch: Any) -> Tensor:
    return batch["label"] if isinstance(batch, dict) else batch[1]
