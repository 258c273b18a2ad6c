"""Whoever wants to understand a default step, a save, or what an override becomes, opens few files."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import trainrun
from trainrun.assemble.assemble import RunContext, build_components
from trainrun.checkpoint.manager import CheckpointManager
from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import MicroBatch, StepReport
from trainrun.parallel.single import Single
from trainrun.runtime.signals import StopFlag
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.loop import fit

pytestmark = pytest.mark.train
PACKAGE = Path(trainrun.__file__).parent
MOST_FILES, MOST_FILES_OF_A_SAVE = 12, 8
LEAVES = ("model/", "task/")  # what a user's own file would be in place of
SEEN_AT = 6  # a step in the steady state, behind the first log points

STEP = {
    "checkpoint/manager.py", "interfaces.py", "optimizer/plain_step.py", "parallel/single.py",
    "precision/gradients.py", "precision/update.py", "scheduler/schedule.py", "timing/phases.py",
    "training/components.py", "training/recovery/oom.py", "training/train_step.py", "training/triggers.py",
}  # fmt: skip


# The parts of a run whose state is saved aside: each gives it in its own file.
SAVE = {
    "checkpoint/files.py", "checkpoint/manager.py", "checkpoint/save.py", "folder/run_folder.py",
    "monitor/metric_rows.py", "parallel/single.py", "train_state.py", "training/triggers.py",
}  # fmt: skip


def files_of_a_step(folder: Path) -> set[str]:
    """The files of the package whose functions one step of the default run calls."""
    config = compose_run(["trainer.max_steps=9", f"output_dir={folder}"]).config
    site = RunContext(RunDir(folder), "step", Single(torch.device("cpu")), StopFlag(), [])
    run, _ = build_components(config, site)
    plain, state, found = run.step, TrainState(), set[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    def step(run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        if state.step != SEEN_AT:
            return plain(run, micro_batches)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return plain(run, micro_batches)
        finally:
            sys.setprofile(before)

    fit(replace(run, step=step), state)
    return found


def test_a_default_step_is_in_few_files(tmp_path: Path) -> None:
    found = {name for name in files_of_a_step(tmp_path) if not name.startswith(LEAVES)}
    assert found <= STEP, "a file more is one more to open: is it worth that?"
    assert {"training/train_step.py", "precision/update.py"} <= found  # the step was seen
    assert len(STEP) <= MOST_FILES


def files_of_saves(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files of the package whose functions the saves of a short run call, without those of `checkpoint_tree`."""
    found = set[str]()
    save, tree = CheckpointManager.save, Components.checkpoint_tree

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    def noted_save(manager: CheckpointManager, run: Any, state: TrainState) -> None:
        sys.setprofile(note)
        try:
            save(manager, run, state)
        finally:
            sys.setprofile(None)

    def unnoted_tree(run: Components, state: TrainState) -> Any:
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            return tree(run, state)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(CheckpointManager, "save", noted_save)
    monkeypatch.setattr(Components, "checkpoint_tree", unnoted_tree)
    trainrun.train(
        "trainer.max_steps=4", "checkpoint.every_n_train_steps=2", "monitor.plots=false", "output_dir=run"
    )
    return found


def test_a_save_is_in_few_files(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = files_of_saves(monkeypatch)
    assert found <= SAVE, "a file more is one more to open: is it worth that?"
    assert {
        "checkpoint/manager.py",
        "checkpoint/save.py",
        "monitor/metric_rows.py",
    } <= found  # a save was seen
    assert len(SAVE) <= MOST_FILES_OF_A_SAVE


# From the command line to the optimizer: what receives an override, or its value without the rest of the config.
OVERRIDE = {
    "assemble/optimizer_and_schedule.py", "cli/main.py", "cli/train_command.py",
    "config/aliases.py", "config/argv.py", "config/compose.py", "config/overrides.py", "config/saved_values.py",
    "config/schema.py", "config/validate.py", "folder/run_folder.py", "folder/seal.py", "instantiate.py",
    "limits.py", "optimizer/build_optimizer.py", "output.py", "runs/run.py",
}  # fmt: skip
OVERRIDE_KEY, OVERRIDE_VALUE = "optimizer.lr", 0.0123


def holds_override(value: Any, depth: int = 4) -> bool:
    """Whether a value is the override, or a small container with it. A whole config is none."""
    if isinstance(value, str):
        return OVERRIDE_KEY in value or str(OVERRIDE_VALUE) in value
    if isinstance(value, float):
        return value == OVERRIDE_VALUE
    if isinstance(value, dict):
        value = [*value, *value.values()]
    elif is_dataclass(value) and not type(value).__name__.endswith(("Config", "Composition")):
        value = [getattr(value, field.name, None) for field in fields(value)]
    return (
        depth > 0
        and isinstance(value, (list, tuple, set))
        and any(holds_override(part, depth - 1) for part in value)
    )


def files_of_an_override() -> set[str]:
    """The files of the package whose functions get the override of a run, until its optimizer is built."""
    found, is_built = set[str](), False

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_built
        if event != "call" or is_built:
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            if any(holds_override(value) for value in list(frame.f_locals.values())):
                found.add(path.relative_to(PACKAGE).as_posix())
        else:
            is_built = frame.f_code is torch.optim.AdamW.__init__.__code__

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        main(
            [
                f"{OVERRIDE_KEY}={OVERRIDE_VALUE}",
                "trainer.max_steps=1",
                "monitor.plots=false",
                "output_dir=run",
            ]
        )
    finally:
        sys.setprofile(before)
    return found


def test_an_override_is_in_few_files(workdir: Path) -> None:
    found = files_of_an_override()
    assert found <= OVERRIDE, "a file more is one more to open: is it worth that?"
    assert {"config/overrides.py", "optimizer/build_optimizer.py"} <= found  # it was seen from end to end
