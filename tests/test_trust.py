"""Whose code a run folder may name without a question."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainrun
from trainrun.cli import main
from trainrun.errors import ConfigError
from trainrun.rundir import RunDir, read_identity, write_identity
from trainrun.trust import check_files, foreign_nodes, is_defined, own_key

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        return self.layer(x.flatten(1))
Other = Net
"""
QUIET = ["monitor.progress_bar=false", "monitor.hardware=false", "monitor.plots=false", "trainer.max_steps=2"]


@pytest.fixture
def run(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run of the user's own network, seen from a folder where that network is not."""
    monkeypatch.setenv("HOME", str(workdir / "home"))
    (workdir / "own_net.py").write_text(NET)
    assert main(["model=own_net.Net", *QUIET, "output_dir=run"]) == 0
    (workdir / "else").mkdir()
    monkeypatch.chdir(workdir / "else")
    yield workdir / "run"
    sys.modules.pop("own_net", None)


def test_an_own_run_needs_no_word(run: Path) -> None:
    assert main(["evaluate", str(run)]) == 0
    assert main(["resume", str(run), "trainer.max_steps=3"]) == 0
    assert main(["evaluate", str(run)]) == 0
    shutil.move(run, "moved")
    assert trainrun.load_model("moved") is not None


def test_where_the_code_is_not_the_run_says_where_it_began(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.modules.pop("own_net", None)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(run.parent)])
    assert main(["resume", str(run), "trainer.max_steps=3"]) == 2
    said = capsys.readouterr().err
    assert f"no module own_net (looked in {Path.cwd()}, PYTHONPATH" in said
    assert f"the run began in {run.parent}: call this from there, or PYTHONPATH={run.parent}" in said


def test_a_folder_that_is_refused_stays_as_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of a resume that never began are taken back by whoever may go on, by nobody else."""
    shutil.copy(run / "config.yaml", run / ".config-before.yaml")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("max_steps: 2", "max_steps: 9"))
    before = {path: path.read_bytes() for path in run.glob("*.yaml")}
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(run.parent / "nobody"))
        assert main(["resume", str(run)]) == 2
    assert {path: path.read_bytes() for path in run.glob("*.yaml")} == before
    assert (run / ".config-before.yaml").exists()
    assert main(["resume", str(run)]) == 0
    assert (run / "config.yaml").read_text() == text


def test_the_run_of_another_user_is_shown_and_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(run.parent / "nobody"))
    sys.modules.pop("own_net", None)
    for words in (["evaluate", str(run)], ["predict", str(run)], ["resume", str(run), "trainer.max_steps=3"]):
        assert main(words) == 2
        assert "model._target_=own_net.Net; nothing was imported" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="own_net"):
        trainrun.load_model(run)
    assert "own_net" not in sys.modules
    assert main(["evaluate", str(run), "--trust"]) == 0
    assert trainrun.load_model(run, trust=True) is not None
    assert main(["evaluate", str(run), "model._target_=own_net.Net"]) == 0
    monkeypatch.chdir(run.parent)  # where the file lies that defines it
    assert main(["evaluate", str(run)]) == 0


def test_a_node_that_was_changed_is_no_longer_known(run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("own_net.Net", "own_net.Net\n  width: 3"))
    assert main(["evaluate", str(run)]) == 2


def test_a_seal_holds_for_its_run_only(run: Path) -> None:
    write_identity(RunDir(run), read_identity(RunDir(run)) | {"run_id": "0123456789abcdef"})
    assert main(["evaluate", str(run)]) == 2


def test_a_run_of_ours_alone_makes_no_key(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workdir))
    assert main([*QUIET, "output_dir=run"]) == 0
    assert own_key() == b""
    assert "seals" not in json.loads((workdir / "run" / "RUN.json").read_text())


def test_the_key_is_for_its_owner_alone(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workdir))
    key = own_key(make=True)
    assert len(key) == 32
    assert own_key(make=True) == key
    assert (workdir / ".local/state/trainrun/key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "target",
    ["torch.nn.Linear", "torch.optim.SGD", "torch.optim.lr_scheduler.StepLR", "trainrun.model.mlp.Mlp",
     "trainrun.data.formats.csv_files.load", "trainrun.scheduler.curves.wsd", "trainrun.data.augment.flip.RandomFlip"],
)  # fmt: skip
def test_what_is_ours(target: str) -> None:
    assert list(foreign_nodes({"model": {"_target_": target}})) == []


@pytest.mark.parametrize(
    "target",
    ["torch.load", "torch.nn.modules.module.torch.load", "torch.nn.Linear.x", "trainrun.cli.main", "torch.nn.linear",
     "trainrun.model.mlp.torch.load", "torch.hub.load", "trainrun.rundir.write_text", "torch.nn.Linear\n", 3, [], ""],
)  # fmt: skip
def test_what_is_not(target: Any) -> None:
    assert [node.key for node in foreign_nodes({"a": [{"b": {"_target_": target}}]})] == ["a[0].b"]


def test_every_target_of_the_package_is_ours() -> None:
    import yaml

    from trainrun.config import conf_dir

    for path in conf_dir().rglob("*.yaml"):
        assert list(foreign_nodes(yaml.safe_load(path.read_text()))) == [], path


@pytest.mark.parametrize(
    ("target", "known"),
    [("own.Net", True), ("own.torch.load", False), ("own.load", False), ("own.Missing", False), ("own", False),
     ("pack.Net", True), ("pack.own.Net", True), ("out.Net", False), ("..own.Net", False)],
)  # fmt: skip
def test_what_a_file_here_defines(tmp_path: Path, target: str, known: bool) -> None:
    here = tmp_path / "here"
    (here / "pack").mkdir(parents=True)
    text = "import torch\nfrom torch import load\nclass Net: ...\n"
    for path in (
        here / "own.py",
        here / "pack" / "__init__.py",
        here / "pack" / "own.py",
        tmp_path / "out.py",
    ):
        path.write_text(text)
    (here / "out.py").symlink_to(tmp_path / "out.py")
    assert is_defined(target, here) is known


def test_links_that_stay_inside_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "b").symlink_to("a")
    check_files(tmp_path, trust=False)
    (tmp_path / "c").symlink_to("/etc")
    with pytest.raises(ConfigError, match=r"c: leads out of the run folder, to /etc"):
        check_files(tmp_path, trust=False)
    check_files(tmp_path, trust=True)


def test_a_run_folder_reads_no_references(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunDir(run).config
    config.write_text(config.read_text().replace("run_name: digits", "run_name: ${oc.env:HOME}"))
    assert main(["evaluate", str(run)]) == 2
    assert "run_name=${oc.env:HOME}" in capsys.readouterr().err


def test_without_a_home_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under a number that has no name."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert own_key(make=True) == b""
