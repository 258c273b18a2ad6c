"""Ranks of two machines that share no folder: the run is in the folder of rank 0, with the bits of two local ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from approved import approve
from faults.forks import ForkedCommand
from quiet_runs import QUIET, weights

from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir
from trainrun.monitor.metric_rows import read_metric_rows
from trainrun.runs import torchrun

pytestmark = pytest.mark.process

OWN = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
"""
WORDS = [
    "model=own.Net", "data=csv", "data.path=~/table.csv", "data.batch_size=4", "parallel=ddp",
    "parallel.accelerator=cpu", "seed=3", "trainer.ema=true", "trainer.max_epochs=null",
    "monitor.log_every_n_steps=1", *QUIET,
]  # fmt: skip
# the same words on both machines: each has a working directory of its own
APART = "output_dir=/proc/self/cwd/run"


@pytest.fixture
def machines(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of two machines: a home with data, and in it a working directory with code."""
    monkeypatch.setattr(torchrun, "FOLDER_SECONDS", 0.3)
    homes = [workdir / "first", workdir / "second"]
    rows = ["a,b,c,d,label", *(f"{i % 7},{i % 5},{i % 3},{i},{i % 2}" for i in range(64))]
    for home in homes:
        (home / "work").mkdir(parents=True)
        (home / "table.csv").write_text("\n".join(rows))
        (home / "work" / "own.py").write_text(OWN)
    return homes


def start_on_machines(homes: list[Path], *words: str) -> list[ForkedCommand]:
    """Start a rank on each machine, as srun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank, home in enumerate(homes):
        env = {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": port,
            "MASTER_ADDR": "127.0.0.1", "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), f"NAME_{rank}": "x",
        }  # fmt: skip
        ranks.append(ForkedCommand(*words, env=env, folder=home / "work"))
    return ranks


def train_on_machines(homes: list[Path], *words: str) -> list[str]:
    """Train to the end. Return what each rank printed."""
    ranks = start_on_machines(homes, *words)
    texts = ["".join(rank.communicate()) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    return texts


def list_files(home: Path) -> set[str]:
    files = (path for path in home.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(home)) for path in files}


def train_locally(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Train with two ranks on one machine. Return the run folder."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    assert main([*WORDS, "parallel.devices=2", "trainer.max_steps=10", "output_dir=local"]) == 0
    return str(home / "work" / "local")


def training_losses(folder: str) -> list[tuple[int, float]]:
    rows = read_metric_rows(RunDir(Path(folder)).metrics)
    return [(row["step"], row["train/loss"]) for row in rows if row["kind"] == "train"]


def check_same_bits(left: str, right: str) -> None:
    assert len(training_losses(left)) == 10
    assert training_losses(left) == training_losses(right)
    ours, others = weights(left), weights(right)
    assert ours.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in ours.items())


def test_a_run_and_its_resume_have_the_bits_of_local_ranks(
    machines: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machines
    before = list_files(second)
    printed = train_on_machines(machines, *WORDS, APART, "trainer.max_steps=5")
    assert "does not see the run folder of rank 0" in printed[1]
    assert "does not see" not in printed[0]
    train_on_machines(machines, "resume", "/proc/self/cwd/run", "trainer.max_steps=10")
    assert list_files(second) == before
    check_same_bits(str(first / "work" / "run"), train_locally(first, monkeypatch))


@pytest.mark.parametrize("setting", ["init_from", "ckpt_path"])
def test_an_earlier_run_is_read_by_rank_0_alone(
    setting: str, machines: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_locally(machines[0], monkeypatch)
    printed = train_on_machines(machines, *WORDS, APART, "trainer.max_steps=11", f"{setting}=local")
    assert ("resumed at step 10" if setting == "ckpt_path" else "weights: 4 tensors of local") in printed[0]


def test_with_a_shared_folder_every_rank_writes_there(
    machines: list[Path], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = train_on_machines(machines, *WORDS, f"output_dir={workdir / 'shared'}", "trainer.max_steps=10")
    assert "does not see" not in "".join(printed)
    assert (workdir / "shared" / "checkpoints" / "step-00000010" / "rank-00001.json").is_file()
    check_same_bits(str(workdir / "shared"), train_locally(machines[0], monkeypatch))


def test_shards_need_a_shared_folder(machines: list[Path]) -> None:
    words = [word.replace("=ddp", "=fsdp") for word in WORDS]
    ranks = start_on_machines(machines, *words, APART, "trainer.max_steps=1")
    printed = ["".join(rank.communicate()) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], printed
    approve(printed[0].replace(socket.gethostname(), "HOST"))
    assert printed[1] == ""


def test_a_failure_on_the_other_machine_is_printed_once_and_kept_there(machines: list[Path]) -> None:
    code = OWN + "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no licence')\n"
    (machines[1] / "work" / "own.py").write_text(code)
    ranks = start_on_machines(machines, *WORDS, APART, "trainer.max_steps=5")
    printed = ["".join(rank.communicate()) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 2], printed
    assert sum("no licence" in text for text in printed) == 1
    kept = [path for path in list_files(machines[1]) if "ranks" in path]
    assert [Path(path).name for path in kept] == [".error-rank1.json"]


def test_a_tokenizer_that_is_trained_for_the_run_is_sent(machines: list[Path]) -> None:
    for home in machines:
        (home / "work" / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    words = [
        "data=text", "data.path=text.txt", "data.tokenizer=bpe:270", "data.train.block_size=16", "model=gpt",
        "model.width=16", "model.layers=1", "model.heads=2", "model.context=32", "task=language_modeling",
        "parallel=ddp", "parallel.accelerator=cpu", "trainer.max_steps=2", "data.batch_size=2", *QUIET,
    ]  # fmt: skip
    train_on_machines(machines, *words, APART)
    (sent,) = (machines[1] / "cache").rglob("tokenizer.json")
    assert sent.read_bytes() == (machines[0] / "work" / "run" / "tokenizer.json").read_bytes()


def test_the_folder_of_a_rank_is_named_if_it_cannot_be_made(machines: list[Path]) -> None:
    (machines[1] / "cache").write_text("a file")
    ranks = start_on_machines(machines, *WORDS, APART, "trainer.max_steps=1")
    printed = ["".join(rank.communicate()) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], printed
    approve(printed[0].replace(socket.gethostname(), "HOST"))
    assert not os.path.exists(machines[0] / "work" / "run")


def test_a_config_that_another_machine_cannot_read_ends_all_ranks(machines: list[Path]) -> None:
    ranks = start_on_machines(machines, *WORDS, APART, "run_name=${oc.env:NAME_0}", "trainer.max_steps=1")
    printed = ["".join(rank.communicate()) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], printed
    approve(printed[0].replace(socket.gethostname(), "HOST"))
    assert not os.path.exists(machines[0] / "work" / "run")
