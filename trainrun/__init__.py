"""Trains a PyTorch model from one command; from Python with the same words.

run = trainrun.train("data=digits", "trainer.max_epochs=5")
model = run.load_model("best")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from trainrun.errors import TrainrunError as TrainrunError
    from trainrun.interfaces import MicroBatch as MicroBatch
    from trainrun.interfaces import StepInfo as StepInfo
    from trainrun.interfaces import StepOutput as StepOutput
    from trainrun.interfaces import StepReport as StepReport
    from trainrun.runs.api import Run as Run
    from trainrun.runs.api import load_run as load
    from trainrun.runs.api import load_run as load_run
    from trainrun.runs.api import train as train

INTERFACES = (
    "MicroBatch",
    "StepInfo",
    "StepOutput",
    "StepReport",
)  # what tasks and steps are given and return

__all__ = ["Run", "TrainrunError", "load", "load_model", "load_run", "train", *INTERFACES]


def load_model(
    run_dir: str | Path,
    which: str | None = None,
    trust: bool = False,
    model: nn.Module | None = None,
    merge: bool = False,
) -> nn.Module:
    """Return the trained network of a run folder, in evaluation mode, on the CPU.

    which: best, last, or a checkpoint's name; without it the best, or the last where no metric chose a best one. trust:
    the folder is from somebody else, and all that it names may be used.
    model: the like of that which the run was given, of a run of objects (`trainrun.train(model=...)`). merge: a plain
    network, with what LoRA learned in its weights.
    """
    from trainrun.runs.api import load_run

    return load_run(run_dir, trust).load_model(which, model, merge)


def __getattr__(name: str) -> Any:
    """Imported when asked for: the command line must not pay for it."""
    if name in ("Run", "load", "load_run", "train"):
        from trainrun.runs import api as record

        return getattr(record, "load_run" if name == "load" else name)
    if name == "TrainrunError":
        from trainrun.errors import TrainrunError

        return TrainrunError
    if name in INTERFACES:
        from trainrun import interfaces

        return getattr(interfaces, name)
    raise AttributeError(f"module 'trainrun' has no attribute '{name}'")
