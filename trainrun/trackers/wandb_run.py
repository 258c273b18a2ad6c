"""Weights & Biases: curves, histograms, images and the config on https://wandb.ai, or offline in the folder
`wandb/`.

When: several people follow the runs in a browser. When not: data must not leave the machine (mode=offline writes
    files that `wandb sync` sends later). The API key is that of `wandb login` or WANDB_API_KEY. Source:
    https://docs.wandb.ai
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainrun.trackers.packages import require_package


class WandbRun:
    """A tracking service: `monitor.tracker=wandb`. mode: online or offline; null for WANDB_MODE, or online."""

    def __init__(self, project: str = "trainrun", entity: str | None = None, mode: str | None = None) -> None:
        require_package("wandb", "wandb")
        self._arguments: dict[str, Any] = {"project": project, "entity": entity, "mode": mode}
        self._run: Any = None

    def open(self, run: Mapping[str, Any], step: int) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            **self._arguments, id=run["run_id"], name=run["name"], resume="allow",
            config=dict(run["config"]), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # W&B's own counter refuses what a resume does again

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log({**values, "step": step, "_timestamp": seconds})

    def text(self, name: str, text: str, step: int) -> None:
        import html

        import wandb

        self._run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>"), "step": step})

    def histogram(self, name: str, low: float, high: float, counts: list[int], step: int) -> None:
        import numpy as np
        import wandb

        edges = np.linspace(low, high, len(counts) + 1)
        self._run.log({name: wandb.Histogram(np_histogram=(np.asarray(counts), edges)), "step": step})

    def picture(self, name: str, path: str, step: int) -> None:
        import wandb

        self._run.log({name: wandb.Image(path), "step": step})

    def finish(self) -> None:
        self._run.finish()
