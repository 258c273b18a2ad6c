"""Networks and tasks that the workers of `parallel=threads` must compute as one process does, or refuse."""

from __future__ import annotations

from typing import Any

import torch
from exact_parts import CLASSES, FEATURES, Net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.interfaces import StepOutput


class Varied(nn.Module):
    """An LSTM, a tied and a parametrised weight, a parameter that some samples use, a gradient hook, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 6))
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.again = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.again.weight
        self.seldom = nn.Parameter(torch.ones(6))
        self.register_buffer("scale", torch.full((6,), 0.5))
        self.head = nn.Linear(6, CLASSES)
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.forwards, self.samples = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.samples = len(x)
        x = self.lstm(self.first(x))[0] * self.scale
        x = self.tied(self.again(x).tanh())
        seldom = x[..., :1] > 0.3
        x = torch.where(seldom, x * self.seldom, x) if bool(seldom.any()) else x
        return self.head(x)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Replaced(Net):
    """A network whose layers were given another forward, which is bound to them."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = self.layers[0]
        layer.forward = layer.forward


class Random(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.dropout(x, 0.5, self.training))


class Table(nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, CLASSES, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0] > 0).long())


class Noisy:
    """A task that draws from the generator of `info`, and records what it sees."""

    def __init__(self, class_dim: int = -1) -> None:
        self.firsts: list[bool] = []

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def step(self, model: nn.Module, batch: Any, info: Any) -> StepOutput:
        x, y = batch
        noise = torch.randn(x.shape, generator=info.generator, dtype=x.dtype)
        self.firsts.append(info.first)
        return StepOutput(cross_entropy(model(x + 0.1 * noise), y, reduction="sum"))


class Contrastive(Noisy):
    def step(self, model: nn.Module, batch: Any) -> StepOutput:  # type: ignore[override]
        outputs = model(batch[0])
        return StepOutput((outputs - outputs.mean(0)).square().sum())


class Counting(Noisy):
    """A task with state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": len(self.firsts)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
