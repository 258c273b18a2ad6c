"""Every mistake gives one short message, exit code 2 and no traceback."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from approved import approve_error
from quiet_runs import QUIET

from trainrun.cli.main import main

CODE = """
import torch
from torch import nn

class Wrong(nn.Module):
    def __init__(self, outputs=7):
        super().__init__()
        self.layer = nn.Linear(64, outputs)
    def forward(self, x):
        return self.layer(x.flatten(1))

class Flat(Wrong):
    def forward(self, x):
        return super().forward(x).sum(1)

class Breaks(nn.Module):
    def __init__(self):
        raise RuntimeError("no such thing")

def empty():
    return torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long)

def labels(highest=10):
    return torch.rand(64, 1, 8, 8), torch.full((64,), highest)

def unequal():
    return torch.rand(64, 64), torch.zeros(63, dtype=torch.long)

def names():
    return [(torch.rand(64), "cat") for _ in range(40)]

def pixels():
    return torch.zeros(64, 1, 8, 8, dtype=torch.uint8), torch.zeros(64, dtype=torch.long)

class Forgetful(Wrong):
    def __init__(self):
        super().__init__(10)
    def forward(self, x):
        return self.forgotten(x)

class Quitting(Forgetful):
    def forward(self, x):
        raise SystemExit(3)

class NoStep:
    def count(self, batch):
        return len(batch[1])

class Bare(NoStep):
    def step(self, model, batch):
        return model(batch[0]).sum()

def strange():
    return 17

"""
SHORT = [*QUIET, "trainer.max_epochs=1"]


@pytest.fixture
def project(workdir: Path) -> Iterator[Path]:
    (workdir / "own.py").write_text(CODE)
    (workdir / "broken.py").write_text("class Net(:\n")
    yield workdir
    sys.modules.pop("own", None)


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer=muon", "model.hidden=[]"],
        ["nonsense"],
        ["model"],
        ["evaluate"],
        ["--config-dir=nowhere"],
        ["model._target_=own.Breaks"],
        ["model._target_=own.Wrong"],
        ["model._target_=own.Flat"],
        ["model=nowhere.Net"],
        ["model=broken.Net"],
        ["data=image_folder", "data.path=nowhere"],
        ["data.train._target_=own.empty"],
        ["data.train._target_=own.names", "model=own.Wrong"],
        ["data.train._target_=own.pixels", "data.num_classes=10"],
        ["task=own.NoStep"],
        ["task=own.Bare"],
        ["data.train._target_=own.labels", "data.shape=[1,8,8]", "data.num_classes=10"],
        ["data.train._target_=own.unequal"],
        ["data.train._target_=own.strange"],
        ["data.batch_size=5000"],
        ["data.global_batch_size=100"],
        ["data=arrays"],
        ["data=arrays", "data.path=missing.npz"],
        ["data=fashion_mnist", "data.path=missing"],
        ["ckpt_path=missing"],
        ["ckpt_path=own.py"],
        ["checkpoint.monitor=val/f1"],
        ["task=regression"],
        ["parallel.accelerator=cuda"],
        ["scheduler=cosine", "scheduler.warmup_steps=100000"],
        ["model._target_=own.Breaks", "scheduler.warmup_epochs=1000"],
        ["output_dir=own.py"],
        ["output_dir=own.py/run"],
        ["resume", "nowhere"],
        ["evaluate", "nowhere"],
        ["report", "nowhere"],
        ["hydra.sweep.dir=b"],
        ["--multirun", "seed=1,2", "output_dir=a", "hydra.sweep.dir=b"],
        ["--multirun", "model=cnnn,mlp"],
        ["--multirun", "model.activation=relu,reul"],
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_short_message(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    quiet = [] if words[0] in ("resume", "evaluate", "report", "nonsense") else SHORT
    assert main([*words, *quiet]) == 2
    errors = capsys.readouterr().err
    approve_error(errors)
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) <= 2
    assert len(errors) < 600
    assert {path.name for path in project.iterdir()} <= {"own.py", "broken.py", "__pycache__"}


def test_all_target_faults_are_listed_before_anything_is_built(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "model._target_=own.Wrong",
        "model.outptus=3",
        "optimizer.momentun=1",
        "optimizer._target_=torch.optim.SGD",
    ]
    assert main([*words, *SHORT]) == 2
    errors = capsys.readouterr().err
    assert "outptus" in errors
    assert "momentun" in errors


def test_a_run_folder_is_never_written_over(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "output_dir=run"]) == 0
    before = (project / "run" / "status.json").read_text()
    assert main([*SHORT, "optimizer.lr=0.25", "data.batch_size=7", "output_dir=run"]) == 2
    said = capsys.readouterr().err
    assert "already contains a run" in said
    assert "data.batch_size=32 (here 7)" in said
    assert "optimizer.lr=0.001 (here 0.25)" in said
    assert f"trainrun resume {project / 'run'}" in said
    assert (project / "run" / "status.json").read_text() == before


@pytest.mark.parametrize(("model", "cause"), [("Forgetful", "forgotten"), ("Quitting", "own.py line ")])
def test_a_failed_run_says_so_in_its_folder(project: Path, model: str, cause: str) -> None:
    assert main([f"model=own.{model}", "trainer.check_task=false", *SHORT, "output_dir=run"]) == 1
    status = json.loads((project / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert cause in status["message"]


def test_a_refused_run_takes_away_what_it_wrote_and_nothing_else(project: Path) -> None:
    """The folder that was there stays with its files; a folder above a new one goes if it was made for it."""
    (project / "mine" / "inside").mkdir(parents=True)
    (project / "mine" / "notes.txt").write_text("x")
    (project / "above").mkdir()
    before = sorted(project.rglob("*"))
    for folder in ("mine", "above/a/b", "new"):
        assert main([f"output_dir={folder}", "model=own.Wrong", *SHORT]) == 2
        assert [path for path in sorted(project.rglob("*")) if "__pycache__" not in path.parts] == before


def test_a_refused_run_leaves_what_the_users_code_wrote_into_its_folder(project: Path) -> None:
    (project / "loads.py").write_text(
        "import pathlib, torch\n\ndef data(path):\n"
        "    pathlib.Path(path).mkdir()\n    pathlib.Path(path, 'loaded.bin').write_text('x')\n"
        "    return torch.zeros(8, 4), torch.zeros(8).long()\n"
    )
    words = ["output_dir=run", "data.train._target_=loads.data", "data.train.path=run/data", "data.val=null"]
    assert main([*words, "data.batch_size=100"]) == 2
    assert [path.name for path in (project / "run").iterdir()] == ["data"]
    assert (project / "run" / "data" / "loaded.bin").exists()


@pytest.mark.parametrize(
    "word",
    ["checkpoint.monitor=val/accc", "trainer.early_stopping.monitor=val/accc", "scheduler.metric=val/accc"],
)
def test_an_unknown_metric_is_refused_before_the_training(
    project: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert main([word, "early_stopping=true", "scheduler=plateau", *SHORT, "output_dir=run"]) == 2
    approve_error(capsys.readouterr().err)
    assert not (project / "run").exists()


@pytest.mark.parametrize("word", ["model.hidden=[32]", "transform.lora.alpha=3", "transform.lora=null"])
def test_a_refused_resume_leaves_the_run_as_it_was(
    project: Path, refuses: Callable[..., None], word: str
) -> None:
    lora = ["transform.lora=trainrun.transform.lora.lora", "transform.lora.alpha=16"]
    assert main([*SHORT, *lora, "trainer.max_steps=2", "output_dir=run"]) == 0
    before = [(project / "run" / name).read_text() for name in ("status.json", "config.yaml")]
    refuses(["resume", "run", word, "trainer.max_steps=3"])
    assert [(project / "run" / name).read_text() for name in ("status.json", "config.yaml")] == before
    assert main(["resume", "run", "trainer.max_steps=3"]) == 0


def test_a_checkpoint_of_another_model_is_refused(project: Path, refuses: Callable[..., None]) -> None:
    assert main([*SHORT, "output_dir=run"]) == 0
    refuses([*SHORT, "model.hidden=[32]", "ckpt_path=run", "output_dir=other"], "differ")


def test_a_loss_that_is_not_finite_stops_the_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "optimizer=sgd", "optimizer.lr=1e30", "output_dir=run"]) == 1
    errors = capsys.readouterr().err
    assert "trainer.nan_policy" in errors
    assert "Traceback" not in errors
    assert json.loads((project / "run" / "status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("variable", ["", "1"])
def test_the_traceback_is_there_for_who_asks(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("TRAINRUN_FULL_ERROR", variable)
    assert main(["model=cnnn"]) == 2
    assert ("Traceback" in capsys.readouterr().err) == (variable == "1")


@pytest.mark.process
@pytest.mark.parametrize(("check", "code"), [("true", 2), ("false", 1)])  # before the first step, or in it
@pytest.mark.parametrize("parallel", ["single", "ddp"])
def test_a_bug_of_the_users_shows_their_line(
    project: Path, capsys: pytest.CaptureFixture[str], parallel: str, check: str, code: int
) -> None:
    line = CODE.splitlines().index("        return self.forgotten(x)") + 1
    words = ["model=own.Forgetful", f"parallel={parallel}", f"trainer.check_task={check}", *SHORT]
    assert main(words) == code
    said = capsys.readouterr().err
    assert "no attribute 'forgotten'" in said
    assert f"own.py line {line}" in said or f'own.py", line {line}' in said
    assert "_call_impl" not in said
    assert "runner.py" not in said


def test_a_named_folder_is_free_again_after_a_failure_that_saved_nothing(
    project: Path, refuses: Callable[..., None]
) -> None:
    assert main(["hydra.run.dir=r", "model=own.Wrong", *SHORT]) == 2
    assert main(["hydra.run.dir=r", *SHORT]) == 0
    rows = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows].count("start") == 1
    refuses(["hydra.run.dir=r", *SHORT, "seed=5"])


def test_a_run_that_trained_without_checkpoints_is_not_taken_away_by_other_words(
    project: Path, refuses: Callable[..., None]
) -> None:
    words = [*SHORT[:-1], "trainer.max_steps=4", "checkpoint.enabled=false", "output_dir=r"]
    assert main(words) == 0
    status = json.loads(Path("r/status.json").read_text())
    Path("r/status.json").write_text(json.dumps(status | {"state": "stopped"}))
    rows = Path("r/metrics.jsonl").read_bytes()
    refuses([*words, "optimizer.lr=0.5"], "optimizer.lr")
    assert Path("r/metrics.jsonl").read_bytes() == rows
    assert main(words) == 0


def test_a_name_with_a_slash_stays_below_outputs(project: Path) -> None:
    assert main([*SHORT[:-1], "trainer.max_steps=1", "run_name=../../b"]) == 0
    (folder,) = Path("outputs").glob("*/*/RUN.json")
    assert "-..-..-b-" in folder.parent.name


def test_files_that_no_run_made_stay_as_they_are(project: Path, refuses: Callable[..., None]) -> None:
    for name in ("config.yaml", "metrics.jsonl", "environment.json", "report.html", "plots/loss.png"):
        folder = project / name.partition(".")[0]
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("mine: 1\n")
        refuses([f"output_dir={folder}", *SHORT], name)
        assert (folder / name).read_text() == "mine: 1\n"


def test_checkpoints_of_another_run_are_not_mixed_with_new_ones(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(project))
    assert main(["output_dir=r", *SHORT]) == 0
    steps = sorted(Path("r/checkpoints").iterdir())
    for path in Path("r").glob("*.*"):
        path.unlink()
    Path("new").mkdir()
    Path("new/checkpoints").symlink_to(Path("r/checkpoints").absolute())
    for name in ("r", "new"):
        capsys.readouterr()
        assert main([f"output_dir={name}", *SHORT]) == 2
        assert "contains checkpoints but no RUN.json, so no run wrote it" in capsys.readouterr().err
    assert sorted(Path("r/checkpoints").iterdir()) == steps


def test_a_failure_leaves_no_config_of_a_resume_to_the_next_run(project: Path) -> None:
    assert main(["output_dir=r", "model=own.Forgetful", "trainer.check_task=false", *SHORT]) == 1
    Path("r/.config-before.yaml").write_bytes(Path("r/config.yaml").read_bytes())  # as kill -9 leaves it
    assert main(["output_dir=r", *SHORT]) == 0
    assert not Path("r/.config-before.yaml").exists()


def test_a_run_that_goes_on_keeps_its_seed(project: Path, refuses: Callable[..., None]) -> None:
    assert main(["trainer.max_steps=1", *SHORT, "output_dir=r"]) == 0
    refuses(["resume", "r", "seed=null"])


def test_checkpoints_on_another_disk(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that this user trained through is followed; one that leads elsewhere now, or is anybody else's, is not."""
    monkeypatch.setenv("HOME", str(project))
    words = ["output_dir=r", *SHORT]
    for name in ("disk", "other", "r"):
        Path(name).mkdir()
    link = Path("r/checkpoints")
    link.symlink_to(Path("disk").absolute())
    assert main(words) == 0
    assert main(words) == 0
    assert main(["resume", "r"]) == 0
    Path("r").rename("moved")
    assert main(["evaluate", "moved"]) == 0
    Path("moved").rename("r")
    monkeypatch.setenv("XDG_STATE_HOME", str(project / "nobody"))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"leads out of the run folder to {project / 'disk'}" in said
    assert f"trainrun resume {project / 'r'} --trust" in said
    monkeypatch.setenv("HOME", str(project))
    link.unlink()
    link.symlink_to("../other")
    assert main(words) == 2
    assert main(["resume", "r", "--trust"]) == 0
    assert main(["resume", "r"]) == 0
    capsys.readouterr()
    assert main(["resume", "r", "trainer.max_epochs=2"]) == 2
    approve_error(capsys.readouterr().err)  # they are on the first disk


AGAIN = pytest.mark.parametrize(
    "again", [["output_dir=r", *SHORT], ["resume", "r", "--trust"]], ids=["words", "resume"]
)


@AGAIN
def test_a_folder_that_was_emptied_begins_no_run_anew(
    project: Path, capsys: pytest.CaptureFixture[str], again: list[str]
) -> None:
    assert main(["output_dir=r", *SHORT]) == 0
    status = json.loads(Path("r/status.json").read_text())
    Path("r/status.json").write_text(json.dumps(status | {"state": "stopped"}))
    rows = Path("r/metrics.jsonl").read_bytes()
    Path("r/checkpoints").rename("away")
    Path("r/checkpoints").mkdir()
    for _ in range(2):
        assert main(again) == 2
        said = capsys.readouterr().err
        assert "r/checkpoints: no checkpoint is in this folder, but RUN.json says that one was saved" in said
        assert Path("r/metrics.jsonl").read_bytes() == rows
    Path("r/checkpoints").rmdir()  # as the message says
    assert main(again) == 0
    assert "starts again from its beginning" in capsys.readouterr().out


@AGAIN
def test_a_disk_that_is_not_there_begins_no_run_anew(
    project: Path, refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch, again: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(project))
    for name in ("disk", "r"):
        Path(name).mkdir()
    Path("r/checkpoints").symlink_to(Path("disk").absolute())
    assert main(["output_dir=r", *SHORT]) == 0
    status = json.loads(Path("r/status.json").read_text())
    Path("r/status.json").write_text(json.dumps(status | {"state": "stopped"}))
    Path("disk").rename("away")
    files = {path: path.read_bytes() for path in Path("r").glob("[!.]*.*")}
    assert len(files) >= 4
    refuses(again)
    assert {path: path.read_bytes() for path in Path("r").glob("[!.]*.*")} == files
    Path("away").rename("disk")
    assert main(again) == 0


def test_a_setting_of_a_loop_that_is_not_named(project: Path, refuses: Callable[..., None]) -> None:
    refuses(["loop.val_check_interval=10", *SHORT, "output_dir=r"])
    assert not Path("r").exists()


def raise_full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")


def test_a_full_disk_is_a_failed_run_that_says_how_it_goes_on(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainrun.monitor.metric_rows.MetricsFile.write", raise_full_disk)
    assert main([*SHORT, "output_dir=run"]) == 1
    told = f"No space left on device; free space, then: trainrun resume {project / 'run'}"
    approve_error(capsys.readouterr().err)
    status = json.loads((project / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert told in status["message"]


def no_identity(run: Path) -> None:
    (run / "RUN.json").unlink()
    (run / ".RUN.json").unlink()


def damaged_identity(run: Path) -> None:
    (run / "RUN.json").write_text("{")
    (run / ".RUN.json").write_text("{")


def damaged_config(run: Path) -> None:
    (run / "config.yaml").write_text("data: [")


def empty_config(run: Path) -> None:
    (run / "config.yaml").write_text("")


def plots_is_a_file(run: Path) -> None:
    (run / "plots").write_text("")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_identity, ["evaluate", "run"]),
        (no_identity, ["resume", "run", "trainer.max_epochs=2"]),
        (damaged_identity, ["predict", "run"]),
        (damaged_config, ["report", "run", "other"]),
        (empty_config, ["evaluate", "run"]),
        (plots_is_a_file, ["report", "run"]),
        (plots_is_a_file, ["report", "run", "other", "--out", "run/plots"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_run_folder_that_is_not_whole(
    project: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], words: list[str]
) -> None:
    for name in ("run", "other"):
        assert main([*SHORT, f"output_dir={name}"]) == 0
    damage(project / "run")
    assert main(words) == 2
    errors = capsys.readouterr().err
    approve_error(errors)
    assert "Traceback" not in errors


ASSERTS = """
import torch
class Net(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += self.training
        if self.calls > 3:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\\nCUDA kernel errors might be ...")
        return super().forward(x.flatten(1))
"""


def test_an_index_out_of_range_on_a_gpu_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "asserts.py").write_text(ASSERTS)
    words = ["model._target_=asserts.Net", "model.in_features=64", "model.out_features=10"]
    assert main([*words, "monitor.plots=false", "output_dir=run"]) == 1
    errors = capsys.readouterr().err
    assert "at step 4 or just before: an index was out of range on the GPU" in errors
    assert "parallel.accelerator=cpu names its value" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("status", ["[", "[]", "{}"])
def test_a_status_that_cannot_be_read_stops_nobody(project: Path, status: str) -> None:
    assert main([*SHORT, "output_dir=run"]) == 0
    (project / "run" / "status.json").write_text(status)
    assert main(["resume", "run"]) == 0
    assert json.loads((project / "run" / "status.json").read_text())["state"] == "done"
