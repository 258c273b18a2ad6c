"""`trainrun.train` with objects: the run that names give, weights that come back, a resume, and refusals."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from approved import approve, approve_error, refused
from quiet_runs import QUIET
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainrun
from trainrun.cli.main import main
from trainrun.interfaces import StepOutput
from trainrun.runs import api

Pair = tuple[torch.Tensor, torch.Tensor]


class Points(Dataset[Pair]):
    def __init__(self, count: int) -> None:
        self.x, self.y = points(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Pair:
        return self.x[index], self.y[index]


class Doubled:
    """A task of this test that keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def step(self, model: nn.Module, batch: Any, info: Any = None) -> StepOutput:
        self.seen.append(info.step)
        return StepOutput(2 * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"))


def points(count: int) -> Pair:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return x, (x[:, 0] > 0).long()


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().items(), right.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def fit(*words: str, **objects: Any) -> trainrun.Run:
    return trainrun.train("trainer.max_epochs=2", "seed=1", *QUIET, *words, **objects)


FILE = """
import torch
from torch import nn

def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

def points(count):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    return x, (x[:, 0] > 0).long()
"""


def test_objects_train_as_what_is_named_and_the_network_has_the_weights(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("named_parts.py").write_text(FILE)
    model = net()
    mine = fit(model=model, data=points(200), val=points(60), test=points(40))
    named = fit(
        "model=named_parts.net", "data=custom", "data.train._target_=named_parts.points", "+data.train.count=200",
        "+data.val._target_=named_parts.points", "+data.val.count=60",
        "+data.test._target_=named_parts.points", "+data.test.count=40",
    )  # fmt: skip
    sys.modules.pop("named_parts")
    assert mine.status["value"] == named.status["value"] > 0.6
    assert same(model, named.load_model("last"))
    assert same(model, mine.load_model("last"))
    assert not same(model, net())
    assert model.training
    assert api.GIVEN == {}


@pytest.mark.parametrize("part", ["0", ""])
def test_a_network_in_evaluation_mode_is_trained_in_training_mode(
    workdir: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, model = net(), net()  # as `from_pretrained` gives one
    inner = nn.Sequential(model)
    inner.get_submodule(part).eval()
    fit(model=nn.Sequential(usual), data=points(64))
    assert "evaluation mode" not in capsys.readouterr().out
    fit(model=inner, data=points(64))
    assert same(usual, model)
    assert f"model: {part or 'Sequential'} and " in capsys.readouterr().out


def test_validation_sets_with_names(workdir: Path) -> None:
    sets = {"day": points(60), "night": Points(40)}
    run = fit("checkpoint.monitor=val/night/acc", "output_dir=run", model=net(), data=points(200), val=sets)
    metrics = run.metrics[-1]["summary"]["metrics"]
    assert metrics.keys() == {"val/day/loss", "val/day/acc", "val/night/loss", "val/night/acc"}
    assert run.status["value"] == metrics["val/night/acc"]
    with refused(trainrun.TrainrunError):
        fit("output_dir=run", model=net(), data=points(200), val=sets["day"])


def test_a_task_is_the_callers_own_and_is_left_as_it_was(workdir: Path) -> None:
    task = Doubled()
    for _ in range(2):
        fit("checkpoint.monitor=val/loss", task=task, model=net(), data=points(64), val=points(64))
    assert task.seen
    assert "step" not in vars(task)


def test_a_run_goes_on_with_the_like_and_says_what_is_another(workdir: Path) -> None:
    whole, part, rest = net(), net(), net()
    fit(model=whole, data=points(200))
    fit("trainer.max_steps=5", "output_dir=part", model=part, data=points(200))
    assert not same(whole, part)
    fit("ckpt_path=part", model=rest, data=points(200))
    assert same(whole, rest)
    with refused(trainrun.TrainrunError):
        fit("ckpt_path=part", model=net(), data=points(300))
    with refused(trainrun.TrainrunError):
        fit("ckpt_path=part", model=nn.Linear(8, 2), data=points(200))
    found = net()
    fit("trainer.max_steps=5", "output_dir=part", model=found, data=points(200))  # finished already
    assert same(found, part)


@pytest.mark.parametrize("word", ["trainer.ema=true", "checkpoint.enabled=false"])
def test_a_run_that_is_finished_gives_the_same_weights_again(
    workdir: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    first, again = net(), net()
    for model in (first, again):
        assert fit(word, "output_dir=run", model=model, data=points(200)).status["state"] == "done"
    saved = "ema" in word
    assert same(again, first if saved else net())
    assert ("without a checkpoint; the network is as it was" in capsys.readouterr().out) is not saved


def test_another_process_gives_the_network_again(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    run = fit("output_dir=run", model=model, data=points(200), val=points(60))
    with refused(trainrun.TrainrunError):
        trainrun.load_model("run")
    with refused(trainrun.TrainrunError):
        trainrun.load_model("run", model=nn.Linear(8, 2))
    fresh = net()
    assert same(trainrun.load_model("run", "last", model=fresh), model)
    assert same(fresh, net())
    assert main(["evaluate", "run"]) != 0
    approve_error(capsys.readouterr().err)
    assert run.folder == Path("run").absolute()


def test_a_network_whose_names_change_is_left_as_it_was(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    words = (
        "transform.lora._target_=trainrun.transform.lora.lora",
        "transform.lora.target=3",
        "transform.lora.rank=2",
    )
    run = fit(*words, model=model, data=points(64))
    assert same(model, net())
    assert "run.load_model() gives the trained one" in capsys.readouterr().out
    assert run.load_model("last")(torch.zeros(1, 8)).shape == (1, 2)


@pytest.mark.parametrize(
    ("words", "objects"),
    [
        ((), {"model": 3}),
        ((), {"model": nn.Linear}),
        ((), {"task": "regression"}),
        ((), {"data": ([[1.0]] * 8, [0] * 8)}),
        ((), {"data": DataLoader(TensorDataset(*points(8)), batch_size=4)}),
        ((), {"data": DataLoader(TensorDataset(*points(8)), batch_sampler=[[0, 1], [2]])}),
        ((), {"val": points(8)}),
        ((), {"data": points(8), "val": {"at night": points(8)}}),
        (("model=mlp",), {"model": net()}),
        (("data.train._target_=a.b",), {"data": points(8)}),
        (("parallel=ddp",), {"model": net(), "data": points(8)}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(workdir: Path, words: tuple[str, ...], objects: dict[str, Any]) -> None:
    with pytest.raises(trainrun.TrainrunError) as error:
        fit(*words, **objects)
    approve(str(error.value))
    assert api.GIVEN == {}


@pytest.mark.process
def test_a_script_with_classes_of_its_own_uses_workers(workdir: Path) -> None:
    Path("script.py").write_text(
        FILE
        + """
class Points(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x, self.y = points(count)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], self.y[index]

if __name__ == "__main__":
    import trainrun
    words = "trainer.max_epochs=1", "data.num_workers=2", "monitor.plots=false"
    run = trainrun.train(*words, model=net(), data=Points(64))
    print(run.status["state"])
"""
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"


def process_state() -> dict[str, Any]:
    """What a notebook's next cell would notice."""
    return {
        "cwd": os.getcwd(), "path": list(sys.path), "python": random.getstate(), "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(), "threads": torch.get_num_threads(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []), "gc": (gc.isenabled(), gc.get_freeze_count()),
        "matmul": torch.get_float32_matmul_precision(), "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "dtype": torch.get_default_dtype(),
        "streams": (sys.stdout, sys.stderr), "hook": sys.excepthook, "filters": list(warnings.filters),
    }  # fmt: skip


class Interrupted(Doubled):
    """Ctrl-C comes in the third step."""

    def step(self, model: nn.Module, batch: Any, info: Any = None) -> StepOutput:
        if len(self.seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(model, batch, info)


class Broken(Doubled):
    def step(self, model: nn.Module, batch: Any, info: Any = None) -> StepOutput:
        raise ValueError("broken")


@pytest.mark.process
@pytest.mark.usefixtures("real_collector")
@pytest.mark.parametrize(("task", "state"), [(Doubled, "done"), (Interrupted, "stopped"), (Broken, "failed")])
def test_the_process_is_left_as_it_was(workdir: Path, task: type, state: str) -> None:
    words = [
        "trainer.deterministic=true",
        "trainer.num_threads=2",
        "precision.matmul=medium",
        "output_dir=run",
    ]
    words += ["trainer.detect_anomaly=true", "trainer.check_task=false"]
    model, data = net(), points(200)  # `net` seeds
    before = process_state()
    with contextlib.suppress(ValueError, trainrun.TrainrunError):
        fit(*words, model=model, data=data, task=task())
    after = process_state()
    assert {name for name in before if before[name] != after[name]} == set()
    assert trainrun.load_run("run").status["state"] == state
    assert bool([*Path("run/checkpoints").glob("step-*")]) == (state != "failed")


def test_a_network_with_lazy_layers_takes_its_sizes_from_the_data(workdir: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2))
    data = (torch.randn(64, 3), torch.randint(0, 2, (64,)))
    trainrun.train("trainer.max_steps=2", "output_dir=run", model=model, data=data)
    assert model[0].weight.shape == (5, 3)


def test_a_network_with_an_expanded_buffer_gets_the_weights_back(workdir: Path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("scale", torch.ones(1).expand(2))
    data = (torch.randn(64, 3), torch.randint(0, 2, (64,)))
    before = model.weight.clone()
    trainrun.train("trainer.max_steps=2", "output_dir=run", model=model, data=data)
    assert not torch.equal(model.weight, before)


def test_real_numbers_as_targets_choose_the_task(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.arange(40).unsqueeze(1) / 40
    assert api.describe_real_targets((x, x.sqrt()))
    for targets in ((x[:, 0] > 0.5).float(), (40 * x[:, 0]).round(), torch.arange(40), x.expand(40, 3)):
        assert not api.describe_real_targets((x, targets))
    task = "trainrun.task.regression.Regression"
    run = trainrun.train("trainer.max_steps=1", data=(x, x[:, 0]))
    assert run.config.task["_target_"] == task
    assert "40 different real numbers" in capsys.readouterr().err
    with pytest.raises(trainrun.TrainrunError, match="real numbers"):
        trainrun.train("trainer.max_steps=1", "model.num_classes=40", data=(x, x[:, 0]))


def test_hooks_of_a_network_belong_to_the_network_that_is_trained(workdir: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    model.register_parameter("factor", nn.Parameter(torch.ones(2)))
    model.register_forward_hook(lambda module, inputs, output: output * model.factor)
    model[0].weight.register_hook(torch.zeros_like)
    first, factor = model[0].weight.clone(), model.factor.clone()
    fit("optimizer.weight_decay=0", model=model, data=points(40))
    assert torch.equal(model[0].weight, first)
    assert not torch.equal(model.factor, factor)
