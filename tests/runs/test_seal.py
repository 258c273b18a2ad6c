"""A run folder that this user has not sealed is obeyed only with `--trust`, and then as a whole."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from approved import approve_error, refused

import trainrun
from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.folder import seal
from trainrun.folder.run_folder import RunDir, read_identity, write_identity
from trainrun.folder.seal import KEY_BYTES, check_files, find_key_path, is_sealed, make_key
from trainrun.sweep.job_queue import job_command

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
    monkeypatch.setenv("XDG_STATE_HOME", str(workdir / "state"))
    (workdir / "own_net.py").write_text(NET)
    assert main(["model=own_net.Net", *QUIET, "output_dir=run"]) == 0
    (workdir / "else").mkdir()
    monkeypatch.chdir(workdir / "else")
    yield workdir / "run"
    sys.modules.pop("own_net", None)


@pytest.fixture
def another_user(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def change() -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(Path.cwd() / "state of another"))
        sys.modules.pop("own_net", None)

    return change


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_own_run_needs_no_word(run: Path) -> None:
    assert main(["evaluate", str(run)]) == 0
    assert main(["resume", str(run), "trainer.max_steps=3"]) == 0
    assert main(["evaluate", str(run)]) == 0
    shutil.copytree(run, "copy")
    shutil.move(run, "moved")
    assert trainrun.load_model("moved") is not None
    assert main(["resume", "copy", "trainer.max_steps=4"]) == 0
    shutil.rmtree("moved")
    Path("moved").mkdir()
    for path in Path("copy").glob("[!.]*"):  # as `cp -r copy/* moved`
        shutil.move(path, "moved")
    assert main(["evaluate", "moved"]) == 0


@pytest.mark.parametrize(
    ("key", "text"),
    [("progress_bar: false", "progress_bar: false\n  csv: {{_target_: trainrun.trackers.csv_file.CsvFile, path: {}}}"),
     ("cache: none", "cache: disk:{}"),
     ("  train:\n", "  train:\n    cache_dir: {}\n"),
     ("run_name: digits-Mlp", "run_name: ${{oc.env:HOME}}"),
     ("max_steps: 2", "max_steps: 3")],
    ids=["tracker", "cache", "cache_dir", "environment", "number"],
)  # fmt: skip
def test_no_setting_of_a_changed_config_is_obeyed(
    workdir: Path, capsys: pytest.CaptureFixture[str], key: str, text: str
) -> None:
    """Each part of the config alone would be harmless to some rule; the folder is refused as a whole."""
    outside = workdir / "outside"
    outside.mkdir()
    assert main([*QUIET, "run_name=digits-Mlp", "output_dir=run"]) == 0
    edit(workdir / "run" / "config.yaml", key, text.format(outside / "rows.csv"))
    for words in (["evaluate", "run"], ["resume", "run", "trainer.max_steps=4"], ["again", "run"]):
        assert main(words) == 2
        assert "config.yaml" in capsys.readouterr().err
    with refused(ConfigError, "--trust"):
        trainrun.load_model("run")
    assert list(outside.iterdir()) == []


def test_the_directory_where_a_run_began_and_its_secrets_are_sealed(
    run: Path, refuses: Callable[..., None]
) -> None:
    edit(run / "environment.json", str(run.parent), "/etc")
    refuses(["evaluate", str(run)], "environment.json")
    edit(run / "environment.json", "/etc", str(run.parent))
    assert main(["evaluate", str(run)]) == 0
    (run / ".secrets.json").write_text('{"monitor.x.api_key": "theirs"}')
    refuses(["evaluate", str(run)], ".secrets.json")


def test_a_damaged_file_that_nobody_obeys_asks_nothing(run: Path) -> None:
    for name in ("environment.json", "overrides.txt", "status.json", "metrics.jsonl"):
        (run / name).write_bytes(b"\xff")
    assert main(["evaluate", str(run)]) == 0
    assert main(["resume", str(run), "trainer.max_steps=3"]) == 0


def test_where_the_code_is_not_the_run_says_where_it_began(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.modules.pop("own_net", None)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(run.parent)])
    assert main(["resume", str(run), "trainer.max_steps=3"]) == 2
    said = capsys.readouterr().err
    assert f"no module own_net (looked in {Path.cwd()}, PYTHONPATH" in said
    began = f"the run began in {run.parent}: run this command there, or set PYTHONPATH={run.parent}"
    assert began in said
    assert main(["evaluate", str(run)]) == 2
    approve_error(capsys.readouterr().err)
    with refused(trainrun.TrainrunError):
        trainrun.load_model(run)


def test_a_file_that_a_training_takes_away_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "walk", lambda root: [(str(root), [], ["gone"])])
    check_files(tmp_path, trust=False)


def test_code_beside_config_dir_is_found_again(
    workdir: Path, refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        refuses(words)
        assert main([*words, code]) == 0
    Path("run/checkpoints/step-00000003").mkdir(exist_ok=True)
    assert job_command([code, "a=1"], Path("run"))[-3:] == ["resume", "run", code]
    sys.modules.pop("beside_net")


def test_a_folder_that_is_refused_stays_as_it_is(run: Path, another_user: Callable[[], None]) -> None:
    """The words of a resume that never began are taken back by whoever may go on, by nobody else."""
    shutil.copy(run / "config.yaml", run / ".config-before.yaml")
    files = [path for path in run.iterdir() if path.is_file() and path.name != ".lock"]
    before = [path.read_bytes() for path in files]
    another_user()
    assert main(["resume", str(run)]) == 2
    assert [path.read_bytes() for path in files] == before


def test_the_run_of_another_user_is_refused_until_it_is_trusted_once(
    run: Path, another_user: Callable[[], None], refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside the code that it names, which may have come in the same archive."""
    monkeypatch.chdir(run.parent)
    another_user()
    for words in (
        ["evaluate"],
        ["predict"],
        ["resume", "trainer.max_steps=3"],
        ["export", "--to", "onnx"],
        ["again"],
    ):
        refuses([words[0], str(run), *words[1:]])
    with refused(ConfigError, "--trust"):
        trainrun.load_model(run)
    assert "own_net" not in sys.modules
    assert not find_key_path().exists()
    assert main(["resume", str(run), "trainer.max_steps=3", "--trust"]) == 0
    assert main(["resume", str(run), "trainer.max_steps=4"]) == 0
    assert main(["evaluate", str(run)]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "state"))
    refuses(["evaluate", str(run)], "config.yaml")  # the other user has changed it
    assert main(["evaluate", str(run), "--trust"]) == 0
    another_user()
    assert main(["evaluate", str(run)]) == 0  # both users have sealed the folder


def test_python_trusts_a_folder_once_too(run: Path, another_user: Callable[[], None]) -> None:
    another_user()
    assert trainrun.load_model(run, trust=True) is not None
    assert trainrun.load_model(run) is not None


def test_a_run_of_trainrun_alone_is_asked_for_too(
    workdir: Path, another_user: Callable[[], None], refuses: Callable[..., None]
) -> None:
    assert main([*QUIET, "output_dir=run"]) == 0
    another_user()
    make_key()
    refuses(["evaluate", "run"], "--trust")


def test_a_folder_of_an_earlier_version_is_asked_for_once(run: Path, refuses: Callable[..., None]) -> None:
    for path in run.glob("seal-*"):
        path.unlink()
    refuses(["evaluate", str(run)], "--trust")
    assert main(["evaluate", str(run), "--trust"]) == 0
    assert main(["resume", str(run), "trainer.max_steps=3"]) == 0


def test_the_same_command_needs_no_seal_and_makes_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it obeys is on its command line, as in a container that is started again without a home."""
    monkeypatch.chdir(run.parent)
    for path in run.glob("seal-*"):
        path.unlink()
    edit(run / "status.json", '"state": "done"', '"state": "stopped"')
    assert main(["model=own_net.Net", *QUIET, "output_dir=run"]) == 0
    assert list(run.glob("seal-*")) == []


def test_a_seal_holds_for_its_run_only(run: Path, refuses: Callable[..., None]) -> None:
    write_identity(RunDir(run), read_identity(RunDir(run)) | {"run_id": "0123456789abcdef"})
    refuses(["evaluate", str(run)], "--trust")


@pytest.mark.parametrize("moment", ["after the seal", "after the config"])
def test_a_resume_that_is_killed_while_it_writes_the_config_leaves_a_sealed_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    from trainrun.runs import run as runs

    write = runs.write_text

    def write_then_die(path: Path, text: str, durable: bool = False) -> None:
        if moment == "after the config" or path.name != "config.yaml":
            write(path, text, durable)
        raise MemoryError(moment)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_text", write_then_die)
        with suppress(MemoryError):
            main(["resume", str(run), "trainer.max_steps=3"])
    assert is_sealed(RunDir(run))
    assert main(["resume", str(run), "trainer.max_steps=4"]) == 0


def test_the_key_is_a_plain_file_for_its_owner_alone(run: Path, refuses: Callable[..., None]) -> None:
    path = run.parent / "state" / "trainrun" / "key"
    assert path == find_key_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == KEY_BYTES
    assert path.read_bytes() not in b"".join(file.read_bytes() for file in run.glob("seal-*"))
    path.chmod(0o640)
    refuses(["evaluate", str(run)])
    path.chmod(0o600)
    assert main(["evaluate", str(run)]) == 0


def test_runs_that_begin_together_have_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with ThreadPool(4) as pool:
        keys = [pool.apply_async(make_key) for _ in range(8)]
        assert {key.get() for key in keys} == {make_key()}


@pytest.mark.parametrize("kind", ["no home", "cannot be written"])
def test_without_a_place_for_the_key_a_run_trains_and_says_what_follows(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """As in a container under a number that has no name, or with a home that can only be read."""
    if kind == "no home":
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        (workdir / "file").write_text("")
        monkeypatch.setenv("XDG_STATE_HOME", str(workdir / "file"))
    assert main([*QUIET, "output_dir=run"]) == 0
    approve_error(capsys.readouterr().err, "XDG_STATE_HOME")
    assert main(["resume", "run", "trainer.max_steps=3"]) == 2
    assert main(["resume", "run", "trainer.max_steps=3", "--trust"]) == 0
    assert main(["evaluate", "run"]) == 2


def test_a_teacher_is_asked_for_by_its_folder(
    workdir: Path, another_user: Callable[[], None], refuses: Callable[..., None]
) -> None:
    assert main([*QUIET, "output_dir=teacher"]) == 0
    words = ["task=distillation", "task.teacher=teacher", *QUIET]
    another_user()
    refuses([*words, "output_dir=a"], "--trust")
    assert main(["evaluate", "teacher", "--trust"]) == 0
    assert main([*words, "output_dir=b"]) == 0


def test_links_that_stay_inside_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "b").symlink_to("a")
    check_files(tmp_path, trust=False)
    (tmp_path / "c").symlink_to("/etc")
    with refused(ConfigError, "/etc"):
        check_files(tmp_path, trust=False)
    check_files(tmp_path, trust=True)


def test_a_changed_link_is_asked_for(run: Path, refuses: Callable[..., None]) -> None:
    shutil.move(run / "checkpoints", run.parent / "away")
    (run / "checkpoints").symlink_to(run.parent / "away")
    assert [name for name, _ in seal.iterate_outward_links(run)] == [run / "checkpoints"]
    refuses(["evaluate", str(run)], "--trust")
    assert main(["evaluate", str(run), "--trust"]) == 0
    assert main(["evaluate", str(run)]) == 0
