"""A run begins with the weights of a torch file: `init_from=theirs.pt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from approved import approve_error
from quiet_runs import QUIET

import trainrun
from trainrun.checkpoint.weights import SAFE_TORCH, read_torch_weights
from trainrun.cli.main import main
from trainrun.errors import CheckpointError
from trainrun.model.mlp import Mlp

pytestmark = [
    pytest.mark.train,
    pytest.mark.skipif(
        tuple(int(part) for part in torch.__version__.split(".")[:2]) < SAFE_TORCH,
        reason="this torch is refused, since its reader is not safe",
    ),
]
MODEL = ["model.hidden=[8]", *QUIET]
State = dict[str, torch.Tensor]


@pytest.fixture
def weights(workdir: Path) -> State:
    """Of the network that MODEL builds; in theirs.pt, beside other values."""
    model = Mlp(in_shape=[1, 8, 8], num_classes=10, hidden=[8])
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    torch.save({"state_dict": model.state_dict(), "epoch": 3, "optimizer": optimizer}, "theirs.pt")
    return model.state_dict()


def test_a_run_begins_with_the_weights_of_a_torch_file(weights: State) -> None:
    run = trainrun.train("init_from=theirs.pt", "trainer.max_steps=0", *MODEL)
    begun = run.load_model("last").state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in begun.items())


@pytest.mark.parametrize("ending", ["pth", "bin", "ckpt"])
@pytest.mark.parametrize("name", [None, "model", "model_state_dict", "net"])
def test_the_dict_of_tensors_is_recognized(name: str | None, ending: str, weights: State) -> None:
    path = Path(f"w.{ending}")
    torch.save(weights if name is None else {name: weights, "step": 1, "extra": "text"}, path)
    found, _ = read_torch_weights(path)
    assert found.keys() == weights.keys()


@pytest.mark.parametrize(
    "contents",
    [{"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}, {"epoch": 3}, {"w": torch.ones(1), "n": 1}, [1]],
)
def test_a_file_in_which_the_weights_are_not_clear_is_refused(contents: Any, workdir: Path) -> None:
    torch.save(contents, "w.pt")
    with pytest.raises(CheckpointError):
        read_torch_weights(Path("w.pt"))


def test_weights_that_do_not_fit_are_refused_by_name(
    weights: State, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init_from=theirs.pt", "model.hidden=[9]", *QUIET]) == 2
    approve_error(capsys.readouterr().err)
    assert main(["init_from=theirs.pt", "ckpt_path=x", *MODEL]) == 2
    approve_error(capsys.readouterr().err)


def test_a_run_from_a_torch_file_resumes_bit_for_bit_and_without_the_file(weights: State) -> None:
    words = ["init_from=theirs.pt", "data.batch_size=64", *MODEL]
    whole = trainrun.train(*words, "trainer.max_steps=6")
    part = trainrun.train(*words, "trainer.max_steps=3")
    Path("theirs.pt").unlink()
    assert main(["resume", str(part.folder), "trainer.max_steps=6"]) == 0
    one, other = (run.load_model("last").state_dict() for run in (whole, part))
    assert all(torch.equal(one[name], other[name]) for name in one)
