"""TensorBoard: every number of a run as a curve, in `tensorboard/` of the run folder.

When: to follow several runs in a browser (`tensorboard --logdir outputs`) while they train. When not: for one run
`report.html` and `metrics.jsonl` have the same. Cost: about 0.1 ms a number at log points, on the training's thread;
the file is written by a thread of its own. Source: https://www.tensorflow.org/tensorboard
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainrun.errors import ConfigError
from trainrun.interfaces import RunFacts

FOLDER = "tensorboard"
PLACES = ("step", "epoch", "time")  # of a row, and no curves


class TensorBoard:
    """A tracker: `monitor.NAME._target_=trainrun.monitor.tensorboard.TensorBoard`.

    log_dir: where the event files go; null is `tensorboard/` in the run folder. A resumed run goes on in the same
    place: what lies behind the step that it begins with is taken away.
    Raises ConfigError without the package `tensorboard`.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"monitor: TensorBoard needs a package that is not there ({error}): pip install "
                "'trainrun[tensorboard]'"
            ) from error
        self._writer_class: Any = SummaryWriter
        self._log_dir = log_dir
        self._writer: Any = None

    def on_start(self, facts: RunFacts, step: int) -> None:
        folder = Path(self._log_dir) if self._log_dir else Path(facts.folder) / FOLDER
        self._writer = self._writer_class(str(folder), purge_step=step + 1 if step else None)
        config = json.dumps(facts.config, indent=2, default=str)
        self._writer.add_text("run", f"{facts.name} ({facts.run_id})", step)
        self._writer.add_text("config", "    " + config.replace("\n", "\n    "), step)  # Markdown's code

    def on_row(self, row: Mapping[str, Any]) -> None:
        step, seconds = row["step"], row["time"]
        if row["kind"] == "note":
            self._writer.add_text("notes", row["text"], step, seconds)
        for name, value in scalars_of(row):
            self._writer.add_scalar(name, value, step, seconds)

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The curves of a row: `train/loss`, `lr`, `hardware/memory_bytes`, `phases/forward` in seconds."""
    kind = row["kind"]
    if kind == "ledger":
        yield from ((f"phases/{name}", value) for name, value in row["seconds"].items())
    elif kind in ("train", "eval", "test", "hardware", "vae"):
        prefix = f"{kind}/" if kind in ("hardware", "vae") else ""
        for name, value in row.items():
            if name not in PLACES and isinstance(value, int | float):
                yield prefix + name, value
