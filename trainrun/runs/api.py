"""A run that was trained: its config, its numbers, and its model, from the folder alone."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainrun.config.compose import compose_run, load_config
from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError, TrainingError
from trainrun.monitor.metrics_rows import read_rows
from trainrun.runs.run import LaunchSpec, begun, open_run, start
from trainrun.runs.run_folder import RunDir, read_json
from trainrun.seeding import kept_random_state

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Run:
    """One run folder, read when asked. trust: it may name code that is not known to be the user's own."""

    folder: Path
    trust: bool = False

    @property
    def files(self) -> RunDir:
        return RunDir(self.folder)

    @property
    def config(self) -> RunConfig:
        return load_config(self.files.config, [])

    @property
    def status(self) -> dict[str, Any]:
        """`status.json`: state, reason, best value, step, seconds."""
        status: dict[str, Any] = read_json(self.files.status)
        return status

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All rows of `metrics.jsonl`; `kind` says of what."""
        return read_rows(self.files.metrics)

    def load_model(self, which: str = "best") -> nn.Module:
        """The trained network in evaluation mode, on the CPU. which: best, last, or a checkpoint's name.

        It takes inputs as a batch of the run had them: pictures scaled (0 to 1 of `data=image_folder`), and
        normalised where `data.augment.normalize` was.
        """
        from trainrun.runs.restore_config import load_model

        return load_model(self.files, which, self.trust)


def load_run(run_dir: str | Path, trust: bool = False) -> Run:
    """A run folder as an object. Raises ConfigError if there is none.

    trust: `load_model` follows whatever code the folder names, as `trainrun evaluate --trust` does.
    """
    return Run(open_run(run_dir, "run_dir").root, trust)


def train(*words: str) -> Run:
    """Trains as the command `trainrun` with the same words does, and returns the run.

    Raises TrainrunError; a run that was stopped by a signal is returned, with `status["state"]`
    "stopped".
    """
    for word in words:
        if not isinstance(word, str) or (word.startswith("-") and not word.startswith("--config-dir=")):
            raise ConfigError(
                f"trainrun.train({word!r}): takes key=value words, as train('data=digits', 'seed=1')"
            )
    began = time.perf_counter()
    composition = compose_run(list(words))
    paths = [path for path in sys.path if path]
    # a notebook's own random numbers go on as if nothing had been trained
    with begun(composition, list(words)) as (run, config, again), kept_random_state():
        code = start(run, config, LaunchSpec(again, paths, began))
    if code == TrainingError.exit_code:
        raise TrainingError(f"{run.root}: {read_json(run.status)['message']}")
    return Run(run.root)
