"""`trainrun import`, and runs that begin with what it made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from approved import approve_error, refused
from quiet_runs import QUIET

import trainrun
from trainrun.checkpoint.load import read_tensors
from trainrun.cli.import_command import TORCH_NEEDED, write_safetensors
from trainrun.cli.main import main
from trainrun.errors import CheckpointError
from trainrun.model.mlp import Mlp

pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_NEEDED,
    reason="the command refuses this torch, whose reader is not safe",
)
MODEL = ["model.hidden=[8]", *QUIET]


@pytest.fixture
def weights(workdir: Path) -> dict[str, torch.Tensor]:
    """Of the network that MODEL builds; in theirs.pt, below the word state_dict."""
    model = Mlp(in_shape=[1, 8, 8], num_classes=10, hidden=[8])
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, workdir / "theirs.pt")
    return model.state_dict()


def test_a_torch_file_becomes_weights_of_a_run(
    weights: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "theirs.pt", "w.safetensors", "--untrusted", "--key", "state_dict"]) == 0
    assert "4 tensors" in capsys.readouterr().out
    found = read_tensors(Path("w.safetensors"))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    run = trainrun.train("init_from=w.safetensors", "trainer.max_steps=0", *MODEL)
    assert all(
        torch.equal(value, weights[name]) for name, value in run.load_model("last").state_dict().items()
    )


def test_the_word_that_leads_to_the_weights_is_named(weights: dict[str, torch.Tensor]) -> None:
    path = Path("theirs.pt")
    for keys, said in (
        ([], "choose with --key state_dict"),
        (["model"], "the file has 'state_dict', 'epoch'"),
    ):
        with pytest.raises(CheckpointError, match=said):
            write_safetensors(path, Path("out.safetensors"), keys)
    assert not Path("out.safetensors").exists()


def test_numbers_of_one_byte_are_imported_and_those_of_sixteen_refused(workdir: Path) -> None:
    narrow = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    torch.save({"w": narrow}, "narrow.pt")
    assert write_safetensors(Path("narrow.pt"), Path("narrow.safetensors"), [])["not_finite"] == ["w"]
    assert read_tensors(Path("narrow.safetensors"))["w"].dtype is torch.float8_e4m3fn
    torch.save({"w": torch.ones(3, dtype=torch.complex128)}, "wide.pt")
    with refused(CheckpointError):
        write_safetensors(Path("wide.pt"), Path("wide.safetensors"), [])


def test_what_does_not_fit_is_refused_by_name(
    weights: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    write_safetensors(Path("theirs.pt"), Path("w.safetensors"), ["state_dict"])
    assert main(["init_from=w.safetensors", "model.hidden=[9]", *QUIET]) == 2
    approve_error(capsys.readouterr().err)
    assert main(["init_from=w.safetensors", "ckpt_path=x", *MODEL]) == 2
    approve_error(capsys.readouterr().err)


def test_a_run_from_weights_resumes_bit_for_bit_and_without_the_file(
    weights: dict[str, torch.Tensor],
) -> None:
    write_safetensors(Path("theirs.pt"), Path("w.safetensors"), ["state_dict"])
    words = ["init_from=w.safetensors", "data.batch_size=64", *MODEL]
    whole = trainrun.train(*words, "trainer.max_steps=6")
    part = trainrun.train(*words, "trainer.max_steps=3")
    Path("w.safetensors").unlink()
    assert main(["resume", str(part.folder), "trainer.max_steps=6"]) == 0
    one, other = (run.load_model("last").state_dict() for run in (whole, part))
    assert all(torch.equal(one[name], other[name]) for name in one)
