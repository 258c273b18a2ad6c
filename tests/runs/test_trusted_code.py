"""Whose code a run folder may name without a question."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainrun
from trainrun.cli.main import main
from trainrun.config.saved_values import foreign_parts
from trainrun.errors import ConfigError
from trainrun.runs.run_folder import RunDir, read_identity, write_identity
from trainrun.runs.trusted_code import add_to_list, check_files, list_file, listed
from trainrun.sweep.run_sweep import job_command

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


@pytest.fixture(autouse=True)
def _list_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")


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
    began = f"the run began in {run.parent}: call this from there, or PYTHONPATH={run.parent}"
    assert began in said
    assert main(["evaluate", str(run)]) == 2
    assert began in capsys.readouterr().err
    with pytest.raises(trainrun.TrainrunError, match="no module own_net .*; the run began in"):
        trainrun.load_model(run)


def test_a_file_that_a_training_takes_away_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "walk", lambda root: [(str(root), [], ["gone"])])
    check_files(tmp_path, trust=False)


def test_code_beside_config_dir_is_found_again(
    workdir: Path, refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(workdir / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (workdir / "project" / "conf" / "model").mkdir(parents=True)
    (workdir / "project" / "beside_net.py").write_text(NET)
    (workdir / "project" / "conf" / "model" / "mine.yaml").write_text("_target_: beside_net.Net\n")
    code, before = "--config-dir=project/conf", [*sys.path]
    monkeypatch.setattr(sys, "argv", ["trainrun", code])
    assert main(["model=mine", code, *QUIET, "output_dir=run"]) == 0
    for words in (["resume", "run", "trainer.max_steps=3"], ["evaluate", "run"], ["again", "run"]):
        sys.modules.pop("beside_net")
        sys.path[:] = before
        refuses(words, f"the run began in {workdir}: call this from there with the same")
        assert main([*words, code]) == 0
    Path("run/checkpoints/step-00000003").mkdir(exist_ok=True)
    assert job_command([code, "a=1"], Path("run"))[-3:] == ["resume", "run", code]
    sys.modules.pop("beside_net")


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
    run: Path, monkeypatch: pytest.MonkeyPatch, refuses: Callable[..., None]
) -> None:
    monkeypatch.setenv("HOME", str(run.parent / "nobody"))
    sys.modules.pop("own_net", None)
    for words in (["evaluate", str(run)], ["predict", str(run)], ["resume", str(run), "trainer.max_steps=3"]):
        refuses(words, "model._target_=own_net.Net; nothing was imported")
    with pytest.raises(ConfigError, match="own_net"):
        trainrun.load_model(run)
    assert "own_net" not in sys.modules
    assert main(["evaluate", str(run), "--trust"]) == 0
    assert trainrun.load_model(run, trust=True) is not None
    assert main(["evaluate", str(run), "model._target_=own_net.Net"]) == 0


def test_a_folder_unpacked_beside_own_code_is_asked_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, refuses: Callable[..., None]
) -> None:
    """What lies in the working directory may have come in the same archive."""
    monkeypatch.chdir(run.parent)
    assert main(["evaluate", str(run)]) == 0
    monkeypatch.setenv("HOME", str(run.parent / "nobody"))
    sys.modules.pop("own_net", None)
    for words in (["evaluate", str(run)], ["resume", str(run), "trainer.max_steps=3"]):
        refuses(words, "Where you trust this folder: --trust, or name it again, as model._target_=")
    assert "own_net" not in sys.modules
    assert main(["resume", str(run), "trainer.max_steps=3", "--trust"]) == 0
    assert main(["resume", str(run), "trainer.max_steps=4"]) == 0  # it is listed now


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [("cache: none", "cache: disk:{}", "data.cache=disk:{}"),
     ("  train:\n", "  train:\n    cache_dir: {}\n", "data.train.cache_dir={}"),
     ("run_name: digits-Net", "run_name: ${{oc.env:HOME}}", "run_name=${{oc.env:HOME}}")],
)  # fmt: skip
def test_a_folder_to_write_to_and_the_environment_are_asked_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, refuses: Callable[..., None], old: str, new: str, told: str
) -> None:
    config = RunDir(run).config
    (outside := run.parent / "outside").mkdir()
    monkeypatch.setenv("HOME", str(run.parent / "nobody"))
    config.write_text(config.read_text().replace(old, new.format(outside)))
    refuses(
        ["evaluate", str(run), "model._target_=own_net.Net"], f"{told.format(outside)}; nothing was imported"
    )
    assert list(outside.iterdir()) == []


def test_a_node_that_was_changed_is_no_longer_known(run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("own_net.Net", "own_net.Net\n  width: 3"))
    assert main(["evaluate", str(run)]) == 2


def test_a_line_of_the_list_holds_for_its_run_only(run: Path) -> None:
    write_identity(RunDir(run), read_identity(RunDir(run)) | {"run_id": "0123456789abcdef"})
    assert main(["evaluate", str(run)]) == 2


def test_a_run_of_ours_alone_is_not_listed(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workdir))
    assert main([*QUIET, "output_dir=run"]) == 0
    assert not list_file().exists()


def test_the_list_is_a_plain_file_for_its_owner_alone(run: Path) -> None:
    place = run.parent / "home/.local/state/trainrun/runs"
    assert list_file() == place
    assert place.stat().st_mode & 0o777 == 0o600
    lines = place.read_text().split("\n")[1:]
    assert [line.split(" ")[1] for line in lines] == [repr(str(run))]
    assert main(["resume", str(run), "trainer.max_steps=3"]) == 0
    assert place.read_text().split("\n")[1:] == lines  # once


def test_the_name_of_a_folder_adds_no_line_of_its_own(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workdir / "home"))
    folder = RunDir(workdir / ("x\n" + "0" * 64))
    folder.root.mkdir()
    folder.identity.write_text('{"run_id": "ab"}')
    add_to_list(folder, {"_target_": "own.Net"})
    assert len(listed() - {""}) == 1
    assert "0" * 64 not in listed()


@pytest.mark.parametrize(
    "target",
    ["torch.nn.Linear", "torch.optim.SGD", "torch.optim.lr_scheduler.StepLR", "trainrun.model.mlp.Mlp",
     "trainrun.data.readers.tables.csv_files.load", "trainrun.data.digits.load", "trainrun.data.formats.text.load",
     "trainrun.scheduler.curves.wsd", "trainrun.data.augment.flip.RandomFlip", "trainrun.transform.lora.lora",
     "trainrun.hook.unfreeze.Unfreeze"],
)  # fmt: skip
def test_what_is_ours(target: str) -> None:
    assert list(foreign_parts({"model": {"_target_": target}})) == []


@pytest.mark.parametrize(
    "target",
    ["torch.load", "torch.nn.modules.module.torch.load", "torch.nn.Linear.x", "trainrun.cli.main.main",
     "torch.nn.linear", "trainrun.model.mlp.torch.load", "torch.hub.load", "trainrun.runs.run_folder.write_text",
     "torch.nn.Linear\n", 3, [], ""],
)  # fmt: skip
def test_what_is_not(target: Any) -> None:
    assert [part.key for part in foreign_parts({"a": [{"b": {"_target_": target}}]})] == ["a.0.b._target_"]


def test_a_teacher_that_is_code_is_not_and_one_that_is_a_run_is_asked_itself() -> None:
    config = {"task": {"_target_": "trainrun.task.distillation.Distillation", "teacher": "my_net.teacher"}}
    assert [part.key for part in foreign_parts(config)] == ["task.teacher"]
    config["task"]["teacher"] = "runs/first"
    assert list(foreign_parts(config)) == []


def test_every_target_of_the_package_is_ours() -> None:
    import yaml

    from trainrun.config.argv import conf_dir

    for path in conf_dir().rglob("*.yaml"):
        parts = foreign_parts(yaml.safe_load(path.read_text()))
        assert [part for part in parts if isinstance(part.content, dict)] == [], path


def test_links_that_stay_inside_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "b").symlink_to("a")
    check_files(tmp_path, trust=False)
    (tmp_path / "c").symlink_to("/etc")
    with pytest.raises(ConfigError, match=r"c: leads out of the run folder, to /etc"):
        check_files(tmp_path, trust=False)
    check_files(tmp_path, trust=True)


def test_without_a_home_nothing_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container under a number that has no name."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    folder = RunDir(tmp_path)
    folder.identity.write_text('{"run_id": "ab"}')
    add_to_list(folder, {"_target_": "own.Net"})
    assert listed() == set()
