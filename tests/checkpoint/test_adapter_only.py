"""`checkpoint.adapter_only`: what is saved, that nothing else changes, and that another base is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from approved import approve_error
from quiet_runs import QUIET
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trainrun import load_run
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.cli.main import main
from trainrun.verify.certificate import different_leaves

pytestmark = pytest.mark.train

WORDS = ["model=mlp", "model.hidden=[32,32]", *QUIET]
LORA = ["transform.lora._target_=trainrun.transform.lora.lora", "transform.lora.rank=2"]
ADAPTER = ["init_from=base", "checkpoint.adapter_only=true"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run named `base`."""
    folder = tmp_path_factory.mktemp("trained")
    assert main([*WORDS, "trainer.max_steps=9", f"output_dir={folder / 'base'}"]) == 0
    return folder / "base"


@pytest.fixture
def base(workdir: Path, trained: Path) -> Path:
    shutil.copytree(trained, "base")
    return workdir / "base"


def tree(run: str) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = read_checkpoint(
        resolve_checkpoint(Path(run, "checkpoints"), "last")
    ).shared
    return found


@pytest.mark.parametrize(
    ("words", "saved"),
    [
        (LORA, {"lora_a", "lora_b"}),
        ([*LORA, "transform.lora.train=layers.5.*", "precision=bf16-true", "trainer.ema=true"],
         {"lora_a", "lora_b", "layers.5.base.weight", "layers.5.base.bias"}),
        # the last layer is random, and frozen: no file has it
        (["model.freeze=[layers.1.*,layers.5.*]", "init.skip=layers.5.*"],
         {"layers.3.weight", "layers.3.bias", "layers.5.weight", "layers.5.bias"}),
    ],
)  # fmt: skip
def test_a_checkpoint_without_its_base_is_resumed_and_loaded_as_a_whole_one(
    base: Path, words: list[str], saved: set[str]
) -> None:
    words = [*WORDS, *words, "optimizer.weight_decay=0.1", "init_from=base"]
    assert main([*words, "trainer.max_steps=8", "output_dir=whole"]) == 0
    words.append("checkpoint.adapter_only=true")
    assert main([*words, "trainer.max_steps=5", "output_dir=part"]) == 0
    assert main(["resume", "part", "trainer.max_steps=8"]) == 0
    part, whole = tree("part"), tree("whole")
    assert {next((end for end in saved if name.endswith(end)), name) for name in part["model"]} == saved
    if part["ema"]:
        assert part["ema"]["module"].keys() == part["model"].keys()
    left_out = {name for name in whole["model"] if name not in part["model"]}
    assert left_out
    for key in ("model", "optimizer", "schedule"):
        places = different_leaves(whole[key], part[key])
        assert [place for place in places if place not in left_out] == []
    one, other = (load_run(name).load_model("last").state_dict() for name in ("whole", "part"))
    assert different_leaves(one, other, "") == []
    assert (
        main(["evaluate", "part", "--which", "last"]) == main(["evaluate", "whole", "--which", "last"]) == 0
    )
    rows = [json.loads(Path(name, "evaluation-val.json").read_text()) for name in ("part", "whole")]
    assert rows[0]["val/loss"] == rows[1]["val/loss"]


def test_another_base_or_none_is_refused_in_one_line(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *LORA, *ADAPTER, "trainer.max_steps=5", "output_dir=part"]) == 0
    commands = (
        ["resume", "part", "trainer.max_steps=8"], ["evaluate", "part"], ["predict", "part"],
        ["export", "part", "--to", "safetensors"], ["export", "part", "--to", "safetensors", "--merge"],
    )  # fmt: skip
    base.rename("kept")
    for command in commands:
        assert main(command) != 0
        assert capsys.readouterr().err.count("no such file or folder") == 1, command
    assert main([*WORDS, "seed=7", "trainer.max_steps=9", "output_dir=base"]) == 0
    for command in commands:
        assert main(command) != 0
        error = capsys.readouterr().err
        assert "holds an adapter of init_from=" in error, command
        assert "but the weights here differ" in error
    shutil.rmtree("base")
    Path("kept").rename("base")
    assert main(["resume", "part", "trainer.max_steps=8", "checkpoint.adapter_only=false"]) != 0
    approve_error(capsys.readouterr().err)
    assert main(["resume", "part", "trainer.max_steps=8"]) == 0
    assert main([*WORDS, "init_from=part", "output_dir=next"]) != 0
    approve_error(capsys.readouterr().err)


def test_export_writes_the_adapter_and_names_its_base(base: Path) -> None:
    assert main([*WORDS, *LORA, *ADAPTER, "trainer.max_steps=5", "output_dir=part"]) == 0
    assert main(["export", "part", "--to", "safetensors"]) == 0
    path = Path("part-export", "adapter.safetensors")
    assert load_file(path).keys() == tree("part")["model"].keys()
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["trainrun"])["base"]
    assert (told["from"], len(told["sha256"])) == (str(base), 64)
    assert main(["export", "part", "--to", "safetensors,huggingface", "--merge", "--out", "out"]) == 0
    merged = load_file(Path("out", "model.safetensors"))
    assert merged.keys() == load_run("base").load_model("last").state_dict().keys()
    assert main([*WORDS, "init_from=out/huggingface", "trainer.max_steps=2", "output_dir=next"]) == 0


def test_a_whole_run_goes_on_as_an_adapter_only_with_the_weights_that_its_file_has(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load_run("base").load_model("last").state_dict()
    save_file(first, "w.safetensors")
    assert main([*WORDS, *LORA, "init_from=w.safetensors", "trainer.max_steps=5", "output_dir=run"]) == 0
    save_file({name: tensor + 1 for name, tensor in first.items()}, "w.safetensors")
    resume = ["resume", "run", "trainer.max_steps=8", "checkpoint.adapter_only=true"]
    assert main(resume) != 0
    approve_error(capsys.readouterr().err)
    save_file(first, "w.safetensors")
    assert main(resume) == 0
    assert all("lora" in name for name in tree("run")["model"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint.adapter_only=true", *LORA], "checkpoint.adapter_only=true: reads frozen weights from init_from"),
        (ADAPTER, "checkpoint.adapter_only=true: no weight of init_from=.*base stays frozen; add LoRA, or model.free"),
        ([*ADAPTER, "model.freeze=layers.1.*", "hook.own._target_=own.Thaw"],
         "layers.1.weight was frozen at the start and is trained now"),
        (["checkpoint.adapter_only=some"], "checkpoint.adapter_only=some: must be true or false"),
    ],
)  # fmt: skip
def test_what_would_save_too_little_is_refused(
    base: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(
        "class Thaw:\n    def on_step_end(self, run, state):\n        run.model.requires_grad_(True)\n"
    )
    assert main([*WORDS, *words, "trainer.max_steps=3", "output_dir=run"]) != 0
    error = " ".join(capsys.readouterr().err.split())
    assert __import__("re").search(message, error), error
