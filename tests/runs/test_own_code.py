"""A network, data, a loss, a task and a loop of one's own, from the folder they lie in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from approved import approve_error
from quiet_runs import QUIET
from things import status_of

import trainrun as trainrun_of_python
from trainrun.cli.main import main

pytestmark = pytest.mark.process

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16, depth=1):
        super().__init__()
        layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)
"""
LAZY_NET = """
import torch
from torch import nn

class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None)
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(64)
        return self.last(x.flatten(1) * self.mask)
"""
DATA = """
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

class Digits(Dataset):
    def __init__(self, train=True):
        x, y = load_digits(return_X_y=True)
        keep = slice(0, 1400) if train else slice(1400, None)
        self.x, self.y = x[keep] / 16, y[keep]  # float64, as NumPy has it

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]
"""
TASK = """
import torch
from torch.nn import functional
from trainrun.interfaces import StepOutput

def per_sample(logits, target):
    return functional.cross_entropy(logits, target, reduction="none")

class TopTwo:
    monitor = "top2"

    def count(self, batch):
        return len(batch[1])

    def step(self, model, batch):
        x, y = batch
        logits = model(x)
        loss = functional.cross_entropy(logits, y, reduction="sum")
        return StepOutput(loss, {"top2": lambda: (logits.topk(2).indices == y[:, None]).any(1).sum()})

def fit(run, state):
    from trainrun.training import loop
    run.monitors.note("my own loop")
    return loop.fit(run, state)
"""
SHORT = [*QUIET, "trainer.max_epochs=2"]


@pytest.fixture
def project(workdir: Path) -> Iterator[Path]:
    (workdir / "my_net.py").write_text(NET)
    (workdir / "my_data.py").write_text(DATA)
    (workdir / "my_task.py").write_text(TASK)
    (workdir / "conf" / "model").mkdir(parents=True)
    (workdir / "conf" / "model" / "mine.yaml").write_text("# my network\n_target_: my_net.Net\nwidth: 32\n")
    yield workdir
    for name in ("my_net", "my_data", "my_task"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "words",
    [
        ["model=mine", "model.depth=3"],
        ["model=my_net.Net", "model.width=24"],
        [
            "model=mine",
            "data.train._target_=my_data.Digits",
            "data.val._target_=my_data.Digits",
            "data.val.train=false",
        ],
        ["model=mine", "task.loss._target_=my_task.per_sample", "task.loss._partial_=true"],
        ["model=mine", "loop._target_=my_task.fit"],
        [
            "model=mine",
            "optimizer._target_=torch.optim.RMSprop",
            "optimizer.lr=1e-3",
            "scheduler._target_=torch.optim.lr_scheduler.ExponentialLR",
            "scheduler.gamma=0.999",
        ],
    ],
    ids=" ".join,
)
def test_ones_own_code_trains(project: Path, words: list[str]) -> None:
    assert main([*words, *SHORT, "output_dir=run"]) == 0
    assert status_of(project)["value"] > 0.3  # two epochs of a small network: far from chance


def test_a_task_of_ten_lines_names_its_own_metric(project: Path) -> None:
    assert main(["model=mine", "task._target_=my_task.TopTwo", *SHORT, "output_dir=run"]) == 0
    status = status_of(project)
    assert status["monitor"] == "val/top2"
    assert status["value"] > 0.7
    assert main(["evaluate", "run"]) == 0
    assert main(["predict", "run"]) == 0
    assert (project / "run" / "predictions-val.csv").read_text().startswith("index,output_0,")


def test_ones_own_code_trains_on_two_ranks(project: Path) -> None:
    words = [
        "model=mine",
        "data.train._target_=my_data.Digits",
        "data.val._target_=my_data.Digits",
        "parallel=ddp",
    ]
    assert main([*words, *SHORT, "output_dir=run"]) == 0
    assert status_of(project)["value"] > 0.5


def test_data_that_is_drawn_as_it_is_built_is_the_same_in_an_evaluation(project: Path) -> None:
    (project / "my_data.py").write_text(
        "import torch\ndef points(count):\n    x = torch.randn(count, 64)\n    return x, (x.sum(1) > 0).long()\n"
    )
    words = [f"data.{part}._target_=my_data.points" for part in ("train", "val")]
    words += ["data.train.count=200", "data.val.count=60", "data.num_classes=2", "data=custom", "seed=3"]
    assert main([*words, *SHORT, "output_dir=run"]) == 0
    assert main(["evaluate", "run", "--which", "last"]) == 0
    found = json.loads((project / "run" / "evaluation-val.json").read_text())
    assert found["val/loss"] == status_of(project)["metrics"]["val/loss"]


def test_a_buffer_that_the_first_forward_makes_is_resumed_and_loaded(project: Path) -> None:
    (project / "my_net.py").write_text(LAZY_NET)
    words = ["model=my_net.Lazy", "trainer.ema=true", *QUIET, "output_dir=run"]
    assert main(words) == 0
    assert main(["resume", "run", "trainer.max_epochs=3"]) == 0
    assert main(["evaluate", "run", "--which", "last"]) == 0
    assert trainrun_of_python.load_run("run").load_model("last").mask.tolist() == [1] * 64


def test_nothing_is_held_out_of_data_of_ones_own(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=mine", "data.train._target_=my_data.Digits", "trainer.max_steps=2", *QUIET]
    assert main([*words, "data.train.val_fraction=0.2"]) == 2
    approve_error(capsys.readouterr().err)
    assert main([*words, "output_dir=run"]) == 0
    assert "no validation data" in capsys.readouterr().out
    assert main([*words, "data.folds=5", "data.fold=0", "output_dir=other"]) == 0
    assert "no validation data" not in capsys.readouterr().out


BATCHES = """
import collections, dataclasses, torch
from torch.nn.functional import cross_entropy
from trainrun.interfaces import StepOutput
from torch.utils.data import default_collate

class Named(collections.UserDict):
    def to(self, device):
        return Named({name: value.to(device) for name, value in self.items()})

@dataclasses.dataclass
class Both:
    x: torch.Tensor
    y: torch.Tensor
    def to(self, device):
        return Both(self.x.to(device), self.y.to(device))

def named(samples):
    x, y = default_collate(samples)
    return Named(x=x, y=y)

def both(samples):
    return Both(*default_collate(samples))

class Task:
    def count(self, batch):
        return len(batch.y)
    def step(self, model, batch):
        return StepOutput(cross_entropy(model(batch.x), batch.y, reduction="sum"))
    def predict(self, model, batch):
        return {"prediction": model(batch.x).argmax(1), "target": batch.y}

class Broken(Task):
    def predict(self, model, batch):
        return {"prediction": model(batch[0])}
"""


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["data.collate_fn._target_=my_batches.named"], ""),
        (["data.collate_fn._target_=my_batches.both", "task=my_batches.Task"], ""),
        (["data.collate_fn._target_=my_batches.both", "task=my_batches.Broken"], "TypeError"),
    ],
)
def test_a_batch_of_any_form_has_a_report(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], fault: str
) -> None:
    (project / "my_batches.py").write_text(BATCHES)
    short = [
        "trainer.max_steps=2",
        "data.collate_fn._partial_=true",
        "monitor.plots=true",
        "monitor.hardware=false",
    ]
    assert main([*words, *short, "model=mine", "data.transform=null", "output_dir=run"]) == 0
    assert status_of(project)["state"] == "done"
    told = capsys.readouterr()
    assert fault in told.out + told.err
    rows = (project / "run/metrics.jsonl").read_text()
    assert ('"confusion"' in rows) == (not fault)
