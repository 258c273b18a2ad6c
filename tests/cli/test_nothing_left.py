"""A command that is refused leaves no file and no folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from quiet_runs import QUIET

from trainrun.cli.main import main

NOWHERE = (
    "again nowhere", "evaluate nowhere", "predict nowhere", "embed nowhere --out x.npy", "sample nowhere --prompt a",
    "prune nowhere --amount 0.5", "quantize nowhere --to int8-dynamic", "export nowhere --to onnx", "watch nowhere",
    "compare nowhere nowhere", "ls nowhere", "resume nowhere", "report nowhere", "init_from=nowhere.pt",
    "convert nowhere x --to npy", "verify model=nowhere.Net", "model=nowhere.Net output_dir=a/b/c",
    "-m optimizer.lr=-1,1 output_dir=sweep", "-m optimizer.lr=1,2 sweep.jobs=0 output_dir=sweep",
    "sweep.jobs=2 output_dir=run",
)  # fmt: skip
IN_PROCESSES = (
    "autotune model=nowhere.Net",
    "diagnose data=image_folder data.path=nowhere",
)  # they measure in one
OF_A_RUN = (
    "evaluate run --split nope", "predict run nowhere.png", "predict run --out nowhere/x.csv", "export run --to nope",
    "embed run --layer nope --out x.npy", "prune run --amount 5", "quantize run --to nope", "report run --out there",
    "resume run data.batch_size=7", "again run optimizer.lr=-1 output_dir=next", "again run model=nowhere.Net",
    "evaluate run --which nope",
)  # fmt: skip


def files(folder: Path) -> list[str]:
    """Return what lies below a folder, but for the locks and the notes of a run that was there."""
    paths = (path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts)
    return [str(path) for path in paths if path.name != ".lock"]


@pytest.mark.parametrize(
    "words", [*NOWHERE, *(pytest.param(words, marks=pytest.mark.process) for words in IN_PROCESSES)]
)
def test_a_refused_command_leaves_nothing(workdir: Path, words: str) -> None:
    assert main(words.split()) == 2
    assert files(workdir) == []


def test_a_refused_command_on_a_run_leaves_the_run_alone(workdir: Path) -> None:
    assert main([*QUIET, "trainer.max_steps=2", "output_dir=run"]) == 0
    before = files(workdir)
    for words in OF_A_RUN:
        assert main(words.split()) == 2, words
        assert files(workdir) == before, words
