"""`trainrun again` and `trainrun compare`; what a run notes of its environment."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from approved import approve_error

from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.config.saved_config import load_config
from trainrun.folder import environment
from trainrun.plots.compare import describe_loss_difference

SHORT = (
    "monitor.progress_bar=false", "monitor.hardware=false", "monitor.plots=false", "trainer.num_threads=1",
    "model.hidden=[8]", "trainer.max_steps=6", "monitor.log_every_n_steps=2", "trainer.val_check_interval=3",
)  # fmt: skip


@pytest.fixture
def run(workdir: Path) -> Path:
    assert main([*SHORT, "seed=null", "output_dir=first"]) == 0
    return workdir / "first"


def test_again_is_the_same_training_in_another_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["again", "first", "output_dir=second"]) == 0
    assert main(["again", "first", "--lr", "0.1", "output_dir=third", "--batch-size=16"]) == 0
    approve_error(capsys.readouterr().err, "data.batch_size")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert Path("second/config.yaml").read_text() == Path("first/config.yaml").read_text()
    assert main(["compare", "first", "second"]) == 0
    told = capsys.readouterr().out
    assert "losses are equal, bit for bit, at all 4 common log points" in told
    assert "environment: nothing differs\n\ndata: nothing differs" in told
    assert main(["compare", "first", "third", "--out", "there"]) == 0
    told = capsys.readouterr().out
    assert "losses differ from step 2 on" in told
    assert "optimizer.lr" in told
    assert Path("there/compare.html").is_file()


def read_settings(folder: str) -> list[str]:
    """Return the settings of a run, which make its config."""
    words = Path(folder, "overrides.txt").read_text().splitlines()
    assert compose_run(words).config == load_config(Path(folder, "config.yaml"), [])
    return words


def test_the_settings_of_a_run_are_those_of_all_its_commands(run: Path) -> None:
    assert main(["again", "first", "--lr", "0.1", "model.hidden=[4]", "output_dir=second"]) == 0
    words = read_settings("second")
    assert [word for word in words if word.startswith(("lr", "optimizer", "model", "output_dir"))] == [
        "lr=0.1", "model.hidden=[4]", "output_dir=second",
    ]  # fmt: skip
    assert main(["resume", "second", "trainer.max_steps=8", "optimizer.lr=0.2"]) == 0
    words = read_settings("second")
    assert {"trainer.max_steps=8", "optimizer.lr=0.2"} < set(words)
    assert json.loads(Path("second/status.json").read_text())["overrides"] == words
    assert main(["resume", "second", "trainer.max_steps=9", "model.hidden=[5]"]) == 2
    assert read_settings("second") == words
    assert not Path("second/.overrides-before.txt").exists()
    assert main(["report", "second"]) == 0
    assert shlex.join(["trainrun", *(word for word in words if word != "output_dir=second")]) in unescape(
        Path("second/report.html").read_text()
    )


def test_without_a_folder_it_gets_one_and_a_finished_one_stays(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["again", "first", "trainer.max_steps=1"]) == 0
    assert len(list(Path("outputs").glob("*/*/RUN.json"))) == 1
    assert main(["again", "first", "output_dir=first"]) == 0  # the very same words: it is there, and done
    assert "finished already" in capsys.readouterr().out
    assert main(["again", "first", "output_dir=first", "lr=1"]) == 2
    approve_error(capsys.readouterr().err, "optimizer.lr")


OTHER_CLASSES = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, 10))
    def forward(self, x):
        return self.layers(x)

class Descent(torch.optim.SGD):
    def __init__(self, params, lr, momentum=0.5):
        super().__init__(params, lr, momentum)
"""


@pytest.mark.parametrize(
    ("words", "place", "node"),
    [
        (["model=others.Net"], "model", {"_target_": "others.Net", "init": "he"}),
        (
            ["model=others.Net", "model.width=3"],
            "model",
            {"_target_": "others.Net", "init": "he", "width": 3},
        ),
        (
            ["model.width=3", "model=others.Net"],
            "model",
            {"_target_": "others.Net", "init": "he", "width": 3},
        ),
        (
            ["optimizer=others.Descent"],
            "optimizer",
            {
                "_target_": "others.Descent",
                "lr": 0.001,
                "no_decay": "none",
                "layer_decay": None,
                "groups": None,
            },
        ),
        (["model=trainrun.model.mlp.Mlp"], "model", None),
    ],
)
def test_another_class_gets_no_arguments_of_the_one_before(
    workdir: Path, words: list[str], place: str, node: dict[str, Any] | None
) -> None:
    """`model._target_=` changes the class alone; `model=` chooses anew, and an equal choice changes nothing."""
    Path("others.py").write_text(OTHER_CLASSES)
    assert main([*SHORT, "model.init=he", "output_dir=first"]) == 0
    assert main(["again", "first", *words, "output_dir=second"]) == 0
    first, second = (yaml.safe_load(Path(f"{name}/config.yaml").read_text()) for name in ("first", "second"))
    assert second[place] == (first[place] if node is None else node)
    sys.modules.pop("others", None)


def test_losses_are_compared_where_they_are_means_of_the_same_steps() -> None:
    def history(**losses: float) -> Any:
        rows = [{"step": int(name[1:]), "train/loss": value} for name, value in losses.items()]
        return SimpleNamespace(find_rows=lambda kind: rows if kind == "train" else [])

    resumed = {"whole": history(s4=1.0, s8=2.0, s12=3.0), "resumed": history(s4=1.0, s5=1.1, s8=1.9, s12=3.0)}
    assert "equal, bit for bit, at all 2 common log points" in describe_loss_difference(resumed)
    resumed["whole"] = history(s4=1.0, s8=2.0, s12=3.1)
    assert describe_loss_difference(resumed) == "losses differ from step 12 on"


@pytest.mark.parametrize(
    "words",
    [
        ["again", "nothing"],
        ["again", "first", "trainer.max_step=3"],
        ["again", "first", "data.path=x"],
        ["resume", "first", "data.path=x", "trainer.max_steps=9"],
        ["resume", "first", "init_from=x", "trainer.max_steps=9"],
        ["resume", "first", "ckpt_path=first", "trainer.max_steps=9"],
        ["resume", "first", "model.init=xavier", "trainer.max_steps=9"],
        ["evaluate", "first", "data.path=x"],
        ["again", "first", "model.freze=a"],
        ["again", "first", "optimizer.no_decy=auto"],
        ["again", "first", "--quick"],
        ["again", "first", "--lr", "a"],
        ["compare", "first"],
        ["compare", "first", "fist"],
    ],
)
def test_mistakes(run: Path, words: list[str], refuses: Callable[..., None]) -> None:
    refuses(words)


def test_code_of_a_stranger_is_not_imported(run: Path, refuses: Callable[..., None]) -> None:
    Path("evil.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\nfrom torch.nn import Linear as Net\n"
    )
    config = Path("first/config.yaml").read_text()
    Path("first/config.yaml").write_text(config.replace("trainrun.model.mlp.Mlp", "evil.Net"))
    refuses(["again", "first"], "--trust")
    assert not Path("ran").exists()


def git(*words: str) -> None:
    own = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *own, *words], check=True, capture_output=True)


def test_what_is_not_committed_is_beside_the_environment(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    git("init", "-q")
    for name in ("net.py", ".env", "api_token.json"):
        Path(name).write_text("old\n")
    git("add", ".")
    git("commit", "-qm", "x")
    assert main([*SHORT, "output_dir=clean"]) == 0
    assert not Path("clean/changes.diff").exists()
    for name in ("net.py", ".env", "api_token.json", "untracked.txt"):
        Path(name).write_text("new\n")
    assert main([*SHORT, "output_dir=run"]) == 0
    changes = Path("run/changes.diff")
    added = [line for line in changes.read_text().splitlines() if line.startswith("+")]
    assert added == ["+++ b/net.py", "+new"]
    assert stat.S_IMODE(changes.stat().st_mode) == 0o600
    noted = json.loads(Path("run/environment.json").read_text())
    assert noted["git"]["changed"]
    assert {"torch", "hydra-core", "numpy"} <= noted["packages"].keys()
    capsys.readouterr()
    assert main(["compare", "clean", "run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["git.changed", "false", "true"] in rows
    monkeypatch.setattr(environment, "MOST_DIFF_BYTES", 20)
    assert environment.read_uncommitted_changes(workdir).endswith("\n[cut: more than 20 bytes]\n")
