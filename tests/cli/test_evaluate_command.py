"""What `trainrun evaluate` says where it cannot write."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from approved import approve_error, refused
from quiet_runs import QUIET

from trainrun.cli.main import main
from trainrun.errors import PluginError
from trainrun.folder.run_folder import RunDir
from trainrun.prediction import predict_command as evaluate
from trainrun.prediction import predictions
from trainrun.runs.restore_config import choose_saved_checkpoint
from trainrun.task.classification import Classification


def test_metrics_are_said_where_the_folder_takes_no_file(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer.max_steps=2", "monitor=none", "hydra.run.dir=run"]) == 0

    def refused(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(evaluate, "write_json", refused)
    assert main(["evaluate", "run"]) == 0
    told = capsys.readouterr()
    assert "val/acc" in told.out
    assert "not written (Read-only file system)" in told.err


def test_without_a_validation_the_last_checkpoint_is_taken_and_said(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer.max_steps=2", "monitor=none", "data.val=null", "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    words = ["run", "data.val._target_=trainrun.data.readers.builtin.digits.load"]
    assert main(["evaluate", *words]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("step-00000002 (last): ")
    assert "the last one is used" in told.err
    assert main(["predict", *words]) == 0
    approve_error(capsys.readouterr().err)
    assert main(["evaluate", *words, "--which", "best"]) == 2
    approve_error(capsys.readouterr().err)


def test_a_run_without_checkpoints_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path)
    assert choose_saved_checkpoint(run, None) == "last"
    assert capsys.readouterr().err == ""  # the error that follows says that there is none


def test_the_word_for_averaged_weights_holds(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer.max_steps=9", "trainer.ema=true", "trainer.ema.decay=0.99", *QUIET]
    assert main([*words, "output_dir=run"]) == 0
    assert main(["resume", "run", "trainer.max_steps=10", "trainer.ema=false"]) == 0
    told = "checkpoint step-00000009 holds averaged weights, which trainer.ema=false leaves out"
    assert told in capsys.readouterr().out
    found = []
    for more in ([], ["trainer.ema=true"], ["trainer.ema=false"], ["ema.enabled=false"], ["--ema=false"]):
        assert main(["evaluate", "run", "--which", "step-00000009", *more]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2] == found[3] == found[4]
    assert main(["evaluate", "run", "--which", "step-00000010", "trainer.ema=true"]) == 2
    approve_error(capsys.readouterr().err, "trainer.ema")


def test_other_classes_than_the_run_has_are_refused(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def table(name: str, *classes: str) -> str:
        rows = [f"{number},{classes[number % len(classes)]}" for number in range(60)]
        (workdir / name).write_text("\n".join(["x,label", *rows]))
        return f"data.path={name}"

    words = [
        "data=csv",
        table("old.csv", "cat", "dog", "mouse"),
        "trainer.max_steps=3",
        "monitor.plots=false",
    ]
    assert main([*words, "output_dir=run"]) == 0
    assert main(["evaluate", "run", table("same.csv", "dog", "cat", "mouse")]) == 0
    capsys.readouterr()
    for command in (["evaluate", "run"], ["resume", "run", "trainer.max_steps=5"]):
        assert main([*command, table("new.csv", "wolf", "dog", "mouse")]) == 2
        assert "wolf" in capsys.readouterr().err
    assert main(["evaluate", "run", table("fewer.csv", "cat", "dog")]) == 0
    assert main(["resume", "run", table("fewer.csv", "cat", "dog"), "trainer.max_steps=5"]) == 2
    approve_error(capsys.readouterr().err, "mouse")


def test_every_sample_is_read_whatever_the_limit_of_the_run(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["trainer.limit_val_batches=0.1"]
    assert main(["trainer.max_steps=2", "monitor=none", *limits, "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    assert main(["predict", "run"]) == 0
    assert capsys.readouterr().out.startswith("359 predictions")
    assert main(["predict", "run", limits[0]]) == 0
    assert capsys.readouterr().out.startswith("35 predictions")
    assert main(["evaluate", "run"]) == main(["evaluate", "run", limits[0]]) == 0
    all_of_them, some = capsys.readouterr().out.splitlines()
    assert all_of_them != some


BARE = """
import torch
from torch import nn
from trainrun.interfaces import StepOutput
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((8,), float(index))
class Net(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
class Task:
    def count(self, batch):
        return len(batch)
    def step(self, model, batch):
        return StepOutput((model(batch) - batch).square().sum())
"""


def test_a_sample_that_is_a_bare_tensor_is_one_row(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "own_bare.py").write_text(BARE)
    data = [f"data.{split}._target_=own_bare.Samples" for split in ("train", "val")]
    words = [*data, "model=own_bare.Net", "task=own_bare.Task", "trainer.max_steps=2", "monitor=none"]
    assert main([*words, "output_dir=run"]) == 0
    assert main(["predict", "run"]) == 0
    rows = (workdir / "run/predictions-val.csv").read_text().splitlines()
    assert rows[0] == ",".join(["index", *(f"output_{i}" for i in range(8))])
    assert len(rows) == 41


@pytest.mark.parametrize(
    ("more", "hidden"),
    [
        ({}, True),
        ({"target": torch.tensor([[0, 1, -100], [2, -100, -100]])}, True),
        ({"target": torch.tensor([[0, 1, 1], [2, 0, -100]])}, False),  # of a decoder: of other places
        ({"decoder_input_ids": torch.zeros(2, 3)}, False),
    ],
)
def test_there_are_no_predictions_of_padding(more: dict[str, torch.Tensor], hidden: bool) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    given = {"prediction": torch.ones(2, 3).long(), "confidence": torch.ones(2, 3), "length": torch.ones(2)}
    columns = predictions.mask_padding(
        given | {name: more[name] for name in more.keys() & {"target"}}, {"attention_mask": mask, **more}
    )
    assert torch.equal(columns["prediction"] == -100, (mask == 0) & hidden)
    assert torch.equal(columns["confidence"].isnan(), (mask == 0) & hidden)


@pytest.mark.parametrize("ours", [True, False])
def test_only_tasks_of_ours_are_known_to_predict_tokens(ours: bool) -> None:
    class Top:
        def predict(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
            return {"prediction": model(batch["x"]).topk(3, 1).indices[:, :, 0]}

    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = SimpleNamespace(data={"x": torch.rand(2, 5, 3), "attention_mask": mask}, indices=None)
    stream = SimpleNamespace(epoch=lambda number: [batch])
    run: Any = SimpleNamespace(
        task=Classification() if ours else Top(),
        model=torch.nn.Identity(),
        splits=lambda: {"val": stream},
        precision=SimpleNamespace(autocast=nullcontext),
    )
    found = evaluate.predict_split(run, "val")["prediction"]
    assert torch.equal(found == -100, (mask == 0) & ours)


def test_a_model_with_several_outputs_needs_a_predict_of_its_task() -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with refused(PluginError):
        predictions.predict_raw_output(Two(), torch.ones(2, 3))


TOKENS = """
import torch

def samples():
    return [(torch.arange(1, 3 + 2 * number), number % 2) for number in range(4)]

class Net(torch.nn.EmbeddingBag):
    def forward(self, inputs):
        return super().forward(inputs)
"""


def test_a_piece_of_a_split_sample_is_a_row_with_the_number_of_the_sample(workdir: Path) -> None:
    (workdir / "own_tokens.py").write_text(TOKENS)
    words = [f"data.{split}._target_=own_tokens.samples" for split in ("train", "val")]
    words += ["model=own_tokens.Net", "model.num_embeddings=9", "model.embedding_dim=2", "data.batch_size=3"]
    cut = ["data.max_sequence_length=3", "data.truncate=split"]
    assert main([*words, *cut, "trainer.max_steps=1", "monitor=none", "output_dir=run"]) == 0
    assert main(["predict", "run"]) == 0
    rows = [row.split(",")[:2] for row in (workdir / "run/predictions-val.csv").read_text().splitlines()]
    assert rows == [["index", "piece"], ["0", "0"], ["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"], ["3", "0"],
                    ["3", "1"], ["3", "2"]]  # fmt: skip


ENDLESS = """
import itertools
import torch

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ((torch.full((3,), number % 7.0), number % 2) for number in itertools.count())
"""


def test_a_stream_of_unknown_length_is_read_as_far_as_the_run_read_it(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("endless_data.py").write_text(ENDLESS)
    endless = [f"data.{part}._target_=endless_data.Endless" for part in ("train", "val", "test")]
    limits = ["trainer.limit_val_batches=0.1"]
    assert main(["trainer.max_steps=2", "monitor=none", *limits, endless[2], "hydra.run.dir=ends"]) == 0
    capsys.readouterr()
    assert main(["predict", "ends"]) == 0  # only its test data has no end
    assert capsys.readouterr().out.startswith("359 predictions")
    data = endless[:2]
    words = [
        "data.num_classes=2",
        "data.shape=[3]",
        "trainer.max_steps=2",
        "trainer.limit_val_batches=3",
        "monitor=none",
    ]
    assert main([*data, *words, "data.batch_size=8", "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    assert main(["predict", "run"]) == 0
    assert capsys.readouterr().out.startswith("24 predictions")


def test_new_data_may_have_fewer_rows_than_a_batch_of_the_training(workdir: Path) -> None:
    for name, count in (("old", 100), ("new", 8)):
        rows = [f"{i % 7},{i % 3},{i % 2}" for i in range(count)]
        (workdir / f"{name}.csv").write_text("\n".join(["a,b,label", *rows, ""]))
    words = ["data=csv", "data.path=old.csv", "data.batch_size=32", "model=mlp", "trainer.max_steps=2"]
    assert main([*words, "monitor=none", "hydra.run.dir=run"]) == 0
    assert main(["predict", "run", "data.path=new.csv", "data.train.val_fraction=0.5"]) == 0
    assert len((workdir / "run/predictions-val.csv").read_text().splitlines()) == 1 + 4
