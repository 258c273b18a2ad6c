"""Models with lazy layers: as the same with its sizes written down, through a resume and an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from approved import approve_error
from quiet_runs import QUIET, train, weights
from torch import nn
from torch.utils.data import IterableDataset

from trainrun.cli.main import main


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(10))


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


class Words(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(17, 4), nn.Flatten(), nn.LazyLinear(10))


class Rows(IterableDataset[tuple[torch.Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter([(torch.zeros(8), 0)] * 64)


def of(model: str) -> tuple[str, ...]:
    return (f"model._target_=test_lazy_layers.{model}", "data.batch_size=64", *QUIET)


def test_the_sizes_come_from_the_data_and_nothing_else_changes(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = weights(train("plain", 6, *of("Plain")))
    train("part", 3, *of("Lazy"))
    lazy = weights(train("lazy", 6, *of("Lazy"), "ckpt_path=part"))
    assert all(torch.equal(value, lazy[name]) for name, value in plain.items())
    assert main(["evaluate", "lazy"]) == 0
    assert "val/acc" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [of("Words"), ("data=custom", "data.train._target_=test_lazy_layers.Rows", *of("Lazy"))]
)
def test_what_zeros_cannot_tell_is_asked_of_the_model(
    workdir: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer.max_steps=1", *words]) == 2
    told = capsys.readouterr().err
    approve_error(told)
    assert "call the model once at the end of its constructor" in told
