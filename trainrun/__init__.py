"""Train PyTorch models from one command, or from Python with the same settings.

run = trainrun.train("data=digits", "trainer.max_epochs=5")
model = run.load_model("best")
"""

from __future__ import annotations

from importlib import import_module
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

    which: best, last, or a checkpoint's name. By default the best, or the last if no metric chose a best one.
    trust: use a folder from somebody else, with all code that it names.
    model: a network built like the one that the run got from Python (`trainrun.train(model=...)`).
    merge: return a plain network, with the LoRA corrections added to its weights.
    """
    from trainrun.runs.api import load_run

    return load_run(run_dir, trust).load_model(which, model, merge)


MODULES = {  # of the public names
    **dict.fromkeys(("Run", "load", "load_run", "train"), "trainrun.runs.api"),
    **dict.fromkeys(INTERFACES, "trainrun.interfaces"),
    "TrainrunError": "trainrun.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that the command line does not import everything."""
    if name not in MODULES:
        raise AttributeError(f"module 'trainrun' has no attribute '{name}'")
    return getattr(import_module(MODULES[name]), "load_run" if name == "load" else name)
