"""A run folder with damage outside of its checkpoints: one line, and the run goes on to the same bits."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from approved import approve_error

from trainrun.checkpoint.load import read_checkpoint
from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.folder.status import read_status
from trainrun.runs.failures import explain_os_error

WORDS = [
    "model.hidden=[8]", "trainer.max_steps=4", "checkpoint.every_n_train_steps=2", "checkpoint.keep_last=3",
    "monitor.hardware=false", "monitor.plots=false", "monitor.progress_bar=false", "trainer.num_threads=1",
    "checkpoint.async_save=false",
]  # fmt: skip
LAST = "checkpoints/step-00000004"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that came to its end."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("whole")
        patch.chdir(folder)
        assert main([*WORDS, "output_dir=run"]) == 0
        yield folder / "run"


@pytest.fixture
def run(whole: Path, workdir: Path) -> Path:
    """The same, killed behind step 2."""
    shutil.copytree(whole, workdir / "run")
    shutil.rmtree(workdir / "run" / LAST)
    status = json.loads((workdir / "run" / "status.json").read_text()) | {"state": "running"}
    (workdir / "run" / "status.json").write_text(json.dumps(status))
    return workdir / "run"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_the_command_to_go_on_quotes_its_folder(tmp_path: Path, number: int) -> None:
    run = RunDir(tmp_path / "my run")
    run.identity.parent.mkdir()
    run.identity.touch()
    fault = explain_os_error(run, OSError(number, os.strerror(number), "/there"))
    assert str(fault).endswith(f"trainrun resume '{run.root}'")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x80  # no UTF-8 any more
    path.write_bytes(data)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def null(path: Path) -> None:
    path.write_text("null\n")


@pytest.mark.parametrize("again", [False, True], ids=["resume", "same command"])
@pytest.mark.parametrize("damage", [flip, folder, loop, null])
@pytest.mark.parametrize("name", ["status.json", "RUN.json"])
def test_what_is_not_needed_is_set_aside(
    run: Path,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    damage: Callable[[Path], None],
    again: bool,
) -> None:
    damage(run / name)
    assert main([*WORDS, "output_dir=run"] if again else ["resume", "run"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "set aside as" in line]
    assert len(said) == 1
    assert f"{name}: is " in said[0]
    ends = [read_checkpoint(place / LAST) for place in (run, whole)]
    assert all(
        torch.equal(value, ends[1].shared["model"][key]) for key, value in ends[0].shared["model"].items()
    )
    assert read_status(RunDir(run))["state"] == "done"
    assert read_identity(RunDir(run))["run_id"] == ends[1].manifest.run_id
    assert json.loads((run / "RUN.json").read_text())["run_id"] == ends[1].manifest.run_id


@pytest.mark.parametrize("damage", [flip, folder, loop])
def test_the_words_are_written_anew(run: Path, damage: Callable[[Path], None]) -> None:
    damage(run / "overrides.txt")
    assert main(["resume", "run"]) == 0
    assert (run / "overrides.txt").read_text().splitlines() == [*WORDS, "output_dir=run"]


def test_damaged_rows_are_left_out_and_kept_aside(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (run / "metrics.jsonl").read_text().splitlines()
    bad = ['{"kind": "train", "step": "x"}', '{"kind": []}', "{", '{"kind": "end", "summary": 3}']
    (run / "metrics.jsonl").write_text("".join(f"{row}\n" for row in [*rows, *bad]))
    assert main(["resume", "run"]) == 0
    approve_error(capsys.readouterr().err)
    assert len((run / ".bad-metrics.jsonl-1").read_text().splitlines()) == len(rows) + 4
    assert main(["report", "run"]) == 0


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "train", "step": 1, "train/loss": None},
        {"kind": "eval", "step": None, "val/loss": 1.0},
        {"kind": "ledger", "step": 1, "seconds": {"data": "x"}},
        {"kind": "confusion", "step": 1, "matrix": [[1, 2], [3]]},
        {"kind": "start", "step": 0, "facts": {"steps_per_epoch": []}},
        {"kind": "end", "step": 1, "summary": {"metrics": 3}},
        {"kind": "note", "step": 1, "text": None},
    ],
)
def test_a_row_that_no_run_writes_is_named(
    run: Path, refuses: Callable[..., None], row: dict[str, object]
) -> None:
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    refuses(["report", "run"])


def test_a_config_that_was_changed_is_obeyed_once_it_is_trusted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 4", "max_steps: 3"))
    assert main(["resume", "run"]) == 2
    approve_error(capsys.readouterr().err, "config.yaml")
    assert main(["resume", "run", "--trust"]) == 0
    assert (run / "checkpoints" / "step-00000003").is_dir()
    assert main(["resume", "run"]) == 0


def test_a_damaged_config_says_how_to_go_on(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = read_identity(RunDir(run))["seed"]
    flip(run / "config.yaml")
    assert main(["resume", "run"]) == 2
    way = f"overrides.txt and seed={seed} ckpt_path={run}"
    said = capsys.readouterr().err
    assert way in said
    assert len(said.splitlines()) == 1
    assert main([*WORDS, f"seed={seed}", f"ckpt_path={run}", "output_dir=other"]) == 0
    ends = [read_checkpoint(place / LAST).shared["model"] for place in (run.parent / "other", whole)]
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())
