"""A run that begins with the weights of another one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainrun
from trainrun.checkpoint import weights
from trainrun.checkpoint.load import read_checkpoint
from trainrun.checkpoint.weights import choose_evaluated_weights
from trainrun.cli.main import main
from trainrun.model.mlp import Mlp

pytestmark = pytest.mark.train

WORDS = [
    "model.hidden=[8]", "monitor.hardware=false", "monitor.plots=false", "monitor.progress_bar=false",
    "trainer.num_threads=1", "checkpoint.every_n_train_steps=2", "checkpoint.keep_last=9",
    "trainer.val_check_interval=2",
]  # fmt: skip
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, frozen=True):
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.body.requires_grad_(not frozen)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())
"""


@pytest.fixture
def source(workdir: Path) -> Path:
    """Checkpoints at 2, 4, 6 and 8; the rate breaks what was learnt in the end, so that an earlier one is best."""
    words = [
        "optimizer=sgd",
        "optimizer.lr=0.5",
        "scheduler=step",
        "scheduler.step_size=4",
        "scheduler.gamma=100",
    ]
    assert main([*WORDS, *words, "trainer.max_steps=8", "checkpoint.save_top_k=9", "output_dir=source"]) == 0
    return workdir / "source"


def weights_at(folder: Path) -> dict[str, Tensor]:
    return choose_evaluated_weights(read_checkpoint(folder))[0]


def begun(*words: str) -> dict[str, Tensor]:
    run = trainrun.train(*WORDS, "trainer.max_steps=0", *words)
    return run.load_model("last").state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_begins_with_the_best_of_another(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = trainrun.load_run(source).status["best_step"]
    assert best < 8
    found = begun("init_from=source", "output_dir=next")
    assert same(found, weights_at(source / "checkpoints" / f"step-{best:08d}"))
    assert f"weights: 4 tensors of source (step-{best:08d}, the best)" in capsys.readouterr().out
    assert trainrun.load_run("next").config.init_from == "source"


def test_or_with_the_last_where_none_is_the_best(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "data.val=null", "trainer.max_steps=2", "output_dir=plain"]) == 0
    assert same(begun("init_from=plain"), weights_at(Path("plain/checkpoints/step-00000002")))
    assert "of plain (step-00000002, the last)" in capsys.readouterr().out


def test_a_resume_does_not_read_them_again(source: Path) -> None:
    whole = trainrun.train(*WORDS, "init_from=source", "trainer.max_steps=4", "output_dir=whole")
    part = trainrun.train(*WORDS, "init_from=source", "trainer.max_steps=2", "output_dir=part")
    shutil.rmtree(source)
    assert main(["resume", str(part.folder), "trainer.max_steps=4"]) == 0
    assert same(*[weights_at(run.folder / "checkpoints" / "step-00000004") for run in (whole, part)])


def test_all_that_does_not_fit_is_listed(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS[1:], "model.hidden=[9,9,9]", "init_from=source"]) == 2
    said = capsys.readouterr().err
    assert "init_from=source: checkpoint step-" in said
    assert len(re.findall(r"layers\.\d\.(?:weight|bias) is", said)) == 8
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_what_holds_no_weights_is_refused(workdir: Path, refuses: Callable[..., None], place: str) -> None:
    refuses([*WORDS, f"init_from={place}"])


def test_weights_that_were_frozen_in_the_first_run_train_in_the_second(workdir: Path) -> None:
    (workdir / "frozen_net.py").write_text(NET)
    words = [word for word in WORDS if not word.startswith("model.")] + ["model._target_=frozen_net.Net"]
    assert main([*words, "trainer.max_steps=2", "output_dir=first"]) == 0
    more = [*words, "model.frozen=false", "trainer.max_steps=2"]
    assert main([*more, "init_from=first", "output_dir=third"]) == 0
    one, other = (weights_at(Path(name, "checkpoints", "step-00000002")) for name in ("first", "third"))
    assert not torch.equal(one["body.weight"], other["body.weight"])


def test_all_ranks_take_what_rank_0_chooses(
    source: Path, ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the other run goes on meanwhile: whoever looks next finds another one the best."""
    steps = iter((2, 4, 6))
    monkeypatch.setattr(weights, "find_best_checkpoint", lambda folder: folder / f"step-{next(steps):08d}")

    def work(parallel: Any) -> dict[str, Tensor]:
        model = Mlp(in_shape=[1, 8, 8], num_classes=10, hidden=[8])
        weights.load_initial(model, "source", parallel)
        return model.state_dict()

    first = weights_at(source / "checkpoints" / "step-00000002")
    found = ranks(2, work)
    assert [isinstance(one, dict) and same(one, first) for one in found] == [True, True], found
