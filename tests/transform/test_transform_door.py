"""`transform.NAME` in real runs: applied at every start and at every load, in order; LoRA and freezing through it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from approved import approve_error
from quiet_runs import QUIET

from trainrun import load_run
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.cli.main import main
from trainrun.transform.lora import LoraLinear

pytestmark = pytest.mark.process

OWN = """
import os
import signal

from torch import nn


class Stops:
    def on_step(self, step, epoch, row):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)


def tagged(model, tag):
    model.tags = [*getattr(model, "tags", []), tag]
    return model


def forgets(model):
    model.tags = []


def wrapped(model):
    return nn.Sequential(model, nn.Linear(10, 10))
"""
SHORT = ["data.batch_size=128", "monitor.log_every_n_steps=1", *QUIET]
LORA = [
    "transform=lora", "transform.lora.rank=4",
    "transform.lora.target=[layers.1,layers.3]", "init_from=base",
]  # fmt: skip


@pytest.fixture
def base(workdir: Path) -> dict[str, torch.Tensor]:
    """The weights of a run that was trained in full."""
    (workdir / "own.py").write_text(OWN)
    assert main([*SHORT, "trainer.max_epochs=2", "output_dir=base"]) == 0
    return tree_of("base")["model"]


def tree_of(run: str) -> dict[str, dict[str, torch.Tensor]]:
    tree: dict[str, dict[str, torch.Tensor]] = read_checkpoint(
        resolve_checkpoint(Path(run, "checkpoints"), "last")
    ).shared
    return tree


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["trainer.ema=true"],
        ["optimizer=muon", "trainer.gradient_clip_val=1.0", "transform.lora.dropout=0.1"],
    ],
)
def test_lora_trains_its_matrices_alone_from_given_weights_and_is_resumed(
    base: dict[str, torch.Tensor], more: list[str]
) -> None:
    words = [
        *SHORT,
        *LORA,
        *more,
        "trainer.max_epochs=1",
        "optimizer.weight_decay=0.1",
        "monitor.summary=true",
    ]
    assert main([*words, "output_dir=whole"]) == 0
    trained = 4 * (64 + 256 + 256 + 128)
    assert f"transform.lora: {trained:,} parameters trained" in Path("whole", "run.log").read_text()
    tree = tree_of("whole")
    model = tree["model"]
    assert all(
        torch.equal(model[f"{name}.base.weight"], base[f"{name}.weight"]) for name in ("layers.1", "layers.3")
    )
    assert torch.equal(model["layers.5.weight"], base["layers.5.weight"])  # frozen: no update, and no decay
    names = {f"{layer}.{half}" for layer in ("layers.1", "layers.3") for half in ("lora_a", "lora_b")}
    assert names <= {name for group in tree["optimizer"]["groups"] for name in group["params"]}
    assert set(tree["optimizer"]["state"]) <= names  # of the frozen ones the optimizer keeps nothing
    assert all(model[name].abs().sum() > 0 for name in names)
    assert main([*words, "monitor.stop._target_=own.Stops", "output_dir=part"]) == 75
    assert main(["resume", "part"]) == 0
    assert same(tree_of("part")["model"], model)
    loaded = load_run("whole").load_model("last")
    assert isinstance(loaded.layers[1], LoraLinear)
    x = torch.rand(5, 1, 8, 8)
    expected = loaded(x)
    merged = load_run("whole").load_model("last", merge=True)
    assert list(merged.state_dict()) == list(base)
    torch.testing.assert_close(merged(x), expected)


def test_evaluation_and_prediction_go_through_it(base: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, *LORA, "trainer.max_epochs=1", "output_dir=run"]) == 0
    best = load_run("run").status["value"]
    capsys.readouterr()
    assert main(["evaluate", "run"]) == 0
    assert f"val/acc {best:.5g}" in capsys.readouterr().out
    assert main(["predict", "run", "--out", "rows.csv"]) == 0


def test_transforms_are_applied_in_the_order_of_the_config_at_a_load_too(base: object) -> None:
    words = [
        "transform.b=own.tagged",
        "transform.b.tag=first",
        "transform.a=own.tagged",
        "transform.a.tag=second",
    ]
    assert main([*SHORT, *words, "trainer.max_steps=1", "output_dir=run"]) == 0
    assert load_run("run", trust=True).load_model("last").tags == ["first", "second"]
    assert main([*SHORT, "transform.more=own.wrapped", "trainer.max_steps=1", "output_dir=more"]) == 0
    assert len(load_run("more", trust=True).load_model("last")) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["transform.mine=own.forgets"],
        ["transform.mine=own.tagged"],
        ["transform.mine=own.tagged", "transform.mine.tga=1"],
        [*LORA[:1], "transform.lora.target=layers.9"],
        ["transform=lora", "transform.lora.rank=0"],
        ["transform=lora", "transform.lora.train=head.*"],
        ["transform=lara"],
        ["transform.lora.rank=4"],
        ["transform.lora=1"],
    ],
)  # fmt: skip
def test_what_is_no_transform_is_refused(
    workdir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "own.py").write_text(OWN)
    assert main([*SHORT, *words]) == 2
    approve_error(capsys.readouterr().err)
