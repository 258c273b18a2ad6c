"""Networks, data and listeners with a fault in them that can be switched on: what `bench_diagnose.py` plants."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainrun.interfaces import StepOutput
from trainrun.task.classification import Classification
from trainrun.task.language_modeling import LanguageModeling

torch.set_flush_denormal(True)  # batches of one are soon slowed by numbers next to 0


class Table(Dataset[tuple[Tensor, Tensor]]):
    """Rows of random numbers. wait: seconds that an item sleeps; compute: that it works in Python, holding the GIL;
    file: seconds that one item of every 64 sleeps, as a slow disk that is read ahead."""

    def __init__(self, rows: int = 20_000, width: int = 512, wait: float = 0.0, compute: float = 0.0,
                 file: float = 0.0) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self._rows = torch.randn(rows, width, generator=generator)
        self._targets = torch.randint(10, (rows,), generator=generator)
        self._wait, self._compute, self._file = wait, compute, file

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._wait:
            time.sleep(self._wait)
        if self._file and index % 64 == 5:  # not where sequences are long, which come together
            time.sleep(self._file)
        end = time.perf_counter() + self._compute
        while self._compute and time.perf_counter() < end:
            sum(range(100))
        return self._rows[index], self._targets[index]


class Pictures(Table):
    """The same as pictures of one channel."""

    def __init__(self, rows: int = 6_000, side: int = 28, **faults: float) -> None:
        super().__init__(rows, side * side, **faults)
        self._side = side

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, target = super().__getitem__(index)
        return row.view(1, self._side, self._side), target


class Sequences(Dataset[dict[str, Tensor]]):
    """Tokens of many lengths. longest: of a few; the others are short, so that most of a batch is padding."""

    def __init__(self, rows: int = 4_000, usual: int = 128, longest: int = 128, **faults: float) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(usual // 2, usual, (rows,), generator=generator)
        lengths[::16] = longest
        self.lengths = lengths.tolist()
        self._tokens = torch.randint(1, 256, (rows, longest), generator=generator)
        self._table = Table(rows, 1, **faults)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._table[index]
        tokens = self._tokens[index, : self.lengths[index]]
        return {"input_ids": tokens, "target": tokens.clone()}


class Wide(nn.Module):
    """Linear layers. island: the middle ones leave mixed precision."""

    def __init__(self, width: int = 512, hidden: int = 1024, layers: int = 4, island: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.middle = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.last = nn.Linear(hidden, 10)
        self.island = island

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        with torch.autocast(
            x.device.type, enabled=not self.island and torch.is_autocast_enabled(x.device.type)
        ):
            for layer in self.middle:
                x = layer(x.float() if self.island else x).relu()
        return self.last(x)  # type: ignore[no-any-return]


class Waiting(nn.Module):
    """A layer whose training forward takes so many seconds, as that of a GPU: no core computes meanwhile."""

    def __init__(self, seconds: float = 0.03, width: int = 64) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(width, 10)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        out: Tensor = self.layer(rows)
        return out


class AskingClassification(Classification):
    """Reads the loss in every step, for which a GPU would have to come to its end."""

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        return asked(super().step(model, batch))


class AskingLanguageModeling(LanguageModeling):
    """The same for tokens."""

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        return asked(super().step(model, batch))


def asked(out: StepOutput) -> StepOutput:
    out.loss_sum.item()
    return out


class SlowListener:
    """A monitor that writes to something slow. seconds: at every log point."""

    def __init__(self, seconds: float = 0.02) -> None:
        self._seconds = seconds

    def on_start(self, facts: Any, step: int) -> None: ...

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        time.sleep(self._seconds)

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None: ...

    def on_note(self, text: str) -> None: ...

    def on_end(self, summary: Any) -> None: ...

    def close(self) -> None: ...
