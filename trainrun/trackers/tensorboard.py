"""TensorBoard: every number of a run as a curve, in `tensorboard/` of the run folder.

When: to follow several runs in a browser while they train (`tensorboard --logdir outputs`). When not: a single run,
    for which `report.html` and `metrics.jsonl` have the same. Cost: a thread that writes. Source:
    https://www.tensorflow.org/tensorboard
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainrun.trackers.packages import require_package

FOLDER = "tensorboard"


class TensorBoard:
    """A tracking service: `monitor.tracker=tensorboard`.

    log_dir: the folder in which each run gets a folder with its name and id; null for `tensorboard/` in the run
        folder. A resumed run continues in the same folder, without the rows after the step at which it resumes.
        Raises ConfigError if the package `tensorboard` is missing.
    """

    def __init__(self, log_dir: str | None = None) -> None:
        require_package("tensorboard", "tensorboard")
        self._log_dir = log_dir
        self._writer: Any = None

    def open(self, run: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # half a second, on the thread that sends

        run_folder = f"{run['name']}-{run['run_id']}"
        folder = Path(self._log_dir, run_folder) if self._log_dir else Path(run["folder"], FOLDER)
        writer_class: Any = SummaryWriter
        self._writer = writer_class(str(folder), purge_step=step + 1 if step else 0, flush_secs=10)
        config = json.dumps(run["config"], indent=2, default=str)
        self._writer.add_text("run", f"{run['name']} ({run['run_id']})", step)
        self._writer.add_text("config", "    " + config.replace("\n", "\n    "), step)  # Markdown's code

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, seconds)

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, text, step)

    def histogram(self, name: str, low: float, high: float, counts: list[int], step: int) -> None:
        width = (high - low) / len(counts)
        edges = [low + width * (i + 1) for i in range(len(counts))]
        middles = [edge - width / 2 for edge in edges]
        total = sum(value * count for value, count in zip(middles, counts, strict=True))
        squares = sum(value * value * count for value, count in zip(middles, counts, strict=True))
        self._writer.add_histogram_raw(name, low, high, sum(counts), total, squares, edges, counts, step)

    def picture(self, name: str, path: str, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def finish(self) -> None:
        self._writer.close()
