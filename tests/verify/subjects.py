"""What `verify` is tried on: small models, data and tasks, good ones and ones with a fault."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import IterableDataset

from trainrun.interfaces import StepOutput

FEATURES, CLASSES, VOCABULARY = 5, 3, 11


def samples(count: int = 61, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples, one after the other."""

    def __init__(self, seed: int = 1) -> None:
        self._columns = samples(seed=seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*self._columns, strict=True)


class Shards(Stream):
    """The same samples, of which each reader has a part of its own."""

    def __init__(self, num_shards: int = 1, index: int = 0) -> None:
        super().__init__()
        self._place = slice(index, None, num_shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(num_shards, index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from list(super().__iter__())[self._place]


class Sequences:
    """Token lists of different lengths, each with one class."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, VOCABULARY, (1 + index % 7,), generator=generator)
        return {"input_ids": tokens, "label": tokens[0] % CLASSES}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(9)] if norm else []
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 9), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Counting(Net):
    """Counts its calls outside of any state_dict, and would act on them in the thousandth step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) if self.calls < 1000 else super().forward(x) / 2


class Moving(Net):
    """Each forward in training moves a buffer, as spectral norm does, and the output with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale += 0.001
        return super().forward(x) * self.scale


class Clocked(Net):
    """Keeps a time, and what it last saw: neither is lost by a resume."""

    def forward(self, x: Tensor) -> Tensor:
        self.at, self.last = time.perf_counter(), x.detach().clone()
        return super().forward(x)


def without_the_first(params: Any, lr: float) -> torch.optim.Optimizer:
    """An optimizer that never moves the first parameter."""
    return torch.optim.SGD(list(params)[1:], lr)


class Idle(Net):
    """One layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class AlwaysDrops(Net):
    """Dropout in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(dropout(x, 0.5))


class AcrossSamples(Net):
    """Every sample is moved by the others of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x - x.mean(0))


class Reader(nn.Module):
    """A mean over the real positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = self.weights(tokens, attention_mask)
        return self.head((self.tokens(tokens) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    def weights(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return torch.ones_like(tokens) if mask is None else mask.to(tokens.dtype)


class Leaky(Reader):
    """Padding takes part in the mean."""

    def weights(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return torch.ones_like(tokens)


class MeanTask:
    """A mean where a sum belongs."""

    def count(self, batch: Any) -> int:
        return len(batch[0])

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(cross_entropy(model(batch[0]), batch[1]), {})


class MeanInTraining(MeanTask):
    """A sum in evaluation alone."""

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        reduction = "mean" if model.training else "sum"
        return StepOutput(cross_entropy(model(batch[0]), batch[1], reduction=reduction), {})


class OwnNoise:
    """A transform with random numbers of its own, in the order of its calls."""

    calls = 0

    def __call__(self, sample: Any) -> Any:
        OwnNoise.calls += 1
        return sample[0] + OwnNoise.calls, sample[1]


class Noisy(Net):
    """Draws in its forward, in evaluation too, in the type that torch makes where none is named."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.1 * torch.randn(x.shape))


class Shifted(Net):
    """Makes a tensor of its own without a type, and draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + torch.ones(FEATURES))


class ForEights(Net):
    """Takes whole batches of 8 alone, and the last of an epoch."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in (8, 5):
            raise ValueError("eight samples, please")
        return self.layers(x)


class Single(Net):
    """Computes in float32 whatever the weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float())


def drawn(count: int = 64) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, FEATURES)
    return x, (x[:, 0] > 0).long()


class Sliced(Net):
    """Its first weight is a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        larger = torch.randn(9, 2 * FEATURES) * 0.3
        self.layers[0].weight = nn.Parameter(larger[:, :FEATURES])


class IgnoresStrides(torch.optim.SGD):
    """Walks over memory as a fused kernel does, whatever the strides are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                memory = param.as_strided((param.numel(),), (1,))
                memory.sub_(param.grad.flatten(), alpha=group["lr"])
