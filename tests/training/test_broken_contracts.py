"""Each contract of the closed list is broken once: its check says so, and says nothing where it is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from quiet_runs import QUIET
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import trainrun
from trainrun.data.same_samples import check_same_digests
from trainrun.errors import DataError, PluginError
from trainrun.interfaces import CONTRACTS, StepOutput

LENGTH, FEATURES = 64, 4


class Rows(Dataset[Any]):
    """Random rows with a class each, the same at every read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(LENGTH, FEATURES, generator=generator)
        self.generator = generator

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], index % 2


class OtherRowsAtEachRead(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + torch.randn(FEATURES, generator=self.generator), index % 2


class SequencesWithFieldsOfTheirOwn(Rows):
    def __getitem__(self, index: int) -> Any:
        sample = {"x": self.inputs[index, : 1 + index % 3], "y": index % 2}
        return sample | ({"more": 1} if index % 2 else {})


class Task:
    """Classification with a sum over the batch and its count."""

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, target = batch
        logits = model(inputs)
        return StepOutput(self.loss(logits, target), {"hits": self.hits(logits, target)})

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target, reduction="sum")

    def hits(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits.argmax(1) == target).sum()


class MeanLoss(Task):
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target)


class PairsOfRows(Task):
    def hits(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits[:, :1] - target).square().mean(1).sum()


class StepsInAnAttribute(Task):
    def __init__(self) -> None:
        self.steps = torch.zeros(1)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return super().loss(logits, target)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, 2)


class LayerWithoutGradient(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, 2)
        self.unused = nn.Parameter(torch.zeros(3))


def expanded() -> nn.Module:
    layer = nn.Linear(FEATURES, 2)
    layer.bias = nn.Parameter(torch.zeros(1).expand(2))
    return layer


class Broken(NamedTuple):
    """A run that breaks one contract. error: it ends the run; None: a line that begins with `key` says so."""

    key: str
    error: type[Exception] | None
    data: Callable[[], Any] = Rows
    model: Callable[[], nn.Module] = linear
    task: Callable[[], Any] = Task
    words: tuple[str, ...] = ()


BROKEN = {
    "loss": Broken("task", PluginError, task=MeanLoss),
    "metrics": Broken("task", PluginError, task=PairsOfRows),
    "samples": Broken("data.train", None, data=OtherRowsAtEachRead),
    "structure": Broken(
        "data", DataError, data=SequencesWithFieldsOfTheirOwn, words=("data.padding=longest",)
    ),
    "state": Broken("task", None, task=StepsInAnAttribute),
    "parameters": Broken("model", None, model=LayerWithoutGradient),
    "memory": Broken("model", PluginError, model=expanded),
}
WITHOUT_RUN = {"ranks": lambda: check_same_digests(["a", "b"], "data.train")}  # of one process


def train(broken: Broken) -> None:
    words = [
        *QUIET,
        "trainer.max_steps=4",
        "monitor.log_every_n_steps=2",
        "data.val=null",
        "data.batch_size=16",
    ]
    parts: dict[str, Any] = {"data": broken.data(), "model": broken.model(), "task": broken.task()}
    trainrun.train(*words, *broken.words, "output_dir=run", **parts)


def lines_of(name: str) -> list[str]:
    return Path("run", name).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "name", [contract.name for contract in CONTRACTS if contract.name not in WITHOUT_RUN]
)
def test_a_broken_contract_is_reported(name: str, workdir: Path) -> None:
    broken = BROKEN[name]
    if broken.error is not None:
        with pytest.raises(broken.error) as error:
            train(broken)
        assert str(error.value).startswith(broken.key)
        return
    train(broken)
    assert [line for line in lines_of("run.log") if line.startswith(f"{broken.key}: ")]


@pytest.mark.parametrize("name", WITHOUT_RUN)
def test_ranks_that_break_a_contract_are_refused(name: str) -> None:
    with pytest.raises(DataError):
        WITHOUT_RUN[name]()


def test_where_all_contracts_are_kept_nothing_is_reported(workdir: Path) -> None:
    train(Broken("", None))
    keys = {broken.key for broken in BROKEN.values()}
    assert [line for line in lines_of("run.log") if line.partition(": ")[0] in keys] == []
