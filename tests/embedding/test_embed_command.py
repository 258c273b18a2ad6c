"""`trainrun embed`: what a layer gives, written beside the targets, gone on with after a kill, and trained on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from approved import approve_error, refused
from test_memory_options import train
from test_parameter_groups import QUIET

import trainrun as package
from trainrun.cli.main import main
from trainrun.convert import output_formats
from trainrun.embedding import embed_command
from trainrun.errors import ConfigError

pytestmark = pytest.mark.train

SMALL = ("model.hidden=[12]", "data.batch_size=64", *QUIET)


@pytest.fixture
def run(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(embed_command, "BATCH", 100)
    monkeypatch.setattr(embed_command, "PART", 300)
    return train("run", 12, *SMALL)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from trainrun.data.readers.builtin.digits import load

    return load()["train"].tensors


def words_told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The settings that the command prints."""
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("use it with: ")]
    return line.removeprefix("use it with: ").split()


@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_a_run_trains_on_what_was_written_of_the_right_layer(
    run: str, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    assert main(["embed", run, "--which=last", "--out", f"emb.{ending}"]) == 0
    told = words_told(capsys)
    head = package.train(
        *told, "model=mlp", "model.hidden=[]", "trainer.max_epochs=2", *QUIET, "output_dir=head"
    )
    model = package.load_run(run).load_model("last")
    x, y = digits()
    body = torch.nn.Sequential(*list(model.layers)[:-1])
    if ending == "npy":
        found, target = np.load("emb.npy/x_train.npy"), np.load("emb.npy/y_train.npy")
        with torch.no_grad():
            assert np.allclose(found, body(x), atol=1e-5)
        assert (target == y.numpy()).all()
        assert not [name for name in os.listdir("emb.npy") if name.startswith(".")]
    else:
        assert len(list(Path("emb.parquet/train").iterdir())) == 5  # of 1,437 samples
    assert head.metrics[-1] is not None
    assert head.config.data.train["_target_"].endswith(
        {"npy": "numpy_files.load", "parquet": "parquet.load"}[ending]
    )


@pytest.mark.parametrize(("ending", "num_written"), [("npy", 0), ("parquet", 900)])
def test_a_stopped_one_goes_on_and_gives_the_same_bytes(
    run: str, monkeypatch: pytest.MonkeyPatch, ending: str, num_written: int
) -> None:
    assert main(["embed", run, "--which=last", "--out", f"whole.{ending}"]) == 0
    monkeypatch.setattr(output_formats, "BATCH_SAMPLES", 300)
    format_class: Any = output_formats.Npy if ending == "npy" else output_formats.Parquet
    encode, numbers = format_class.encode, []

    def stopping(self: Any, number: int, sample: Any) -> Any:
        numbers.append(number)
        if len(numbers) == 1000:
            raise KeyboardInterrupt
        return encode(self, number, sample)

    monkeypatch.setattr(format_class, "encode", stopping)
    assert main(["embed", run, "--which=last", "--out", f"emb.{ending}"]) == 130
    assert main(["embed", run, "--which=last", "--out", f"emb.{ending}"]) == 0
    assert numbers[1000] == num_written  # of 1,000: a file per split, or whole shards
    for file in Path(f"whole.{ending}").rglob("*"):
        if file.is_file() and file.name != "convert.json":
            assert (
                Path(f"emb.{ending}") / file.relative_to(f"whole.{ending}")
            ).read_bytes() == file.read_bytes()


def test_another_run_layer_or_data_is_refused(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["embed", run, "--which=last", "--out", "emb.npy"]
    assert main(words) == 0
    for more in (["--layer=layers.1"], ["data.val=null"]):
        assert main([*words, *more]) == 2
        assert "holds a finished conversion" in capsys.readouterr().err
    assert main(["resume", run, "trainer.max_steps=14"]) == 0
    assert main(words) == 2
    assert "step-00000012" in capsys.readouterr().err


def test_other_data_by_its_group(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", run, "--which=last", "--out", "emb.npy"]) == 0
    x, y = digits()
    np.savez("own.npz", x_train=x, y_train=y, x_val=x[:50], y_val=y[:50])
    words = ["embed", run, "--which=last", "--out", "own.npy", "data=arrays"]
    assert main([*words, "data.path=own.npz"]) == 0
    assert np.array_equal(np.load("own.npy/x_train.npy"), np.load("emb.npy/x_train.npy"))
    assert np.load("own.npy/x_val.npy").shape == (50, 12)
    scaled = train("scaled", 2, *SMALL, "data.augment.normalize._target_=trainrun.data.augment.normalize.Normalize",
                   "data.augment.normalize.mean=[9]", "data.augment.normalize.std=[1]", "data.val=null")  # fmt: skip
    for more in (
        (),
        ("data=digits",),
        ("data=arrays", "data.path=own.npz"),
    ):  # through what the run's go through
        assert main(["embed", scaled, "--which=last", f"--out={len(more)}.npy", *more, "data.val=null"]) == 0
        assert np.array_equal(np.load(f"{len(more)}.npy/x_train.npy"), np.load("0.npy/x_train.npy"))
    bare = ["data.path=own.npz", "data.train.target=null", "data.val=null", "--out=bare.npy"]
    capsys.readouterr()
    assert main([*words, *bare]) == 0
    assert "(12,) a sample" in capsys.readouterr().out
    assert main([*words, "data.path=elsewhere", "--out=other.npy"]) == 2
    assert "data.path=elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--out=emb.txt"], ["--out=emb.npy", "--layer=layer.1"], ["--out=emb.npy", "--which=step-3"]]
)
def test_wrong_uses_are_one_line(run: str, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    capsys.readouterr()
    assert main(["embed", run, "--which=last", *words]) == 2
    approve_error(capsys.readouterr().err)
    assert not Path("emb.npy").exists()


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.rnn = torch.nn.Linear(4, 4), torch.nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.body(self.rnn(x)[0]))


@pytest.mark.parametrize("layer", ["body", "rnn", None])
def test_a_layer_without_one_row_a_sample_is_refused(layer: str | None) -> None:
    from trainrun.embedding.layer_output import LayerOutput

    with refused(ConfigError):
        LayerOutput(Twice(), layer).compute((torch.ones(2, 3, 4), torch.ones(2)))


def test_of_a_vae_it_is_what_the_mean_of_the_code_becomes(workdir: Path) -> None:
    vae = train("vae", 2, "model=vae", "task=vae", "model.body=mlp", "model.hidden=[8]", *QUIET)
    assert main(["embed", vae, "--which=last", "--out=code.npy"]) == 0
    model, (x, _) = package.load_run(vae).load_model("last").eval(), digits()
    with torch.no_grad():
        mean = model(x[:64]).mean
        shown = torch.nn.Sequential(*list(model.decoder)[:-2])(mean)
    assert np.allclose(np.load("code.npy/x_train.npy")[:64], shown, atol=1e-5)
